"""Tail bounds that hold at every sample size: no normal approximation decides anything in the audit.

Kolmogorov-Smirnov distances use Massart's bound, counts use exact exponential martingales (e-values), and everything
but the temperature e-value shares one Holm correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FAMILY_LEVEL = 2e-4
"""Chance that one audit of a correct generator fails by chance."""
TILT_LEVEL = 5e-5
"""Part of it spent on the pooled temperature e-value."""
HOLM_LEVEL = FAMILY_LEVEL - TILT_LEVEL
"""Part of it shared by all other tests."""
_BET_SIZES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
BET_THETAS: tuple[float, ...] = tuple(sign * size for size in _BET_SIZES for sign in (1, -1))
"""Exponents of the martingales behind the count tests."""
Z_999 = 3.29
"""Two-sided 99.9 % normal quantile: the width of reported intervals."""


def ks_distance(uniform_N: Floats) -> float:
    """Largest distance between the empirical distribution of `uniform_N` and the uniform one; 0 when empty."""
    n = uniform_N.shape[0]
    if n == 0:
        return 0.0
    sorted_N = np.sort(uniform_N)
    steps_N = np.arange(1, n + 1) / n
    return float(max(np.max(steps_N - sorted_N), np.max(sorted_N - steps_N + 1.0 / n)))


def ks_p_value(distance: float, n: int, rho: float) -> float:
    """Bound of P(D >= distance) for n independent uniforms moved by at most `rho` (Massart 1990, tight constant)."""
    excess = max(distance - rho, 0.0)
    return min(1.0, 2.0 * math.exp(-2.0 * n * excess * excess))


def ks_radius(level: float, n: int) -> float:
    """Distance that n uniforms exceed with probability at most `level`; 1 when n is 0."""
    return min(1.0, math.sqrt(math.log(2.0 / level) / (2.0 * n))) if n else 1.0


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses fall under Holm's step-down correction at family-wise `level`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def log_mean_exp(values: npt.ArrayLike) -> float:
    """log of the mean of exp(values)."""
    array = np.asarray(values, np.float64)
    top = float(array.max())
    return top + math.log(float(np.mean(np.exp(array - top))))


def p_from_log_e(log_e: float) -> float:
    """An e-value as a p-value: P(E >= e) <= 1 / e (Markov)."""
    return min(1.0, math.exp(-min(log_e, 700.0)))


def bet_terms(hit_N: npt.NDArray[np.bool_], low_N: Floats, high_N: Floats) -> npt.NDArray[np.float64]:
    """log growth of every bet on events whose probability lies between `low_N` and `high_N`, f64[N, thetas].

    exp(theta hit) / (1 - m + m exp(theta)) has mean 1 when m is the probability of the hit, and at most 1 for every m
    in the interval when the end that favours theta's sign is put in. Products over time are supermartingales, so any
    stopping rule is allowed.
    """
    terms = np.empty((hit_N.shape[0], len(BET_THETAS)))
    for column, theta in enumerate(BET_THETAS):
        chance_N = high_N if theta > 0 else low_N
        terms[:, column] = theta * hit_N - np.log1p(chance_N * math.expm1(theta))
    return terms


def bet_log_e(sums: Floats, n: int, rho: float) -> float:
    """log e-value of the mixture of bets; `rho` is how far rounding may move the mean probability."""
    allowance = np.asarray([math.expm1(abs(theta)) * rho * n for theta in BET_THETAS])
    return log_mean_exp(sums - allowance)


def bernstein_p_value(excess: float, variance: float, largest: float) -> float:
    """Bound of P(sum >= excess) for independent centred terms of at most `largest` (Bernstein)."""
    if excess <= 0.0 or variance <= 0.0:
        return 1.0
    return min(1.0, math.exp(-0.5 * excess * excess / (variance + largest * excess / 3.0)))
