"""Contenders that need no model."""

from __future__ import annotations

from leadout.bench.contender import Sample
from leadout.bench.workload import Workload, make_prompt


def workload(name: str = "batch 2", rows: int = 2, length: int = 10) -> Workload:
    return Workload(name=name, prompts=tuple(make_prompt([1, 2, 3], i) for i in range(rows)), lengths=(length,) * rows)


def sample(seconds: float, *, tokens: int = 20, round_seconds: float | None = None, **spec: float) -> Sample:
    return Sample(
        seconds=seconds,
        tokens=tokens,
        peak_bytes=1000,
        round_seconds=round_seconds,
        spec={f"spec/{name}": value for name, value in spec.items()},
    )


class ScriptedContender:
    """Takes the seconds it is told and notes in `log` when it ran."""

    def __init__(self, name: str, seconds: list[float], log: list[tuple[str, int]], warm_ups: int = 1) -> None:
        self.name = name
        self.warm_ups = warm_ups
        self._seconds = iter(seconds)
        self._log = log

    def run(self, workload: Workload, repeat: int) -> Sample:
        self._log.append((self.name, repeat))
        return sample(next(self._seconds), tokens=workload.tokens)
