"""Peak resident memory and processor time of processes, as Linux reports them."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path

import psutil

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def reset_peak(pids: Sequence[int]) -> None:
    """Start the peak anew; where the system refuses, it goes on from the start of the process."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            continue


def peak_bytes(pids: Sequence[int]) -> int:
    """Peak resident bytes, summed over the processes; pages that they share count in each."""
    return sum(_peak(pid) for pid in pids)


def _peak(pid: int) -> int:
    try:
        found = _PEAK.search(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    except OSError:
        found = None
    if found is not None:
        return 1024 * int(found.group(1))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if pid == os.getpid() else 0


def family(pid: int) -> list[int]:
    """A process and its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time so far, user and system, of all of them."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def all_stopped(pids: Sequence[int]) -> bool:
    """Whether every thread of these processes is stopped by a signal, or gone."""
    return all(_is_stopped(status) for pid in pids for status in Path(f"/proc/{pid}/task").glob("*/stat"))


def _is_stopped(status: Path) -> bool:
    try:
        return status.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True
