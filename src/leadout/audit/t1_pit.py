"""T1: the randomised probability integral transform of every token, per class and pooled.

With tokens ordered by falling probability (ties by id), U = sum of p over tokens before x, plus V p(x) with V uniform,
is uniform and independent from token to token when x was drawn from p. Only sums are needed, no sort. A rare token
hardly moves such a distance, and one matters more than its chance says: the end. Stop tokens are counted apart.

Axes: N positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leadout.audit.classes import class_name
from leadout.audit.findings import Effect, Finding, ks_finding
from leadout.audit.t2_ratio import count_finding
from leadout.audit.tails import Z_999

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample


def ordered_uniform(key_NV: torch.Tensor, p_NV: torch.Tensor, token_N: torch.Tensor, v_N: torch.Tensor) -> torch.Tensor:
    """U in [0, 1], f64[N], with tokens ordered by falling `key_NV`, ties by id.

    The key must be fixed before the token was drawn. `v_N` are uniforms from a stream of the audit's own.
    """
    token_N1 = token_N[:, None]
    key_x_N1 = key_NV.gather(-1, token_N1)
    before_N = (p_NV * (key_NV > key_x_N1)).sum(-1).double()
    tied_NV = key_NV == key_x_N1
    if int(torch.count_nonzero(tied_NV)) > key_NV.shape[0]:
        lower_NV = torch.arange(key_NV.shape[-1]) < token_N1
        before_N = before_N + (p_NV * (tied_NV & lower_NV)).sum(-1).double()
    p_x_N = p_NV.gather(-1, token_N1)[:, 0].double()
    return (before_N + v_N * p_x_N).clamp(0.0, 1.0)


def id_uniform(weight_NV: torch.Tensor, token_N: torch.Tensor, v_N: torch.Tensor) -> torch.Tensor:
    """U in [0, 1], f64[N], with tokens ordered by id; rows of `weight_NV` need not sum to 1."""
    lower_NV = torch.arange(weight_NV.shape[-1]) < token_N[:, None]
    before_N = (weight_NV * lower_NV).sum(-1).double()
    own_N = weight_NV.gather(-1, token_N[:, None])[:, 0].double()
    return ((before_N + v_N * own_N) / weight_NV.sum(-1).double()).clamp(0.0, 1.0)


def findings(sample: AuditSample) -> list[Finding]:
    """One Kolmogorov-Smirnov test per class and one over all tokens, plus the mean of U as effect; a count of ends."""
    floor = sample.floor.pit.distance
    found = [
        ks_finding("T1", "tokens follow the policy", class_name(code), uniform_N, sample.class_information(code), floor)
        for code, uniform_N in sample.uniforms_by_class()
    ]
    pooled_N = sample.pooled_uniforms()
    found.append(ks_finding("T1", "tokens follow the policy", "all", pooled_N, sample.information, floor))
    # Without the rollouts that did not finish, which are mostly long ones, ends look too frequent.
    if sample.ends.n and not (sample.unfinished or sample.skipped):
        name, unit = "rollouts end as often as the policy says", "ends per token - expected"
        shift, rho = sample.floor.accept_shift, sample.count_rho
        found.append(count_finding("T1", name, "all", sample.ends, shift, rho, unit))
    return found


def mean_effect(mean: float, n: int) -> Effect:
    """How far the mean of U is from 1/2, with a 99.9 % interval."""
    half = Z_999 / (12 * max(n, 1)) ** 0.5
    return Effect(value=mean - 0.5, low=mean - 0.5 - half, high=mean - 0.5 + half, unit="mean of U - 1/2")
