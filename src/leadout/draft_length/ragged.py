"""What rows that end at different times cost a batch; part of the goodput rule (`leadout.draft_length.controller`).

A step of n rows takes about a + b n seconds. Rows of equal lengths decoded plainly end together; with drafts each ends
after a number of rounds of its own, and the batch lasts until the slowest is through: a times the largest number of
rounds plus b times their sum. So where a step hardly depends on the number of rows, what fast rows gain is lost in
waiting for the slowest. Rows whose lengths differ anyway, or whose places others take, lose next to nothing more, and
rows that end by themselves are not waited for.

Axes: K draft positions.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_UNEQUAL, _UNEQUAL_ROWS = 1.5, 8.0
"""First guess of the standard deviation of a row's rounds over what independent rounds would give, and the rows that it
counts as. 1.5 to 1.9 for n-gram look-up and a trained head at k = 1 and 3, 1.0 to 1.1 for acceptance at a set rate."""
_UNEQUAL_MEMORY = 64.0
"""Rows that drafted after which one of them has lost 63 % of its weight."""
_COVERED = 0.9
"""Share of rows asked that must find drafts for what is measured to be all of it."""
_LEAST_ROUNDS = 4
"""Rounds with drafts of a row that says something of it."""
_MEMORY = 256.0
"""Rows after which an ending has lost 63 % of its weight."""
_PRIOR_ROWS = 4.0
"""Weight of the first guess, that all rows end by themselves."""


def waiting_factor(
    rows: float,
    fixed_share: float,
    spread: float,
    remaining: float,
    tokens_K: Floats,
    variance_K: Floats,
    unequal: float = _UNEQUAL,
) -> Floats:
    """f64[K+1], at least 1: seconds of a batch over those of its rounds if all rows went on at the mean rate.

    Args:
        rows: Live rows that will go on to their limit, on average.
        fixed_share: a / (a + b n) with all n live rows.
        spread: Coefficient of variation of the tokens left to them; infinite where waiting does not matter.
        remaining: Mean tokens left to them.
        tokens_K: Tokens that a row commits in a round of k = 0..K drafts.
        variance_K: Their variance.
        unequal: Standard deviation of a row's rounds over what independent rounds would give.

    """
    if rows <= 1.0 or not math.isfinite(spread) or not math.isfinite(remaining):
        return np.ones_like(tokens_K)
    # The largest of n normal numbers is expected there, within 2 % (Blom 1958).
    largest = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
    uneven_K = unequal**2 * variance_K / (tokens_K * max(remaining, 1.0))
    return np.asarray(1.0 + fixed_share * largest * (np.sqrt(spread**2 + uneven_K) - spread))


class Endings:
    """How often rows end at their limit, whose tokens are known beforehand, and how unequally they were drafted."""

    def __init__(self) -> None:
        self._ended = _PRIOR_ROWS
        self._at_limit = 0.0
        self._unequal_rows = _UNEQUAL_ROWS
        self._unequal_sum = _UNEQUAL_ROWS * _UNEQUAL**2

    def record(self, ended: int, at_limit: int) -> None:
        """Take rows that ended, and how many of them at their limit."""
        keep = math.exp(-ended / _MEMORY)
        self._ended = self._ended * keep + ended
        self._at_limit = self._at_limit * keep + at_limit

    @property
    def share_at_limit(self) -> float:
        """Of the rows that ended."""
        return self._at_limit / self._ended

    def record_row(self, drafted_R: Ints, accepted_R: Ints, mean_K: Floats, variance_K: Floats) -> None:
        """Take the drafts of each round of a row that ended, and how many of them were accepted.

        `mean_K`, `variance_K`: of the drafts accepted in a round of k = 0..K drafts, whatever the row.
        """
        # A row that was given tokens may have had longer drafts than there are now.
        counts_R = (drafted_R > 0) & (drafted_R < mean_K.size)
        accepted_R, drafted_R = accepted_R[counts_R], drafted_R[counts_R]
        expected = float(variance_K[drafted_R].sum())
        if drafted_R.size < _LEAST_ROUNDS or expected <= 0.0:
            return
        found = float(accepted_R.sum() - mean_K[drafted_R].sum()) ** 2
        keep = math.exp(-1.0 / _UNEQUAL_MEMORY)
        self._unequal_rows = self._unequal_rows * keep + 1.0
        self._unequal_sum = self._unequal_sum * keep + found / expected

    def unequal(self, coverage: float) -> float:
        """Standard deviation of a row's rounds over what independent rounds would give, at least 1.

        Where not all rows find drafts (`coverage`), who finds some is uneven too, which is not measured: then it is the
        first guess at the least.
        """
        least = 1.0 if coverage > _COVERED else _UNEQUAL
        return max(least, math.sqrt(self._unequal_sum / self._unequal_rows))

    def state(self) -> list[float]:
        """For a checkpoint."""
        return [self._ended, self._at_limit, self._unequal_rows, self._unequal_sum]

    def restore(self, state: list[float]) -> None:
        """From one."""
        self._ended, self._at_limit, self._unequal_rows, self._unequal_sum = map(float, state)
