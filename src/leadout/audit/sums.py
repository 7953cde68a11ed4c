"""Running sums of the tests, by class.

Axes: N tokens added together, L tilts, H bets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from leadout.audit.t3_tilt import TILTS
from leadout.audit.tails import BET_THETAS, Floats, bet_terms

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class TiltSums:
    """T3's sums over one class."""

    n: int = 0
    tilts: Floats = field(default_factory=lambda: np.zeros(len(TILTS)))
    excess: float = 0.0
    variance: float = 0.0

    def add(self, other: TiltSums) -> None:
        """Pool with another class."""
        self.n += other.n
        self.tilts = self.tilts + other.tilts
        self.excess += other.excess
        self.variance += other.variance


@dataclass(slots=True)
class CountSums:
    """Hits against their conditional chances over one class."""

    n: int = 0
    hits: float = 0.0
    low: float = 0.0
    """Sum of least chances."""
    high: float = 0.0
    """Sum of largest chances."""
    variance: float = 0.0
    bets: Floats = field(default_factory=lambda: np.zeros(len(BET_THETAS)))

    def add(self, other: CountSums) -> None:
        """Pool with another class."""
        self.n += other.n
        self.hits += other.hits
        self.low += other.low
        self.high += other.high
        self.variance += other.variance
        self.bets = self.bets + other.bets

    @classmethod
    def of(cls, hit_N: npt.NDArray[np.bool_], low_N: Floats, high_N: Floats) -> CountSums:
        """Sums of N events."""
        middle_N = 0.5 * (low_N + high_N)
        return cls(
            n=hit_N.shape[0],
            hits=float(np.count_nonzero(hit_N)),
            low=float(low_N.sum()),
            high=float(high_N.sum()),
            variance=float((middle_N * (1.0 - middle_N)).sum()),
            bets=bet_terms(hit_N, low_N, high_N).sum(0),
        )


class Uniforms:
    """The U of one test by class, as arrays in the order they came."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Floats]] = {}

    def add(self, class_N: Ints, uniform_N: Floats) -> None:
        """Keep those that are not nan."""
        kept_N = ~np.isnan(uniform_N)
        class_N, uniform_N = class_N[kept_N], uniform_N[kept_N]
        for code in np.unique(class_N):
            self._parts.setdefault(int(code), []).append(uniform_N[class_N == code])

    def by_class(self) -> list[tuple[int, Floats]]:
        """Class code and its uniforms, by code."""
        return [(code, np.concatenate(self._parts[code])) for code in sorted(self._parts)]

    def pooled(self) -> Floats:
        """All of them."""
        parts = [part for code in sorted(self._parts) for part in self._parts[code]]
        return np.concatenate(parts) if parts else np.zeros(0)


def pool(sums: dict[int, CountSums]) -> CountSums:
    """All classes together."""
    total = CountSums()
    for one in sums.values():
        total.add(one)
    return total
