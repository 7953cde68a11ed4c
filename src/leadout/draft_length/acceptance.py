"""How often drafts are accepted, by position in the round; the forecast of `leadout.draft_length.controller`.

Axes: B rows, K draft positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_PRIOR_TRIALS = 4.0
_PRIOR_RATE = 0.3


class AcceptanceStats:
    """Discounted counts of trials and acceptances per position, conditional on the position being reached."""

    def __init__(self, max_length: int, memory: float = 2000.0) -> None:
        """`memory`: row-rounds after which an observation has lost 63 % of its weight."""
        self._memory = memory
        self._trials_K = np.zeros(max_length)
        self._hits_K = np.zeros(max_length)

    @property
    def num_trials(self) -> float:
        """Discounted number of row-rounds seen with at least one draft."""
        return float(self._trials_K[0])

    def record(self, drafted_B: npt.NDArray[np.int64], accepted_B: npt.NDArray[np.int64]) -> None:
        """Take one round: position i (0-based) was reached where at least i drafts were accepted and more drafted."""
        position_K = np.arange(self._trials_K.size)
        reached_BK = (position_K < drafted_B[:, None]) & (position_K <= accepted_B[:, None])
        accepted_BK = (position_K < accepted_B[:, None]) & (position_K < drafted_B[:, None])
        keep = float(np.exp(-np.count_nonzero(drafted_B) / self._memory))
        self._trials_K = self._trials_K * keep + reached_BK.sum(0)
        self._hits_K = self._hits_K * keep + accepted_BK.sum(0)

    def rates(self) -> npt.NDArray[np.float64]:
        """f64[K]: P(accepted at position i | reached); unseen positions lean on the one before."""
        rates_K = np.empty(self._trials_K.size)
        before = _PRIOR_RATE
        for i in range(rates_K.size):
            before = (self._hits_K[i] + _PRIOR_TRIALS * before) / (self._trials_K[i] + _PRIOR_TRIALS)
            rates_K[i] = before
        return rates_K

    def expected_committed(self) -> npt.NDArray[np.float64]:
        """f64[K+1]: expected tokens a row commits in a round of k = 0..K drafts, 1 + sum of chained acceptances."""
        return np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(self.rates()))])

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable counts."""
        return {"trials": self._trials_K.tolist(), "hits": self._hits_K.tolist()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore counts."""
        self._trials_K = np.asarray(state["trials"], np.float64)
        self._hits_K = np.asarray(state["hits"], np.float64)
