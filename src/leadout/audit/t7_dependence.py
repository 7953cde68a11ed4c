"""T7: tokens are drawn independently of each other, given their prefixes.

Within a rollout: z = Phi^-1(U) of neighbours are independent standard normals, so exp(theta sum z_t z_{t+1} -
theta^2/2 sum z_t^2) has mean 1 and is tested as an e-value. Between siblings: the first tokens of a group all follow
one law, so pairs coincide as often as sum p^2 says; the same noise for all siblings makes them coincide always, which
no test of the marginal law explains.

Axes: N tokens, G groups.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from leadout.audit import t7_pairs
from leadout.audit.findings import Effect, Finding
from leadout.audit.tails import Z_999, Floats, bernstein_p_value, log_mean_exp, p_from_log_e

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample

Ints = npt.NDArray[np.int64]

_THETAS = np.asarray([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.4) for sign in (1, -1)])
_EDGE = 1e-9
"""U is kept this far from 0 and 1 before it becomes a normal score."""


@dataclass(slots=True)
class LagSums:
    """Sums over pairs of U: neighbouring tokens of a rollout, or a rejected draft and its correction."""

    pairs: int = 0
    products: float = 0.0
    """Sum of z_t z_{t+1}."""
    squares: float = 0.0
    """Sum of z_t^2 over the earlier tokens."""

    def add(self, uniform_N: Floats, rollout_N: Ints) -> None:
        """Take the U of consecutive tokens; nan where a token is not used."""
        neighbours_N = rollout_N[:-1] == rollout_N[1:]
        self.add_pairs(uniform_N[:-1][neighbours_N], uniform_N[1:][neighbours_N])

    def add_pairs(self, earlier_N: Floats, later_N: Floats) -> None:
        """Take pairs of U, the earlier known before the later is drawn; nan where one is not used."""
        score_N = ndtri(np.clip(earlier_N, _EDGE, 1.0 - _EDGE))
        product_N = score_N * ndtri(np.clip(later_N, _EDGE, 1.0 - _EDGE))
        usable_N = np.isfinite(product_N)
        self.pairs += int(np.count_nonzero(usable_N))
        self.products += float(product_N[usable_N].sum())
        self.squares += float((score_N[usable_N] ** 2).sum())

    def log_e(self) -> float:
        """log e-value of the mixture over theta."""
        return log_mean_exp(_THETAS * self.products - 0.5 * _THETAS**2 * self.squares)


@dataclass(slots=True)
class SiblingSums:
    """First tokens of every group."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    powers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """sum p^2 and sum p^3 of the group's first law."""

    def add(self, draw: int, token: int, power2: float, power3: float) -> None:
        """One sibling's first token and its law's powers."""
        self.tokens[draw].append(token)
        self.powers[draw] = (power2, power3)

    def moments(self) -> tuple[int, float, float, float, float]:
        """Pairs, coincidences, their expectation, their variance, largest excess of one group.

        Variance of the coincidences of a group of G: G(G-1)/2 (s2 - s2^2) + G(G-1)(G-2)(s3 - s2^2), s_r = sum p^r.
        """
        num_pairs, hits, expected, variance, largest = 0, 0.0, 0.0, 0.0, 0.0
        for draw, tokens in self.tokens.items():
            size = len(tokens)
            pairs = size * (size - 1) // 2
            s2, s3 = self.powers[draw]
            _, counts = np.unique(tokens, return_counts=True)
            num_pairs += pairs
            hits += float((counts * (counts - 1) // 2).sum())
            expected += pairs * s2
            variance += pairs * (s2 - s2**2) + size * (size - 1) * (size - 2) * max(s3 - s2**2, 0.0)
            largest = max(largest, pairs * (1.0 - s2))
        return num_pairs, hits, expected, variance, largest


def lag_finding(sums: LagSums, test: str, name: str, label: str) -> Finding:
    """Correlation of the normal scores of pairs."""
    log_e = sums.log_e() if sums.pairs else 0.0
    n = max(sums.pairs, 1)
    value, half = sums.products / n, Z_999 / n**0.5
    return Finding(
        test=test,
        name=name,
        class_name=label,
        tokens=sums.pairs,
        information=sums.squares,
        family="tail",
        statistic=sums.products / max(sums.squares, 1e-12) ** 0.5,
        p_value=p_from_log_e(log_e),
        log_e=log_e,
        effect=Effect(value=value, low=value - half, high=value + half, unit="correlation"),
        enough=sums.pairs > 0,
    )


def sibling_finding(sums: SiblingSums) -> Finding | None:
    """Coincidences of the first tokens of siblings; None when no group has two."""
    pairs, hits, expected, variance, largest = sums.moments()
    if pairs == 0:
        return None
    half = Z_999 * variance**0.5 / pairs
    value = (hits - expected) / pairs
    return Finding(
        test="T7",
        name="siblings are drawn independently",
        class_name="first",
        tokens=pairs,
        information=variance,
        family="tail",
        statistic=(hits - expected) / max(variance, 1e-12) ** 0.5,
        p_value=bernstein_p_value(hits - expected, variance, largest),
        effect=Effect(value=value, low=value - half, high=value + half, unit="share of equal pairs - expected"),
        enough=variance > 0.0,
    )


def findings(sample: AuditSample) -> list[Finding]:
    """Within rollouts, and between those of one prompt."""
    found = [lag_finding(sample.lag, "T7", "neighbouring tokens are drawn independently", "all")]
    siblings = sibling_finding(sample.siblings)
    if siblings is not None:
        found.append(siblings)
    return found + t7_pairs.findings(sample.pairs)
