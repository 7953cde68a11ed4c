"""The reward function `math`: is the completion's final answer mathematically equal to the ground truth?

math-verify parses and compares with sympy, which can run for hours on an unlucky expression, and its own time limit
is a signal that only a main thread may use. So it runs in a child process with a deadline per completion: the parent
may call from any thread, and a child that misses the deadline is killed and replaced.

Child protocol: one JSON list [answer, text] per line in, one JSON number (or null) per line out.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import IO

from leadout.errors import LeadoutError
from leadout.reward.completion import Completion

STARTUP_SECONDS = 120.0
"""The first answer of a child may take this much longer: it imports sympy."""


class MathReward:
    """1 where the final answer equals the ground truth, else 0; 0 too when comparing takes longer than the deadline."""

    def __init__(self, *, seconds: float = 10.0, command: Sequence[str] | None = None) -> None:
        """`seconds` per completion. `command` starts the child (another one in tests)."""
        self._seconds = seconds
        self._command = list(command or [sys.executable, "-m", "leadout.reward.math_worker"])
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        """Judge one completion after the other; callable from any thread, one caller at a time."""
        pairs = [(each.require_answer("math"), each.text) for each in completions]
        with self._lock:
            return [self._judge(answer, text) for answer, text in pairs]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _judge(self, answer: str, text: str) -> float | None:
        if self._child is None:
            self._child = _Child(self._command)
            self._child.ask(["1", "1"], STARTUP_SECONDS)
        try:
            return self._child.ask([answer, text], self._seconds)
        except TimeoutError:
            self.close()
            return 0.0


class _Child:
    """A running child process; a thread of its own reads the answers, so that waiting can end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the parent
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=_forward, args=(self._process.stdout, self._answers), daemon=True)
        reader.start()
        self.stop = weakref.finalize(self, _stop, self._process, reader)

    def ask(self, pair: list[str], seconds: float) -> float | None:
        """Send [answer, text], wait for the number.

        Raises:
            TimeoutError: no answer in time.
            LeadoutError: the child died.

        """
        try:
            self._stdin.write(json.dumps(pair) + "\n")
            self._stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise LeadoutError(
                f"the process that checks maths answers died on {pair[1]!r:.80}; check that math-verify works"
            )
        value = json.loads(line)
        return None if value is None else float(value)


def _forward(lines: IO[str], answers: queue.SimpleQueue[str]) -> None:
    """Put every line on the queue, then an empty one at the end."""
    for line in lines:
        answers.put(line)
    answers.put("")


def _stop(process: subprocess.Popen[str], reader: threading.Thread) -> None:
    process.kill()
    process.wait()
    reader.join()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            _close(stream)


def _close(stream: IO[str]) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        return  # a question that the child never read was still in the buffer
