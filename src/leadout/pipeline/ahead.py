"""Generating a batch in a thread of its own while the caller learns from the one before.

The generator belongs to the thread until the block is left: nobody else may submit, refit or collect meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from leadout.interfaces import Generator
from leadout.pipeline.generate import generate
from leadout.records import Request, Rollout


class GeneratedAhead:
    """Context manager: generation begins on entering and is over on leaving, given up where nobody asked for it.

    Example: ``with GeneratedAhead(generator, requests, now) as ahead: learn(); failure = ahead.failure()``
    """

    def __init__(self, generator: Generator, requests: Sequence[Request], now: Callable[[], float]) -> None:
        """`now`: seconds from a fixed origin."""
        self._generator = generator
        self._requests = requests
        self._now = now
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="generate-ahead")
        self._future: Future[tuple[list[Rollout], float]] | None = None

    def __enter__(self) -> GeneratedAhead:
        self._future = self._threads.submit(self._generate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._threads.shutdown(wait=True)

    def failure(self) -> BaseException | None:
        """Wait until generation is over; what it raised, if it did."""
        assert self._future is not None, "generation begins on entering the block"
        return self._future.exception()

    def result(self) -> tuple[list[Rollout], float]:
        """Wait for the rollouts, one per request; and the seconds they took. Raises what generating raised."""
        assert self._future is not None, "generation begins on entering the block"
        return self._future.result()

    def _generate(self) -> tuple[list[Rollout], float]:
        begin = self._now()
        rollouts = generate(self._generator, self._requests, self._stop.is_set)
        return rollouts, self._now() - begin
