"""Contenders and the order they are measured in: A B A B, in one run, after warm-ups that do not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leadout.bench.workload import Workload

Tell = Callable[[str], None]
"""Told what is being measured, for a progress line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured generation of a workload."""

    seconds: float
    """From the first prompt token to the last generated one."""
    tokens: int
    """New tokens."""
    peak_bytes: int
    """Peak resident memory of its process or processes."""
    round_seconds: float | None = None
    """Median seconds of a round with all rows live; None where rounds are not seen."""
    spec: dict[str, float] = field(default_factory=dict)
    """`spec/*` as in the metrics of a run; empty for peers."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """Something that generates."""

    @property
    def name(self) -> str:
        """As printed; distinct within a cell."""
        ...

    @property
    def warm_ups(self) -> int:
        """Generations that do not count."""
        ...

    def run(self, workload: Workload, repeat: int) -> Sample:
        """Generate it once. `repeat` picks the random numbers; equal repeats are equal work for all contenders."""
        ...


def interleave(
    contenders: Sequence[Contender], workload: Workload, repeats: int, tell: Tell
) -> dict[str, list[Sample]]:
    """`repeats` samples of each contender, in turn; the warm-ups come first."""
    assert len({contender.name for contender in contenders}) == len(contenders), "names are distinct"
    most = max((contender.warm_ups for contender in contenders), default=0)
    for contender in contenders:
        for warm_up in range(contender.warm_ups):
            tell(f"{workload.name}: {contender.name}, warming up")
            contender.run(workload, warm_up)
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            tell(f"{workload.name}: {contender.name}, {repeat + 1} of {repeats}")
            samples[contender.name].append(contender.run(workload, most + repeat))
    return samples
