"""Generators and learner side by side: which batch may start when, and what the learner waits for.

Batch b is trained at version b and may start when the admission rule allows a rollout of the present version to be used
then (`leadout.pipeline.lag`, the same rule as in runs). With in-flight updates replicas work on rows of up to
max_staleness + 1 batches at once; without, a batch drains before new weights go in, so every update pays the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from leadout.pipeline.lag import may_start
from leadout.records import Stage
from leadout.sim.kernel_tables import Floats
from leadout.sim.project import Projection, summarise
from leadout.sim.replica import Pace, Replica, Row
from leadout.sim.rollout_phase import RolloutPhase, draw_lengths, run_rollouts
from leadout.sim.setup import Setup, rollouts_per_step

CYCLE = 3
"""Draws of lengths that follow one another again and again: every lag is measured on the same rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the batches of an asynchronous run."""

    started: tuple[float, ...]
    complete: tuple[float, ...]
    trained: tuple[float, ...]
    version_made: tuple[int, ...]
    busy: float
    """GPU-seconds of generation between the first and last measured update."""
    first: int
    """Index of the update that opens the measured window."""

    @property
    def step_s(self) -> float:
        """Mean seconds from one update to the next in the window."""
        return (self.trained[-1] - self.trained[self.first]) / (len(self.trained) - 1 - self.first)


def overlap(setup: Setup, phases: list[RolloutPhase], seconds: dict[Stage, float], *, quick: bool) -> Projection:
    """Project an asynchronous scenario; `quick` by its bounds alone, for ranges."""
    learner = learner_seconds(seconds)
    if quick:
        step, alone = _bound(setup, seconds, learner), sum(p.busy_seconds for p in phases) / len(phases)
        # A batch alone has a tail, which rows of the next ones fill; no GPU works for longer than the step.
        generating = min(alone * setup.layout.gpus, step * setup.scenario.generation_gpus)
        lags = [setup.scenario.pipeline.max_staleness]
    else:
        timeline = run_timeline(setup, learner, seconds[Stage.REFIT])
        step, generating = timeline.step_s, timeline.busy / (len(timeline.trained) - 1 - timeline.first)
        lags = [use - made for use, made in enumerate(timeline.version_made)][timeline.first :]
    exposed = dict.fromkeys(Stage, 0.0)
    exposed |= {stage: seconds[stage] for stage in (Stage.REWARD, Stage.LOGPROB, Stage.TRAIN)}
    exposed[Stage.REFIT] = seconds[Stage.REFIT]
    exposed[Stage.ROLLOUT] = max(step - sum(exposed.values()), 0.0)
    exposed[Stage.REWARD] += max(scoring_seconds(setup) - sum(exposed.values()), 0.0)
    scenario = setup.scenario
    busy = generating + learner * scenario.training_gpus
    idle = scenario.gpus * sum(exposed.values()) - busy
    return summarise(setup, phases, seconds, exposed, busy, idle, float(np.mean(lags)))


def _bound(setup: Setup, seconds: dict[Stage, float], learner: float) -> float:
    """Lower bound of a step: the learner, the generators' flow, and the time from start to use spread over the lag.

    A batch starts when the one lag + 1 before it was trained on, so lag + 1 steps hold its drain and its training.
    """
    staleness = setup.scenario.pipeline.max_staleness
    through = (seconds[Stage.ROLLOUT] + learner) / (staleness + 1)
    in_flight = setup.scenario.refit.method == "in_flight"
    flow = flow_seconds(setup, staleness + 1) if in_flight else seconds[Stage.ROLLOUT] + seconds[Stage.REFIT]
    return max(learner, through, flow if staleness else 0.0)


def scoring_seconds(setup: Setup) -> float:
    """Seconds the reward workers need for the rollouts of one step: no step is shorter, whatever overlaps."""
    section = setup.scenario.reward
    if setup.profile is not None:
        return 0.0
    return rollouts_per_step(setup.scenario) * section.seconds_per_sample / section.workers


def learner_seconds(seconds: dict[Stage, float]) -> float:
    """What the learner's GPUs do for one update, weight transfer included."""
    return seconds[Stage.REWARD] + seconds[Stage.LOGPROB] + seconds[Stage.TRAIN] + seconds[Stage.REFIT]


