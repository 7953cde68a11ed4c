"""Ctrl-C at a moment when the run's state is whole.

Until a step begins to change the learner, Ctrl-C stops at once and the step is dropped. From then until the step is
recorded it is held back; pressed a second time in that stretch it stops at once, and the run falls back to its newest
checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupts:
    """Context manager that takes over SIGINT while a run goes on (in the main thread only, where signals arrive).

    Args:
        on_held: called when Ctrl-C arrives while it is held back.

    """

    def __init__(self, on_held: Callable[[], None] = lambda: None) -> None:
        self._on_held = on_held
        self._holding = False
        self._pending = False
        self._previous: object = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def hold(self) -> None:
        """From here on the work at hand is finished first."""
        self._holding = True

    def release(self) -> None:
        """The work is done; raises KeyboardInterrupt if Ctrl-C came meanwhile."""
        self._holding = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @property
    def holding(self) -> bool:
        """Whether Ctrl-C is held back."""
        return self._holding

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._holding or self._pending:
            raise KeyboardInterrupt
        self._pending = True
        self._on_held()
