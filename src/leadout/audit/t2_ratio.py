"""T2: the same transform with tokens ordered by p/q, where the proposal q is known.

The order is fixed before the draw, so U is uniform under a correct generator as in T1. It is the order in which most
wrong accept rules and residuals shift mass: they give too much to tokens that q favours, or too little, and a
generator that is wrong only there looks right to T1 for a hundred times as many tokens.

A point-mass proposal d leaves two outcomes, d or not d, tested as a count: sum of 1{x = d} - p(d).

Axes: N positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leadout.audit.classes import class_name
from leadout.audit.findings import Finding, ks_finding, share_effect
from leadout.audit.tails import bet_log_e, p_from_log_e

LOG_ZERO = -1e4
"""Stands for log 0 where a product with p = 0 must stay 0."""

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample
    from leadout.audit.sums import CountSums


def log_ratio(log_p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """log p - log q; +inf where q is 0. Tokens with p = 0 hold any place, since they hold no mass."""
    return log_p_NV.clamp(min=LOG_ZERO) - q_NV.log()


def count_finding(
    test: str, name: str, class_name: str, sums: CountSums, floor: float, rho: float, unit: str
) -> Finding:
    """A count of events against its conditional expectation, by betting (exact at any sample size)."""
    log_e = bet_log_e(sums.bets, sums.n, rho) if sums.n else 0.0
    expected = min(max(sums.hits, sums.low), sums.high)
    return Finding(
        test=test,
        name=name,
        class_name=class_name,
        tokens=sums.n,
        information=sums.variance,
        family="tail",
        statistic=(sums.hits - expected) / max(sums.variance, 1e-12) ** 0.5 if sums.n else 0.0,
        p_value=p_from_log_e(log_e),
        log_e=log_e,
        floor=floor,
        effect=share_effect(sums.hits, expected, sums.variance, sums.n, unit),
        enough=sums.n > 0,
    )


def findings(sample: AuditSample) -> list[Finding]:
    """One test per drafted class and one over all drafted tokens, for sampled and for point-mass proposals."""
    found = []
    floor = sample.floor.ratio.distance
    name = "no token is favoured by the draft"
    for code, uniform_N in sample.ratio_uniforms_by_class():
        found.append(ks_finding("T2", name, class_name(code), uniform_N, float(uniform_N.size), floor))
    pooled_N = sample.pooled_ratio_uniforms()
    if pooled_N.size:
        found.append(ks_finding("T2", name, "all", pooled_N, float(pooled_N.size), floor))
    rho = sample.count_rho
    unit = "share of drafts hit - expected"
    for code, sums in sample.point_hits_by_class():
        found.append(count_finding("T2", name, class_name(code), sums, sample.floor.accept_shift, rho, unit))
    pooled = sample.pooled_point_hits()
    if pooled.n:
        found.append(count_finding("T2", name, "all", pooled, sample.floor.accept_shift, rho, unit))
    return found
