"""What rounds cost apart from how fast the machine is just now; the measurements behind `leadout.draft_length.costs`.

A choice rests on ratios: a round with drafts against a plain step. Both are rarely measured at the same time, and a
machine that others use too, or whose rows grow longer, is now fast, now slow. Medians of old measurements then compare
a plain step of a slow minute with drafts of a quick one. Here every measurement is read as

    log seconds = pace + level[kind, size] + noise

with a pace that all sizes share and that wanders, and levels that hardly move, and both are estimated together by a
Kalman filter (Kalman 1960). Levels that are not measured for a while keep their ratios to those that are. Only ratios
have a meaning: the pace at which nothing was measured yet counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_PACE_STEP = 0.05
"""Standard deviation of the pace from one round to the next, in logarithms. Choices change little from 0.03 to 0.1."""
_LEVEL_STEP = 0.004
"""The same of a level: what a size costs may change for good."""
_NOISE = 0.05
"""Of one measurement."""
_EARLY_NOISE = (40.0, 4.0, 2.0, 1.5)
"""Times as much in the first measurements of a size: the very first may pay for setting up, and none of the next alone
decides what a size costs from then on."""
_FARTHEST = 3.0
"""A measurement farther from its forecast than so many standard deviations counts as if it were no farther."""
_YOUNG, _SHAKEN = 8, 0.3
"""Among its first so many measurements, such a one adds this standard deviation to its level: of two that contradict
each other the third decides. Later it is the pace that has jumped."""
_MOMENT, _MOMENT_ROUNDS = 0.3, 8
"""Rounds that follow each other share a moment: a pace that jumped with them looks like a level, however many of them
say so. Standard deviation of what one moment tells, over the number of moments, and the rounds of one."""
_FEW_MOMENTS = 4
"""A size measured in fewer is not well known."""


class Levels:
    """Joint estimate of the pace and of the level of every size measured."""

    def __init__(self) -> None:
        self._index: dict[tuple[str, int], int] = {}
        self._measured = [0]
        self._round = 0
        self._moments = [1]
        """Moments in which a size was measured, and the round that the latest of them began with."""
        self._moment_began = [0]
        # Entry 0 is the pace.
        self._mean_N = np.zeros(1)
        self._covariance_NN = np.zeros((1, 1))
        self._owed = 0
        """Rounds whose growth of the variances is not in the matrix yet: most go by without being asked."""
        self.version = 0
        """Grows with every measurement."""

    def next_round(self) -> None:
        """Let the pace wander and the levels move a little; once a round."""
        self._round += 1
        self._owed += 1

    def _settle(self) -> None:
        """Bring the variances up to this round."""
        if self._owed:
            self._covariance_NN.ravel()[:: self._mean_N.size + 1] += self._owed * _LEVEL_STEP**2
            self._covariance_NN[0, 0] += self._owed * _PACE_STEP**2
            self._owed = 0

    @property
    def pace(self) -> float:
        """Seconds of now for a second of the levels."""
        return math.exp(self._mean_N[0])

    def record(self, kind: str, size: int, seconds: float, noise: float = 1.0) -> None:
        """Take one measurement, > 0 seconds; `noise`: standard deviation as a multiple of the usual one."""
        value, variance = math.log(seconds), (noise * _NOISE) ** 2
        self.version += 1
        self._settle()
        place = self._index.get((kind, size))
        if place is None:
            self._add((kind, size), value, _EARLY_NOISE[0] ** 2 * variance)
            return
        if self._measured[place] == 1:
            # The first measurement says next to nothing, so its moment does not count.
            self._moment_began[place] = self._round
        elif self._round >= self._moment_began[place] + _MOMENT_ROUNDS:
            self._moments[place] += 1
            self._moment_began[place] = self._round
        if self._measured[place] < len(_EARLY_NOISE):
            variance *= _EARLY_NOISE[self._measured[place]] ** 2
        shared_N = self._covariance_NN[0] + self._covariance_NN[place]
        total = float(shared_N[0] + shared_N[place]) + variance
        reach = _FARTHEST * math.sqrt(total)
        surprise = value - float(self._mean_N[0] + self._mean_N[place])
        gain_N = shared_N / total
        self._mean_N += gain_N * min(max(surprise, -reach), reach)
        self._covariance_NN -= gain_N[:, None] * shared_N
        self._measured[place] += 1
        if abs(surprise) > reach and self._measured[place] <= _YOUNG:
            self._covariance_NN[place, place] += _SHAKEN**2

    def _add(self, key: tuple[str, int], value: float, variance: float) -> None:
        """A size measured for the first time: all that is known of its level is this measurement less the pace."""
        self._index[key] = self._mean_N.size
        self._measured.append(1)
        self._moments.append(1)
        self._moment_began.append(self._round)
        old_NN = self._covariance_NN
        self._covariance_NN = np.block([[old_NN, -old_NN[:, :1]], [-old_NN[:1], old_NN[:1, :1] + variance]])
        self._mean_N = np.append(self._mean_N, value - self._mean_N[0])

    def is_young(self, key: tuple[str, int]) -> bool:
        """Whether a size was measured only a few times, or in a few moments."""
        place = self._index[key]
        return self._measured[place] < _YOUNG or self._moments[place] < _FEW_MOMENTS

    def least(self, keys: Sequence[tuple[str, int]], other: tuple[str, int], doubts: float) -> float:
        """The largest of the seconds, at pace 0, that these levels have at the least.

        Each may lie so many standard deviations of its ratio to the `other` level below its estimate.
        """
        self._settle()
        places, b = [self._index[key] for key in keys], self._index[other]
        covariance_NN = self._covariance_NN
        variance_N = covariance_NN[places, places] + covariance_NN[b, b] - 2.0 * covariance_NN[b, places]
        moments_N = np.array([self._moments[place] for place in places], np.float64)
        apart_N = np.not_equal(places, b)
        variance_N += apart_N * _MOMENT**2 * (moments_N**-2 + self._moments[b] ** -2.0)
        return float(np.exp(np.max(self._mean_N[places] - doubts * np.sqrt(np.maximum(variance_N, 0.0)))))

    def seconds(self, kind: str, sizes: list[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """f64[sizes] each: seconds at pace 0, and the weight of each, the inverse of its variance.

        The variance is that of level and pace together, which is what measurements tell; what is the one's and what
        the other's stays open, and says nothing of how often a size was measured.
        """
        self._settle()
        places = [self._index[kind, size] for size in sizes]
        variance_N = self._covariance_NN[places, places] + self._covariance_NN[0, 0]
        variance_N += 2.0 * self._covariance_NN[0, places]
        return np.exp(self._mean_N[places]), 1.0 / (variance_N + _NOISE**2)
