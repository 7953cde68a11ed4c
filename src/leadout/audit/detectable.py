"""The smallest bias of each kind that a sample could have found, and what it could not have shown at all."""

from __future__ import annotations

from leadout.audit.findings import ks_detectable
from leadout.audit.sample import AuditSample
from leadout.audit.sums import CountSums
from leadout.audit.t3_tilt import DETECTABLE_Z
from leadout.audit.verdict import Detectable

COUNT_Z = 7.6
"""z at which a betting test fails with 95 % chance at the level of a whole audit: 6 for the test, 1.6 for chance."""


def _count_shift(sums: CountSums, rho: float) -> float:
    """Smallest mean shift of a chance; what filters leave open adds to it."""
    return float((COUNT_Z * sums.variance**0.5 + sums.high - sums.low) / sums.n + rho) if sums.n else 1.0


def smallest_biases(sample: AuditSample) -> tuple[Detectable, ...]:
    """One row per kind of fault that the sample can see."""
    kinds: list[tuple[str, float, str, str]] = []
    tilts = sample.pooled_tilts()
    if tilts.variance > 0.0:
        size = DETECTABLE_Z / tilts.variance**0.5 + sample.tilt_drift * tilts.n / tilts.variance
        kinds.append(("wrong temperature", size, "relative error of T", "T3"))
    if sample.used:
        floor = sample.floor.pit.distance
        kinds.append(("any wrong law, by p", ks_detectable(sample.used, floor), "KS distance", "T1"))
        smallest_class = min(sample.class_tokens().values())
        kinds.append(("a wrong law in the rarest class", ks_detectable(smallest_class, floor), "KS distance", "T1"))
    if sample.ends.n:
        kinds.append(("ends too rare or too frequent", _count_shift(sample.ends, sample.count_rho), "per token", "T1"))
    ratio = sample.pooled_ratio_uniforms().size
    if ratio:
        size = ks_detectable(ratio, sample.floor.ratio.distance)
        kinds.append(("wrong residual or accept rule, by p/q", size, "KS distance", "T2"))
    points = sample.pooled_point_hits()
    if points.n:
        kinds.append(("draft favoured or avoided", _count_shift(points, sample.count_rho), "mean of p(draft)", "T2"))
    accepts = sample.pooled_accepts()
    if accepts.n:
        kinds.append(("wrong acceptance", _count_shift(accepts, sample.count_rho), "acceptance rate", "T4"))
    corrections = sample.correction_uniforms().size
    if corrections:
        size = ks_detectable(corrections, sample.floor.correction.distance)
        kinds.append(("wrong correction law", size, "KS distance", "T4"))
    if sample.params.has_filters and sample.tokens:
        kinds.append(("token clearly outside the filters", 6.0 / sample.tokens, "share of tokens", "T5"))
    if sample.lag.pairs:
        kinds.append(("dependent neighbours", COUNT_Z / sample.lag.pairs**0.5, "lag-1 correlation", "T7"))
    return tuple(Detectable(kind=kind, smallest=size, unit=unit, test=test) for kind, size, unit, test in kinds)


def unseen_kinds(sample: AuditSample) -> tuple[str, ...]:
    """What stays possible after a pass, in words."""
    unseen = []
    codes = sample.class_tokens()
    drafted = any(code >= 2 for code in codes)
    if drafted and not sample.traced:
        unseen.append(
            "the generator returned no trace of its drafts: T2 and T4 did not run, so a wrong residual of a few per "
            "cent of the drafted tokens, or a lossless rule other than the declared one, would not be seen"
        )
    if 0 < sample.traced < sample.verified:
        unseen.append(
            f"only {sample.traced / sample.verified:.1%} of the verified drafts came with a trace: T2 and T4 did not "
            "see the others"
        )
    if sample.traced and not sample.pooled_accepts().n:
        unseen.append("all drafts were point masses: the accept rule for sampled drafts did not run")
    if sample.pooled_accepts().n > sample.corrections == 0:
        unseen.append("no correction was tested: rounding blurs the filters, or every draft was accepted")
    if not drafted:
        unseen.append("nothing was drafted: the audit is of plain decoding only")
    if sample.params.is_policy_law and sample.params.temperature == 1.0:
        unseen.append(
            "at temperature 1 without filters and penalties: faults of temperature, filters and penalties are no-ops"
        )
    if sample.params.has_filters and sample.has_floor:
        unseen.append(
            f"where rounding decides the filters ({sample.ambiguous_share:.1%} of the tokens) nothing is tested: a "
            "filter a little looser or tighter than declared passes in bf16; audit in float32 to see it"
        )
    if sample.params.is_greedy:
        unseen.append("greedy decoding has no randomness: only support and log-probabilities were tested")
    if sample.has_floor:
        unseen.append(
            "in bf16 a returned log-probability that is wrong in one class of tokens only is diluted by all others: in "
            "2 % of the tokens T6 tells about 0.4 nats, in a fifth of them 0.05"
        )
    if not sample.siblings.moments()[0]:
        unseen.append("no prompt had two rollouts: noise shared by siblings would not be seen")
    return tuple(unseen)
