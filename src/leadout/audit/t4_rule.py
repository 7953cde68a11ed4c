"""T4: the declared accept rule, from the traced drafts.

A generator can be lossless by another rule than the one it declares, for example by verifying a sampled draft as if
it were certain, and lose half its speed. And a wrong rule often shows here with a tenth of the tokens. Given the
draft d, with m = min(1, p(d)/q(d)):

- it is accepted with probability m (a count, by betting);
- an accepted token follows min(p, q) / sum min(p, q), a correction (p - q)+ / sum (p - q)+ (transforms ordered by id);
- no correction lies where p is clearly below q;
- a correction does not depend on the draft that was rejected (noise used twice shows here);
- the draft itself follows q.

Point-mass drafts are kept iff drawn, so their count is T2's and corrections follow p without d.

Axes: D traced positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from scipy.stats import binom

from leadout.audit.classes import class_name
from leadout.audit.findings import Finding, ks_finding, share_effect
from leadout.audit.floor import Curve
from leadout.audit.t2_ratio import count_finding
from leadout.audit.t7_dependence import lag_finding

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample

IMPOSSIBLE_MARGIN = 0.4
"""A correction is impossible where log p < log q - this; rounding moves log p by 0.27 at most (measured)."""


def accept_probability(p_D: torch.Tensor, q_D: torch.Tensor) -> torch.Tensor:
    """min(1, p/q) of the drafted tokens, f64[D]."""
    return (p_D.double() / q_D.double().clamp(min=1e-300)).clamp(max=1.0)


def origin_weights(
    p_DV: torch.Tensor, q_DV: torch.Tensor | None, draft_D: torch.Tensor, accepted_D: torch.Tensor
) -> torch.Tensor:
    """Unnormalised law of the emitted token given that its draft was accepted, or was not.

    `q_DV` None means a point mass: corrections follow p without the draft; accepted rows are meaningless then.
    """
    if q_DV is None:
        return p_DV.scatter(-1, draft_D[:, None], 0.0)
    return torch.where(accepted_D[:, None], torch.minimum(p_DV, q_DV), (p_DV - q_DV).clamp(min=0.0))


def impossible_corrections(p_high_D: torch.Tensor, q_D: torch.Tensor, accepted_D: torch.Tensor) -> torch.Tensor:
    """Corrections at tokens whose residual is zero whatever rounding did; bool[D]."""
    return ~accepted_D & (p_high_D.double() < q_D.double() * torch.exp(torch.tensor(-IMPOSSIBLE_MARGIN)).double())


def _impossible_finding(sample: AuditSample) -> Finding:
    rate = sample.tolerances.impossible_rate
    hits, n = sample.impossible, sample.corrections
    return Finding(
        test="T4",
        name="no correction where the draft law exceeds the policy's",
        class_name="corrections",
        tokens=n,
        information=float(n),
        family="tail",
        statistic=float(hits),
        p_value=float(binom.sf(hits - 1, n, rate)) if hits else 1.0,
        effect=share_effect(hits, 0.0, hits, n, "share of corrections"),
        enough=n > 0,
    )


def findings(sample: AuditSample) -> list[Finding]:
    """The rule's four parts; nothing for parts whose trace is not there."""
    found = []
    name, unit = "drafts are accepted with min(1, p/q)", "acceptance rate - expected"
    for code, sums in sample.accepts_by_class():
        found.append(
            count_finding("T4", name, class_name(code), sums, sample.floor.accept_shift, sample.count_rho, unit)
        )
    pooled = sample.pooled_accepts()
    if pooled.n:
        found.append(count_finding("T4", name, "all", pooled, sample.floor.accept_shift, sample.count_rho, unit))
    floor = sample.floor
    parts = (
        ("accepted tokens follow min(p, q)", "accepted", sample.accepted_uniforms(), floor.accepted),
        ("corrections follow the residual", "corrections", sample.correction_uniforms(), floor.correction),
        ("corrections follow the residual, by p/q", "corrections", sample.correction_ratios(), floor.correction_ratio),
        ("drafts follow q", "drafts", sample.draft_uniforms(), Curve()),
    )
    for claim, label, uniform_N, curve in parts:
        if uniform_N.size:
            found.append(ks_finding("T4", claim, label, uniform_N, float(uniform_N.size), curve.distance))
    if sample.rejections.pairs:
        claim = "corrections do not depend on the rejected draft"
        found.append(lag_finding(sample.rejections, "T4", claim, "corrections"))
    if sample.corrections:
        found.append(_impossible_finding(sample))
    return found
