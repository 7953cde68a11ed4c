"""T5: no token outside the filters' support.

Engine and learner round differently, so their supports differ at every other position of a correct bf16 engine and a
plain membership test fails on a few tokens in ten thousand. A token counts here only when it lies outside even if
every logit and the compared mass moved by their allowance in its favour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scipy.stats import binom

from leadout.audit.findings import Finding, share_effect

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample


def findings(sample: AuditSample) -> list[Finding]:
    """One count over all tokens; nothing when no filter acts."""
    if not (sample.params.has_filters or sample.params.is_greedy):
        return []
    hits, n, rate = sample.outside, sample.tokens, sample.tolerances.outside_rate
    return [
        Finding(
            test="T5",
            name="no token outside the filters",
            class_name="all",
            tokens=n,
            information=float(n),
            family="tail",
            statistic=float(hits),
            p_value=float(binom.sf(hits - 1, n, rate)) if hits else 1.0,
            effect=share_effect(hits, 0.0, hits, n, "share of tokens outside"),
            enough=n > 0,
        )
    ]
