"""How often drafts are made and accepted, by position in the round; the forecast of `leadout.draft_length.controller`.

A drafter that looks text up drafts in some rows and not in others: coverage, drafts made and drafts accepted are
counted apart.

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
        self._asked = 0.0
        self._drafting = 0.0
        self._wanted_K = np.zeros(max_length)
        self._made_K = np.zeros(max_length)

    @property
    def num_asked(self) -> float:
        """Discounted number of row-rounds in which the drafter was asked."""
        return self._asked

    def record(
        self,
        drafted_B: npt.NDArray[np.int64],
        accepted_B: npt.NDArray[np.int64],
        num_drafts: int | None = None,
    ) -> None:
        """Take one round: position i (0-based) was reached where at least i drafts were accepted and more drafted.

        `num_drafts`: how many each row was asked for; None: as many as the longest draft.
        """
        position_K = np.arange(self._trials_K.size)
        reached_BK = (position_K < drafted_B[:, None]) & (position_K <= accepted_B[:, None])
        accepted_BK = (position_K < accepted_B[:, None]) & (position_K < drafted_B[:, None])
        drafting = int(np.count_nonzero(drafted_B))
        keep = float(np.exp(-drafting / self._memory))
        self._trials_K = self._trials_K * keep + reached_BK.sum(0)
        self._hits_K = self._hits_K * keep + accepted_BK.sum(0)
        keep_asked = float(np.exp(-len(drafted_B) / self._memory))
        self._asked = self._asked * keep_asked + len(drafted_B)
        self._drafting = self._drafting * keep_asked + drafting
        wanted = int(drafted_B.max(initial=0)) if num_drafts is None else num_drafts
        self._wanted_K = self._wanted_K * keep + drafting * (position_K < wanted)
        self._made_K = self._made_K * keep + (position_K < drafted_B[:, None]).sum(0)

    def limit(self, row_rounds: float) -> None:
        """Let what was seen so far count for at most so many row-rounds."""
        keep = min(1.0, row_rounds / max(self._asked, 1.0))
        self._asked, self._drafting = self._asked * keep, self._drafting * keep
        for counts_K in (self._trials_K, self._hits_K, self._wanted_K, self._made_K):
            counts_K *= keep

    @property
    def coverage(self) -> float:
        """Share of the rows asked that draft anything; 1 where nothing was seen yet."""
        return (self._drafting + _PRIOR_TRIALS) / (self._asked + _PRIOR_TRIALS)

    def expected_drafts(self) -> npt.NDArray[np.float64]:
        """f64[K+1]: expected drafts of a row that drafts, when asked for k = 0..K."""
        share_K = (self._made_K + _PRIOR_TRIALS) / (self._wanted_K + _PRIOR_TRIALS)
        return np.concatenate([[0.0], np.cumsum(share_K)])

    def rates(self) -> npt.NDArray[np.float64]:
        """f64[K]: P(accepted at position i | reached); unseen positions lean on the one before."""
        rates_K = np.empty(self._trials_K.size)
        before = _PRIOR_RATE
        for i in range(rates_K.size):
            before = (self._hits_K[i] + _PRIOR_TRIALS * before) / (self._trials_K[i] + _PRIOR_TRIALS)
            rates_K[i] = before
        return rates_K

    def expected_committed(self, optimism: float = 0.0) -> npt.NDArray[np.float64]:
        """f64[K+1]: expected tokens a row that drafts commits, k = 0..K: 1 + sum of chained acceptances.

        `optimism`: standard deviations that each rate may be better than it looks.
        """
        rates_K = self.rates()
        deviation_K = np.sqrt(rates_K * (1.0 - rates_K) / (self._trials_K + _PRIOR_TRIALS))
        hoped_K = np.minimum(rates_K + optimism * deviation_K, 1.0)
        return np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(hoped_K))])

    def accepted_moments(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """f64[K+1] each: mean and variance of the drafts accepted of k = 0..K that a row makes."""
        reached_K = np.cumprod(self.rates())
        mean_K = np.cumsum(reached_K)
        square_K = np.cumsum((2.0 * np.arange(1, reached_K.size + 1) - 1.0) * reached_K)
        return np.concatenate([[0.0], mean_K]), np.concatenate([[0.0], square_K - mean_K**2])

    def committed_variance(self) -> npt.NDArray[np.float64]:
        """f64[K+1]: variance of the tokens that a row commits in a round, whether or not it drafts."""
        mean_K, variance_K = self.accepted_moments()
        return self.coverage * variance_K + self.coverage * (1.0 - self.coverage) * mean_K**2

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable counts."""
        return {
            "trials": self._trials_K.tolist(),
            "hits": self._hits_K.tolist(),
            "asked": self._asked,
            "drafting": self._drafting,
            "wanted": self._wanted_K.tolist(),
            "made": self._made_K.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore counts."""
        asked, drafting = state["asked"], state["drafting"]
        assert isinstance(asked, float | int) and isinstance(drafting, float | int)
        self._trials_K = np.asarray(state["trials"], np.float64)
        self._hits_K = np.asarray(state["hits"], np.float64)
        self._wanted_K = np.asarray(state["wanted"], np.float64)
        self._made_K = np.asarray(state["made"], np.float64)
        self._asked, self._drafting = float(asked), float(drafting)
