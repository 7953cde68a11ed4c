"""How many drafted tokens survive: laws of acceptance and what they make of a draft length.

a_j is the probability that draft j is accepted given that 1..j-1 were. AL(k) = 1 + sum_i prod_{j<=i} a_j counts the
correction or bonus token. Drift multiplies every a_j by (1 - drift)^age, age in versions since the drafter learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq

from leadout.errors import ConfigError
from leadout.sim.kernel_tables import Floats

MAX_K = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceLaw:
    """Conditional acceptance by draft position: a_1, a_2, … then `rate x decay^(j-1)` past the list."""

    rates: tuple[float, ...]
    """Conditional rates of the first positions; the last one continues with `decay`."""
    decay: float = 1.0
    drift: float = 0.0
    """Relative loss of every rate per version of age."""

    def conditional(self, k: int, age: float = 0.0) -> Floats:
        """a_1..a_k at this age."""
        beyond = max(0, k - len(self.rates))
        tail = self.rates[-1] * self.decay ** np.arange(1, beyond + 1)
        rates = np.concatenate([np.array(self.rates[:k], dtype=float), tail])
        return np.asarray(np.clip(rates * (1.0 - self.drift) ** age, 0.0, 1.0))

    def length(self, k: int, age: float = 0.0) -> float:
        """AL(k): expected committed tokens of a round."""
        return 1.0 + float(np.cumprod(self.conditional(k, age)).sum())

    def lengths(self, max_k: int, age: float = 0.0) -> Floats:
        """AL(0..max_k)."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self.conditional(max_k, age)))])

    def scaled(self, factor: float) -> AcceptanceLaw:
        """The same law with every rate multiplied, clipped to 1."""
        rates = tuple(min(1.0, rate * factor) for rate in self.rates)
        return AcceptanceLaw(rates=rates, decay=self.decay, drift=self.drift)


def _checked(rates: list[float], field: str) -> tuple[float, ...]:
    if not rates or any(not 0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"{field} must be probabilities in [0, 1], got {rates}")
    return tuple(rates)


def from_conditional(rates: list[float], decay: float = 1.0, drift: float = 0.0) -> AcceptanceLaw:
    """From a_j itself."""
    return AcceptanceLaw(rates=_checked(rates, "acceptance.conditional"), decay=decay, drift=drift)


def from_cumulative(rates: list[float], drift: float = 0.0) -> AcceptanceLaw:
    """From rates as vLLM prints them per position: share of rounds that accepted at least j drafts."""
    checked = _checked(rates, "acceptance.cumulative")
    if any(later > earlier for earlier, later in pairwise(checked)):
        raise ConfigError(
            f"acceptance.cumulative must not increase with position (vLLM's per-position rates), got {rates}; "
            "conditional rates go under acceptance.conditional"
        )
    previous = (1.0, *checked[:-1])
    conditional = tuple(now / before if before > 0 else 0.0 for now, before in zip(checked, previous, strict=True))
    return AcceptanceLaw(rates=conditional, drift=drift)


def from_mean_length(length: float, k: int, drift: float = 0.0) -> AcceptanceLaw:
    """The constant rate whose AL(k) is `length` (vLLM's mean acceptance length, bonus counted)."""
    if k < 1 or not 1.0 <= length <= k + 1:
        raise ConfigError(f"acceptance.mean_length must lie in [1, k + 1] = [1, {k + 1}], got {length}")
    if length == 1.0:
        rate = 0.0
    elif length == k + 1:
        rate = 1.0
    else:
        rate = float(brentq(lambda a: 1 + sum(a**i for i in range(1, k + 1)) - length, 0.0, 1.0, xtol=1e-14))
    return AcceptanceLaw(rates=(rate,), drift=drift)
