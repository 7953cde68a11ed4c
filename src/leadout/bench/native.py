"""The native engine as a contender: one generator at one way of choosing k, its rounds timed one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from leadout.bench.contender import Sample
from leadout.bench.memory import peak_bytes, reset_peak
from leadout.bench.workload import Workload
from leadout.draft_length.controller import Choice, DraftLength, RoundOutcome
from leadout.draft_length.load import Load
from leadout.pipeline.generate import generate
from leadout.pipeline.rollout_metrics import speculation_metrics
from leadout.records import Request, Rollout, RolloutId, SamplingParams
from leadout.rollout.engine import NativeGenerator


@dataclass(frozen=True, slots=True)
class Round:
    """When a round was over, and what it was."""

    end: float
    """Seconds of the monotonic clock."""
    rows: int
    num_drafts: int
    draft_seconds: float
    """Spent drafting."""
    verify_seconds: float
    """All the rest."""


class TimedLength:
    """A `DraftLength` that passes everything on and notes the end of each round."""

    def __init__(self, inner: DraftLength) -> None:
        self._inner = inner
        self.rounds: list[Round] = []

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        """As the inner one says."""
        return self._inner.choose(rows, load)

    def record(self, outcome: RoundOutcome) -> None:
        """Note the time, then pass on."""
        self.rounds.append(
            Round(
                end=time.perf_counter(),
                rows=len(outcome.drafted_B),
                num_drafts=outcome.num_drafts,
                draft_seconds=outcome.draft_seconds,
                verify_seconds=outcome.verify_seconds,
            )
        )
        self._inner.record(outcome)

    def state_dict(self) -> dict[str, object]:
        """Of the inner one."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Into the inner one."""
        self._inner.load_state_dict(state)

    def seconds(self, rows: int) -> list[float]:
        """Seconds of each round that, like the one before it, had this many rows.

        The first round is never among them: before it lies the prefill.
        """
        return [
            after.end - before.end
            for before, after in zip(self.rounds, self.rounds[1:], strict=False)
            if before.rows == after.rows == rows
        ]


class NativeContender:
    """`Contender` over a `NativeGenerator`; several may share one, since only one runs at a time."""

    def __init__(
        self, name: str, generator: NativeGenerator, draft_length: DraftLength, *, drafts: bool, warm_ups: int = 1
    ) -> None:
        """`drafts` False leaves the drafter out altogether: plain decoding."""
        self.name = name
        self.warm_ups = warm_ups
        self._generator = generator
        self._draft_length = draft_length
        self._drafts = drafts

    def run(self, workload: Workload, repeat: int) -> Sample:
        """One sample."""
        rollouts, seconds, timer, peak = self._timed(workload, repeat)
        full = timer.seconds(workload.rows)
        return Sample(
            seconds=seconds,
            tokens=sum(rollout.length for rollout in rollouts),
            peak_bytes=peak,
            round_seconds=float(np.median(full)) if full else None,
            spec=speculation_metrics(rollouts),
        )

    def timed_rounds(self, workload: Workload, repeat: int) -> tuple[TimedLength, float]:
        """The rounds of one generation, and the seconds of all of it."""
        _, seconds, timer, _ = self._timed(workload, repeat)
        return timer, seconds

    def timed_rollouts(self, workload: Workload, repeat: int) -> tuple[list[Rollout], float]:
        """The rollouts of one generation, and the seconds of all of it."""
        rollouts, seconds, _, _ = self._timed(workload, repeat)
        return rollouts, seconds

    def _timed(self, workload: Workload, repeat: int) -> tuple[list[Rollout], float, TimedLength, int]:
        timer = TimedLength(self._draft_length)
        generator = self._generator.variant(timer, drafts=self._drafts)
        requests = [
            Request(
                rollout_id=RolloutId(repeat * workload.rows + row, 0),
                prompt=prompt,
                params=SamplingParams(temperature=1.0, max_new_tokens=length, stop_token_ids=()),
            )
            for row, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True))
        ]
        own = [os.getpid()]
        reset_peak(own)
        began = time.perf_counter()
        rollouts = generate(generator, requests)
        return rollouts, time.perf_counter() - began, timer, peak_bytes(own)
