"""Seconds as a function of a count: through given points, or learnt while running (`leadout.draft_length.costs`).

Measurements of about the same count share a point, and one late round moves nothing. Between points a curve is linear,
beyond them it keeps the mean slope, and it never falls.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from leadout.draft_length.pace import Levels

_COUNT_GAIN = 0.1
"""Weight of the newest count in the count that a point stands for."""
_EXACT = 8
"""Counts up to this have points of their own; above, eight points double the count."""
_APART = 1.5
"""Points must lie this factor apart for their slope to be believed beyond them."""


Floats = npt.NDArray[np.float64]


def bucket(count: float) -> int:
    """The point that a count belongs to."""
    return round(count) if count <= _EXACT else round(8.0 * math.log2(count / _EXACT)) + _EXACT


def _between(count: float, counts: list[float], values: list[float]) -> float:
    """Linear between the points, flat before the first; `count` is at most the last. Numpy takes longer for one."""
    after = bisect.bisect_left(counts, count)
    if not after:
        return values[0]
    low, high = counts[after - 1], counts[after]
    return values[after - 1] + (values[after] - values[after - 1]) * (count - low) / (high - low)


class Curve:
    """A non-decreasing, piecewise linear function of a count, through given points."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._given = dict(sorted(points.items()))
        self._fit: tuple[list[float], list[float]] | None = None

    def record(self, count: int, seconds: float) -> None:
        """Take one measurement; given points stay as they are."""

    def _buckets(self) -> Collection[int]:
        """The points that are known."""
        return {bucket(count) for count in self._given}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known yet."""
        return not self._buckets()

    def knows(self, count: float) -> bool:
        """Whether about this count was measured."""
        return bucket(count) in self._buckets()

    @property
    def smallest(self) -> float:
        """The smallest count measured."""
        return self._fitted()[0][0]

    def reaches(self, count: float) -> bool:
        """Whether about this count, or a larger one, was measured."""
        return bucket(count) <= max(self._buckets(), default=-1)

    def at(self, count: float) -> float:
        """Forecast seconds; needs at least one point. One point alone forecasts proportional growth beyond it."""
        counts, values = self._fitted()
        if count <= counts[-1]:
            return _between(count, counts, values)
        if counts[-1] < _APART * counts[0]:
            return values[-1] * count / counts[-1]
        slope = (values[-1] - values[0]) / (counts[-1] - counts[0])
        return values[-1] + slope * (count - counts[-1])

    def least(self, count: float) -> float:
        """As `at`, but flat beyond the largest count measured: what a larger pass costs at the very least."""
        counts, values = self._fitted()
        return values[-1] if count >= counts[-1] else _between(count, counts, values)

    def points(self) -> dict[float, float]:
        """Seconds by count, as measured."""
        counts, seconds, _ = self._measured()
        return dict(zip(counts.tolist(), seconds.tolist(), strict=True))

    def _measured(self) -> tuple[Floats, Floats, Floats]:
        """Counts in order, seconds and how much each weighs."""
        return np.array([*self._given], np.float64), np.array([*self._given.values()]), np.ones(len(self._given))

    def _fitted(self) -> tuple[list[float], list[float]]:
        """Counts and the nearest non-decreasing seconds."""
        if self._fit is None:
            counts, seconds, weights = self._measured()
            self._fit = counts.tolist(), isotonic_regression(seconds, weights=weights).x.tolist()
        return self._fit


class MeasuredCurve(Curve):
    """A curve learnt while running: its seconds are levels of the pace that it shares with other curves."""

    def __init__(
        self, levels: Levels, kind: str, points: Mapping[int, float] | None = None, noise: float = 1.0
    ) -> None:
        """`points`: first measurements; `noise`: of a measurement, as a multiple of the usual one."""
        super().__init__({})
        self._levels, self._kind, self._noise = levels, kind, noise
        self._counts: dict[int, float] = {}
        self._fitted_version = -1
        for count, seconds in (points or {}).items():
            self.record(count, seconds)

    def _buckets(self) -> Collection[int]:
        return self._counts

    def record(self, count: int, seconds: float) -> None:
        """Take one measurement; one of no time at all says nothing."""
        if not 0.0 < seconds < math.inf:
            return
        point = bucket(count)
        before = self._counts.get(point, float(count))
        self._counts[point] = before + _COUNT_GAIN * (count - before)
        self._levels.record(self._kind, point, seconds, self._noise)

    def at_point(self, count: float) -> tuple[str, int]:
        """The level of this count's own point, if it was measured."""
        return self._kind, bucket(count)

    def nearest(self, count: float) -> tuple[str, int]:
        """The level measured that is nearest to this count."""
        point = bucket(count)
        return self._kind, min(self._counts, key=lambda known: abs(known - point))

    def up_to(self, count: float) -> list[tuple[str, int]]:
        """The levels measured of about this count and of smaller ones; the smallest one where there are none."""
        point = bucket(count)
        return [(self._kind, known) for known in self._counts if known <= point] or [(self._kind, min(self._counts))]

    def _measured(self) -> tuple[Floats, Floats, Floats]:
        points = sorted(self._counts)
        seconds, weights = self._levels.seconds(self._kind, points)
        return np.array([self._counts[point] for point in points]), seconds, weights

    def _fitted(self) -> tuple[list[float], list[float]]:
        if self._fitted_version != self._levels.version:
            self._fit, self._fitted_version = None, self._levels.version
        return super()._fitted()
