"""A peer's process: started, asked by JSON lines, stopped while others are measured, and ended for good.

A stopped process (SIGSTOP) takes no processor time, whatever threads of it would like to spin; `idle` proves it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from leadout.bench.memory import all_stopped, cpu_seconds, family, peak_bytes, reset_peak
from leadout.errors import LeadoutError

_END_SECONDS = 15.0
_STOP_SECONDS = 2.0
_PIECE = 1 << 16


@dataclass(slots=True, kw_only=True)
class Idle:
    """How a peer spent the time in which it was stopped."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


class PeerProcess:
    """Use as a context manager: whatever happens, the process and its children are gone afterwards."""

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        """Starts it; its standard error goes to `log`, whose last line explains a failure."""
        self.name = name
        self.idle = Idle()
        self._log = log
        self._buffer = b""
        self._stopped_at: tuple[float, float] | None = None
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                start_new_session=True,
            )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(politely=kind is None)

    def ask(self, message: Mapping[str, object], *, timeout: float) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises LeadoutError when the peer says it failed, ended, or is silent for `timeout` seconds.
        """
        assert self._stopped_at is None, "a stopped peer cannot answer"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._read_line(time.monotonic() + timeout, timeout)
        try:
            answer = json.loads(line)
        except ValueError:
            raise LeadoutError(f"peer {self.name}: expected a line of JSON, got {line[:80]!r}") from None
        if not isinstance(answer, dict) or not answer.get("ok"):
            raise LeadoutError(f"peer {self.name} failed: {answer.get('error', answer)}")
        return answer

    def _read_line(self, deadline: float, timeout: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LeadoutError(f"peer {self.name}: no answer in {timeout:.0f} s; its log is {self._log}")
            piece = os.read(descriptor, _PIECE)
            if not piece:
                raise self._ended()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> LeadoutError:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = lines[-1] if lines else "nothing in its log"
        return LeadoutError(f"peer {self.name} ended with code {code}: {said} (log: {self._log})")

    def pause(self) -> None:
        """Stop the peer and its children until `resume`."""
        assert self._stopped_at is None
        os.killpg(self._process.pid, signal.SIGSTOP)
        give_up = time.monotonic() + _STOP_SECONDS
        while not all_stopped(self._family()) and time.monotonic() < give_up:
            time.sleep(0.001)  # A busy thread stops at the end of its time slice.
        self._stopped_at = (time.monotonic(), cpu_seconds(self._family()))

    def resume(self) -> None:
        """Let it go on, noting what it used while it was stopped."""
        if self._stopped_at is None:
            return
        since, used = self._stopped_at
        self.idle.cpu_seconds += cpu_seconds(self._family()) - used
        self.idle.seconds += time.monotonic() - since
        self._stopped_at = None
        os.killpg(self._process.pid, signal.SIGCONT)

    def reset_peak(self) -> None:
        """Start the memory peak anew."""
        reset_peak(self._family())

    def peak_bytes(self) -> int:
        """Peak resident memory of the peer and its children."""
        return peak_bytes(self._family())

    def _family(self) -> list[int]:
        return family(self._process.pid)

    def close(self, *, politely: bool = True) -> None:
        """Make it end; `politely` asks it first, which takes as long as what it is doing."""
        if politely and self._process.poll() is None:
            self.resume()
            with suppress(LeadoutError, subprocess.TimeoutExpired):
                self.ask({"op": "stop"}, timeout=_END_SECONDS)
                self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):  # Everything of it is gone already.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # What was asked of a process that is gone still waits to be written.
                pipe.close()
