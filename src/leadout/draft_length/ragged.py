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

_UNEQUAL = 1.5
"""Standard deviation of a row's rounds over what independent rounds would give: some texts are drafted well all along.
1.5 to 1.9 for n-gram look-up and a trained head at k = 1 and 3, 1.0 to 1.1 for acceptance at a set rate (measured)."""
_MEMORY = 256.0
"""Rows after which an ending has lost 63 % of its weight."""
_PRIOR_ROWS = 4.0
"""Weight of the first guess, that all rows end by themselves."""


def waiting_factor(
    rows: float, fixed_share: float, spread: float, remaining: float, tokens_K: Floats, variance_K: Floats
) -> Floats:
    """f64[K+1], at least 1: seconds of a batch over those of its rounds if all rows went on at the mean rate.

    Args:
        rows: Live rows that will go on to their limit, on average.
        fixed_share: a / (a + b n) with all n live rows.
        spread: Coefficient of variation of the tokens left to them; infinite where waiting does not matter.
        remaining: Mean tokens left to them.
        tokens_K: Tokens that a row commits in a round of k = 0..K drafts.
        variance_K: Their variance.

    """
    if rows <= 1.0 or not math.isfinite(spread) or not math.isfinite(remaining):
        return np.ones_like(tokens_K)
    # The largest of n normal numbers is expected there, within 2 % (Blom 1958).
    largest = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
    uneven_K = _UNEQUAL**2 * variance_K / (tokens_K * max(remaining, 1.0))
    return np.asarray(1.0 + fixed_share * largest * (np.sqrt(spread**2 + uneven_K) - spread))


class Endings:
    """How often rows end at their limit, whose tokens are known beforehand, and not by themselves."""

    def __init__(self) -> None:
        self._ended = _PRIOR_ROWS
        self._at_limit = 0.0

    def record(self, ended: int, at_limit: int) -> None:
        """Take rows that ended, and how many of them at their limit."""
        keep = math.exp(-ended / _MEMORY)
        self._ended = self._ended * keep + ended
        self._at_limit = self._at_limit * keep + at_limit

    @property
    def share_at_limit(self) -> float:
        """Of the rows that ended."""
        return self._at_limit / self._ended

    def state(self) -> list[float]:
        """For a checkpoint."""
        return [self._ended, self._at_limit]

    def restore(self, state: list[float]) -> None:
        """From one."""
        self._ended, self._at_limit = map(float, state)
