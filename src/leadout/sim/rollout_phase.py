"""The rollout stage of a synchronous step: every replica drains its share, the slowest one sets the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leadout.sim.drain import Intervals, merge_lockstep, order_events
from leadout.sim.generate import Generation, generate
from leadout.sim.kernel_tables import Floats
from leadout.sim.setup import Setup, prompts_drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutPhase:
    """One draw of lengths, generated."""

    lengths: Floats
    """[prompts, generations]"""
    replica_seconds_R: Floats
    generation: Generation
    """Intervals of all replicas, one after another."""
    replica_N: Floats
    """Replica of each interval."""

    @property
    def seconds(self) -> float:
        """The slowest replica."""
        return float(self.replica_seconds_R.max())

    @property
    def busy_seconds(self) -> float:
        """Sum over replicas."""
        return float(self.replica_seconds_R.sum())

    def live_rows(self, points: int = 200) -> tuple[Floats, Floats]:
        """(seconds, live rows of all replicas) on an even grid of times."""
        times = np.linspace(0.0, self.seconds, points)
        total = np.zeros(points)
        cost = self.generation.decode_s_N + self.generation.prefill_s_N
        for replica in np.unique(self.replica_N):
            mine = self.replica_N == replica
            ends = np.cumsum(cost[mine])
            index = np.searchsorted(ends, times, side="right")
            rows = np.append(self.generation.intervals.rows_N[mine], 0)
            total += rows[np.minimum(index, len(rows) - 1)]
        return times, total


def run_rollouts(setup: Setup, lengths: Floats) -> RolloutPhase:
    """Generate these lengths [prompts, generations] on all replicas."""
    workload = setup.scenario.workload
    shares = np.array_split(lengths.ravel(), setup.ranks)
    events = [
        order_events(
            share, workload.prompt_length, setup.slots, workload.num_generations, prefix_cache=workload.prefix_cache
        )
        for share in shares
        if len(share)
    ]
    width = setup.layout.data_parallel
    replicas = [merge_lockstep(events[i : i + width]) for i in range(0, len(events), width)]
    section = setup.scenario.speculation
    age = section.drafter_age if section is not None else 0.0
    whole, owner = concatenate(replicas)
    generation = generate(whole, setup.tables, setup.law, setup.k, age)
    cost = generation.decode_s_N + generation.prefill_s_N
    seconds = np.bincount(owner, weights=cost, minlength=setup.replicas)
    return RolloutPhase(
        lengths=lengths,
        replica_seconds_R=np.asarray(seconds, dtype=float),
        generation=generation,
        replica_N=owner.astype(float),
    )


def concatenate(parts: Sequence[Intervals]) -> tuple[Intervals, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """All intervals in one record, and the index of the part each came from."""
    owner = np.repeat(np.arange(len(parts)), [len(part.start_N) for part in parts])
    return (
        Intervals(
            start_N=np.concatenate([part.start_N for part in parts]),
            span_N=np.concatenate([part.span_N for part in parts]),
            rows_N=np.concatenate([part.rows_N for part in parts]),
            context_N=np.concatenate([part.context_N for part in parts]),
            prefill_tokens_N=np.concatenate([part.prefill_tokens_N for part in parts]),
            prefill_rows_N=np.concatenate([part.prefill_rows_N for part in parts]),
            recomputed=sum(part.recomputed for part in parts),
        ),
        owner,
    )


def draw_lengths(setup: Setup, draw: int) -> Floats:
    """Lengths of one draw; the same for every scenario with this law, seed and group layout."""
    scenario = setup.scenario
    return setup.lengths.draw(prompts_drawn(scenario), scenario.workload.num_generations, scenario.seed * 1000 + draw)
