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
from leadout.sim.setup import Setup

MEASURED_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the batches of an asynchronous run."""

    started: tuple[float, ...]
    complete: tuple[float, ...]
    trained: tuple[float, ...]
    version_made: tuple[int, ...]
    busy: float
    """Replica-seconds of generation between the first and last measured update."""
    first: int
    """Index of the update that opens the measured window."""

    @property
    def step_s(self) -> float:
        """Mean seconds from one update to the next in the window."""
        return (self.trained[-1] - self.trained[self.first]) / (len(self.trained) - 1 - self.first)


def overlap(setup: Setup, phases: list[RolloutPhase], seconds: dict[Stage, float]) -> Projection:
    """Project an asynchronous scenario."""
    learner = learner_seconds(seconds)
    timeline = run_timeline(setup, phases, learner, seconds[Stage.REFIT])
    step = timeline.step_s
    exposed = {stage: 0.0 for stage in Stage}
    exposed |= {stage: seconds[stage] for stage in (Stage.REWARD, Stage.LOGPROB, Stage.TRAIN)}
    exposed[Stage.REFIT] = seconds[Stage.REFIT]
    exposed[Stage.ROLLOUT] = max(step - sum(exposed.values()), 0.0)
    scenario = setup.scenario
    steps = len(timeline.trained) - 1 - timeline.first
    busy = timeline.busy / steps * setup.layout.gpus + learner * scenario.training_gpus
    idle = scenario.gpus * sum(exposed.values()) - busy
    lags = [use - made for use, made in enumerate(timeline.version_made)][timeline.first :]
    return summarise(setup, phases, seconds, exposed, busy, idle, float(np.mean(lags)))


def learner_seconds(seconds: dict[Stage, float]) -> float:
    """What the learner's GPUs do for one update, weight transfer included."""
    return seconds[Stage.REWARD] + seconds[Stage.LOGPROB] + seconds[Stage.TRAIN] + seconds[Stage.REFIT]


def run_timeline(setup: Setup, phases: list[RolloutPhase], learner: float, refit: float) -> Timeline:
    """Simulate enough steps to measure a steady one."""
    staleness = setup.scenario.pipeline.max_staleness
    first = 2 * (staleness + 1)
    batches = first + 1 + max(MEASURED_STEPS, 2 * (staleness + 1))
    if setup.scenario.refit.method == "in_flight":
        return _in_flight(setup, learner, batches, first)
    return _draining(setup, phases, learner, refit, batches, first)


def _draining(
    setup: Setup, phases: list[RolloutPhase], learner: float, refit: float, batches: int, first: int
) -> Timeline:
    """A batch ends on every replica before the next starts with new weights."""
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
        complete.append(start + phases[b % len(phases)].seconds)
        trained.append(max(complete[-1], trained[-1] if trained else 0.0) + learner)
    window = phases[0].busy_seconds * (batches - 1 - first)
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
    """Rows of one batch, by replica."""
    workload = setup.scenario.workload
    lengths = draw_lengths(setup, batch % 64).ravel()
    group = workload.num_generations
    out: list[list[Row]] = []
    for share in np.array_split(np.arange(len(lengths)), setup.replicas):
        rows, seen = [], -1
        for i in share.tolist():
            fresh = not workload.prefix_cache or i // group != seen
            seen = i // group
            prompt = workload.prompt_length
            rows.append(
                Row(batch=batch, length=float(lengths[i]), prompt=prompt, prefill=prompt if fresh else 0.0)
            )
        out.append(rows)
    return out


def _in_flight(setup: Setup, learner: float, batches: int, first: int) -> Timeline:
    """Rows of several batches run side by side; updates do not wait for them."""
    scenario = setup.scenario
    staleness = scenario.pipeline.max_staleness
    age = scenario.speculation.drafter_age if scenario.speculation is not None else 0.0
    pace = Pace(setup.tables, setup.law, setup.k, age)
    slots = live_slots(setup, draw_lengths(setup, 0).ravel())
    replicas = [Replica(pace=pace, tables=setup.tables, slots=slots) for _ in range(setup.replicas)]
    total = scenario.workload.num_prompts * scenario.workload.num_generations
    left: dict[int, int] = {}
    started: list[float] = []
    made: list[int] = []
    complete: dict[int, float] = {}
    trained: list[float] = []
    busy_from, update_at, now = 0.0, inf, 0.0

    def release(time: float) -> None:
        version = len(trained)
        while may_start(version, len(started) - version, version, staleness) and len(started) < batches + staleness:
            rows = _rows(setup, len(started))
            left[len(started)] = sum(len(share) for share in rows)
            for replica, share in zip(replicas, rows, strict=True):
                replica.advance(time)
                replica.submit(share)
            started.append(time)
            made.append(version)

    def next_update(free: float) -> float:
        return max(complete[len(trained)], free) + learner if len(trained) in complete else inf

    release(0.0)
    events = [replica.next_event() for replica in replicas]
    while len(trained) < batches:
        soonest = min(events)
        r = events.index(soonest)
        if update_at <= soonest:
            now = update_at
            trained.append(now)
            if len(trained) - 1 == first:
                busy_from = sum(replica.busy for replica in replicas)
            if scenario.refit.recompute_kv:
                for replica in replicas:
                    replica.advance(now)
                    if replica.heap:
                        replica.stall(setup.tables.prefill(len(replica.heap), replica.context))
            release(now)
            update_at = next_update(now)
            events = [replica.next_event() for replica in replicas]
            continue
        now = soonest
        for batch in replicas[r].finish(now):
            left[batch] -= 1
            if left[batch] == 0:
                complete[batch] = now
        events[r] = replicas[r].next_event()
        if update_at == inf:
            update_at = next_update(now)
    assert total > 0
    busy = sum(replica.busy for replica in replicas) - busy_from
    return Timeline(
        started=tuple(started[:batches]),
        complete=tuple(complete[b] for b in range(batches)),
        trained=tuple(trained),
        version_made=tuple(made[:batches]),
        busy=busy,
        first=first,
    )


def draining_seconds(setup: Setup) -> float:
    """One batch on the generators, draining (for comparison)."""
    return run_rollouts(setup, draw_lengths(setup, 0)).seconds
