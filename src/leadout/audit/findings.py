"""What one test says before the family of tests is judged together.

A test makes `Finding`s; `judge` (in `leadout.audit.judge`) turns them into results with one Holm correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from leadout.audit.tails import FAMILY_LEVEL, Floats, ks_distance, ks_radius

Family = Literal["ks", "tail", "tilt", "bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Size of a deviation in units a reader can use, with an interval."""

    value: float
    """Estimate."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""
    unit: str
    """What is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statistic with everything needed to judge it."""

    test: str
    """"T0" to "T7"."""
    name: str
    """What is claimed of a correct generator."""
    class_name: str
    """Class of the tokens, or "all"."""
    tokens: int
    """Tokens (or drafts, corrections, pairs) used."""
    information: float
    """Sum over tokens of 1 - sum p^2 (T1, T2), of the variance of log p (T3), or of the hit variance (counts)."""
    family: Family
    """How it is judged: KS distance, tail p-value, the pooled temperature e-value, or a fixed bound."""
    statistic: float
    """The test statistic: KS distance, z score, log e-value, count, error."""
    p_value: float
    """p-value of a tail test, 1 / E for e-values; 1 for KS (computed with the rounding allowance) and bounds."""
    effect: Effect
    """Size of the deviation."""
    floor: float = 0.0
    """What rounding alone does to the statistic, measured from the learner."""
    log_e: float | None = None
    """log e-value where the test is one."""
    bound: float = 0.0
    """Largest statistic that passes (bounds only)."""
    enough: bool = True
    """False when the sample is too small for this test to say anything."""


def ks_finding(test: str, name: str, class_name: str, uniform_N: Floats, information: float, floor: float) -> Finding:
    """Distance of a sample of U from uniform."""
    n = uniform_N.shape[0]
    distance = ks_distance(uniform_N)
    radius = ks_radius(1e-3, n)
    return Finding(
        test=test,
        name=name,
        class_name=class_name,
        tokens=n,
        information=information,
        family="ks",
        statistic=distance,
        p_value=1.0,
        floor=floor,
        effect=Effect(
            value=distance, low=max(0.0, distance - radius), high=min(1.0, distance + radius), unit="KS distance"
        ),
        enough=n > 0,
    )


def share_effect(hits: float, expected: float, variance: float, n: int, unit: str) -> Effect:
    """Observed minus expected share of `n`, with a 99.9 % interval."""
    scale = max(n, 1)
    half = 3.29 * float(np.sqrt(max(variance, 0.0))) / scale
    value = (hits - expected) / scale
    return Effect(value=value, low=value - half, high=value + half, unit=unit)


def ks_detectable(n: int, floor: float) -> float:
    """KS distance a sample of n finds with 95 % chance at the level of a whole audit."""
    return min(1.0, ks_radius(FAMILY_LEVEL / 40, n) + max(0.002, 4 * floor) + (0.82 / n**0.5 if n else 0.0))
