"""Stage timers: how many seconds of a step went into which stage.

The pipeline wraps each stage of a step in `Clock.stage` and asks `Clock.finish_step` for the seconds at its end. The
same interface runs on the real clock (`Clock()`) and on one that only moves when it is told to (`SimulatedClock`),
so that tests and the simulator time a step without waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from leadout.records import Stage


class Clock:
    """Accumulates the seconds of each stage of the current step.

    Stages of a synchronous step do not overlap: entering one inside another is a mistake and asserted against.

    Args:
        now: returns seconds from any fixed origin, never running backwards.
        on_enter: told about each stage as it begins; a live display hangs here.

    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, on_enter: Callable[[Stage], None] | None = None
    ) -> None:
        self._now = now
        self._on_enter = on_enter
        self._seconds: dict[Stage, float] = {}
        self._running: Stage | None = None

    def now(self) -> float:
        """Seconds from a fixed origin."""
        return self._now()

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Time a block as part of `stage`; the same stage may be entered several times in a step."""
        assert self._running is None, f"stage {stage} entered inside stage {self._running}"
        if self._on_enter is not None:
            self._on_enter(stage)
        self._running = stage
        begin = self.now()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self.now() - begin
            self._running = None

    def finish_step(self) -> Mapping[Stage, float]:
        """Seconds of every stage of the step, 0 for those not entered; the next step starts from 0."""
        assert self._running is None, f"step finished inside stage {self._running}"
        seconds = {stage: self._seconds.get(stage, 0.0) for stage in Stage}
        self._seconds = {}
        return seconds


class SimulatedClock(Clock):
    """A clock that stands still until `advance` is called."""

    def __init__(self, on_enter: Callable[[Stage], None] | None = None) -> None:
        super().__init__(now=self._simulated_now, on_enter=on_enter)
        self._time = 0.0

    def _simulated_now(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        """Let `seconds` >= 0 pass."""
        assert seconds >= 0.0, f"time cannot run backwards, got {seconds} seconds"
        self._time += seconds