def run_timeline(setup: Setup, learner: float, refit: float) -> Timeline:
    """Simulate enough steps to measure a steady one."""
    staleness = setup.scenario.pipeline.max_staleness
    first = CYCLE * -(-2 * (staleness + 1) // CYCLE)
    batches = 2 * first + 1 + 2 * CYCLE
    if setup.scenario.refit.method == "in_flight":
        return _Flight(setup, learner, refit, batches, first).run()
    return _draining(setup, learner, refit, batches, first)


def _draining(setup: Setup, learner: float, refit: float, batches: int, first: int) -> Timeline:
    """A batch ends on every replica before the next starts with new weights."""
    phases = [run_rollouts(setup, draw_lengths(setup, draw)) for draw in range(CYCLE)]
    staleness = setup.scenario.pipeline.max_staleness
    started: list[float] = []
    complete: list[float] = []
    trained: list[float] = []
    made: list[int] = []
    for b in range(batches):
        version = next(v for v in range(b + 1) if may_start(v, b - v, v, staleness))
        ready = trained[version - 1] if version else 0.0
        start = max(complete[-1] + refit if complete else 0.0, ready)
        newest = sum(time <= start for time in trained)
        started.append(start)
        made.append(newest)
        complete.append(start + phases[b % CYCLE].seconds)
        trained.append(max(complete[-1], trained[-1] if trained else 0.0) + learner)
    window = sum(phases[b % CYCLE].busy_seconds for b in range(first + 1, batches)) * setup.layout.gpus
    return Timeline(
        started=tuple(started),
        complete=tuple(complete),
        trained=tuple(trained),
        version_made=tuple(made),
        busy=window,
        first=first,
    )


def live_slots(setup: Setup, lengths: Floats) -> int:
    """C = min(max_num_seqs, cache / mean live context); the lag bounds it through admission."""
    mean = setup.scenario.workload.prompt_length + float((lengths**2).sum() / (2 * lengths.sum()))
    slots = int(min(setup.slots.rows, max(setup.slots.tokens // mean, 1)))
    return min(slots, setup.tables.max_batch)


def _rows(setup: Setup, batch: int) -> list[list[Row]]:
    """Rows of one batch, by rank: ranks with data-parallel attention are followed one by one."""
    workload = setup.scenario.workload
    lengths = draw_lengths(setup, batch % CYCLE).ravel()
    group = workload.num_generations
    out: list[list[Row]] = []
    for share in np.array_split(np.arange(len(lengths)), setup.ranks):
        rows, seen = [], -1
        for i in share.tolist():
            fresh = not workload.prefix_cache or i // group != seen
            seen = i // group
            prompt = workload.prompt_length
            rows.append(Row(batch=batch, length=float(lengths[i]), prompt=prompt, prefill=prompt if fresh else 0.0))
        out.append(rows)
    return out


class _Flight:
    """Rows of several batches side by side; an update stops rounds for its transfer but does not wait for rows."""

    def __init__(self, setup: Setup, learner: float, refit: float, batches: int, first: int) -> None:
        scenario = setup.scenario
        age = scenario.speculation.drafter_age if scenario.speculation is not None else 0.0
        pace = Pace(setup.tables, setup.law, setup.k, age)
        slots = live_slots(setup, draw_lengths(setup, 0).ravel())
        self._setup, self._learner, self._batches, self._first = setup, learner, batches, first
        self._refit = refit
        self._staleness = scenario.pipeline.max_staleness
        self._replicas = [Replica(pace=pace, tables=setup.tables, slots=slots) for _ in range(setup.ranks)]
        self._left: dict[int, int] = {}
        self._started: list[float] = []
        self._made: list[int] = []
        self._complete: dict[int, float] = {}
        self._trained: list[float] = []
        self._busy_from = 0.0

    def run(self) -> Timeline:
        """Until all batches are trained on."""
        self._release(0.0)
        events = [replica.next_event() for replica in self._replicas]
        update_at = inf
        while len(self._trained) < self._batches:
            soonest = min(events)
            if update_at <= soonest:
                self._update(update_at)
                update_at = self._next_update(update_at)
                events = [replica.next_event() for replica in self._replicas]
                continue
            r = events.index(soonest)
            self._finish(r, soonest)
            events[r] = self._replicas[r].next_event()
            if update_at == inf:
                update_at = self._next_update(soonest)
        busy = sum(replica.busy for replica in self._replicas) - self._busy_from
        return Timeline(
            started=tuple(self._started[: self._batches]),
            complete=tuple(self._complete[b] for b in range(self._batches)),
            trained=tuple(self._trained),
            version_made=tuple(self._made[: self._batches]),
            busy=busy * self._setup.layout.tensor_parallel,
            first=self._first,
        )

    def _release(self, time: float) -> None:
        """Start every batch that the admission rule allows now."""
        version = len(self._trained)
        while len(self._started) < self._batches + self._staleness:
            if not may_start(version, len(self._started) - version, version, self._staleness):
                return
            rows = _rows(self._setup, len(self._started))
            self._left[len(self._started)] = sum(len(share) for share in rows)
            for replica, share in zip(self._replicas, rows, strict=True):
                replica.advance(time)
                replica.submit(share)
            self._started.append(time)
            self._made.append(version)

    def _update(self, time: float) -> None:
        """The learner publishes a version."""
        self._trained.append(time)
        for replica in self._replicas:
            replica.advance(time)
        if len(self._trained) - 1 == self._first:
            self._busy_from = sum(replica.busy for replica in self._replicas)
        for replica in self._replicas:
            if replica.heap:
                recompute = self._setup.scenario.refit.recompute_kv
                again = self._setup.tables.prefill(len(replica.heap), replica.context) if recompute else 0.0
                replica.stall(self._refit + again)
        self._release(time)

    def _finish(self, r: int, time: float) -> None:
        for batch in self._replicas[r].finish(time):
            self._left[batch] -= 1
            if self._left[batch] == 0:
                self._complete[batch] = time

    def _next_update(self, free: float) -> float:
        """When the learner is done with the batch it is on; infinite while it waits for rollouts."""
        batch = len(self._trained)
        return max(self._complete[batch], free) + self._learner if batch in self._complete else inf


def flow_seconds(setup: Setup, batches: int) -> float:
    """Seconds a batch takes when rows are replaced one by one and `batches` batches are always at work: no tail.

    C = min(slots, batches x N / replicas), t = N / replicas x mean length x t(C) / C / AL.
    """
    lengths = draw_lengths(setup, 0).ravel()
    share = len(lengths) / setup.ranks
    rows = max(1, min(live_slots(setup, lengths), int(batches * share)))
    age = setup.scenario.speculation.drafter_age if setup.scenario.speculation is not None else 0.0
    pace = Pace(setup.tables, setup.law, setup.k, age)
    context = setup.scenario.workload.prompt_length + float((lengths**2).sum() / (2 * lengths.sum()))
    choice = pace.choose(rows, context)
    round_s = pace.seconds(rows, choice, context, 1.0)
    return share * float(lengths.mean()) * round_s / rows / pace.length(choice)
