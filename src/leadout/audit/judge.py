"""From an accumulated sample to a verdict: one family of tests, one level, one answer.

The pooled temperature e-value has its own share of the false-alarm level; Kolmogorov-Smirnov distances and counts
share the rest by Holm's correction; log-probability errors and bookkeeping are held against fixed bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from leadout.audit import t1_pit, t2_ratio, t3_tilt, t4_rule, t5_support, t6_logprobs, t7_dependence
from leadout.audit.classes import class_name
from leadout.audit.detectable import smallest_biases, unseen_kinds
from leadout.audit.findings import Effect, Finding
from leadout.audit.sample import AuditSample
from leadout.audit.tails import HOLM_LEVEL, TILT_LEVEL, holm, ks_p_value, ks_radius
from leadout.audit.tolerances import Tolerances
from leadout.audit.verdict import Outcome, Shortage, TestResult, Verdict

_OF_THE_POLICY = ("T1", "T2")
MAX_AMBIGUOUS = 0.2
"""Above this share of ambiguous tokens the law tests say too little."""
LEAST_VARIANCE = 1e-6
"""Below this variance of log p per token (nats^2) the law has one token only."""
MAX_DRIFT = 0.02
"""Above this rounding floor of T3 (nats per token) the temperature cannot be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """How large a sample must be before a pass is a pass."""

    tokens: int = 5_000
    """Tokens in all."""
    class_tokens: int = 300
    """Tokens of every class that holds at least `class_share` of them."""
    class_share: float = 0.02
    """Classes below this share are tested, but not demanded."""
    drafts: bool = False
    """At least one verified draft: a drafter was named."""
    temperature_error: float = 0.1
    """Smallest detectable relative temperature error must be at most this: sharp policies need more tokens."""


def all_findings(sample: AuditSample) -> list[Finding]:
    """T0 to T7."""
    found = [_bookkeeping_finding(sample)]
    for test in (t1_pit, t2_ratio, t3_tilt, t4_rule, t5_support, t6_logprobs, t7_dependence):
        found += test.findings(sample)
    return found


def _bookkeeping_finding(sample: AuditSample) -> Finding:
    faults = float(len(sample.bookkeeping))
    return Finding(
        test="T0",
        name="the record of each rollout is consistent",
        class_name="all",
        tokens=sample.tokens,
        information=float(sample.rollouts),
        family="bound",
        statistic=faults,
        p_value=1.0,
        effect=Effect(value=faults, low=faults, high=faults, unit="contradictions"),
    )


def allowance(finding: Finding, tolerances: Tolerances) -> tuple[float, bool]:
    """rho of a KS test, and whether rounding is small enough to judge it."""
    largest = tolerances.rho_max if finding.test in _OF_THE_POLICY else tolerances.rho_max_rule
    rho = max(tolerances.rho_min, 4.0 * finding.floor)
    return rho, rho <= largest


def judge_findings(found: list[Finding], tolerances: Tolerances, drift: float) -> list[TestResult]:
    """Results of the whole family."""
    p_values = [
        ks_p_value(f.statistic, f.tokens, allowance(f, tolerances)[0]) if f.family == "ks" else f.p_value for f in found
    ]
    shared = [i for i, f in enumerate(found) if f.family in ("ks", "tail") and f.enough]
    rejected = dict(zip(shared, holm([p_values[i] for i in shared], HOLM_LEVEL), strict=True))
    level = HOLM_LEVEL / max(len(shared), 1)
    results = []
    for index, finding in enumerate(found):
        judged = replace(finding, p_value=p_values[index])
        results.append(_result(judged, rejected.get(index, False), level, tolerances, drift))
    return results


def _result(finding: Finding, rejected: bool, level: float, tolerances: Tolerances, drift: float) -> TestResult:
    clear = True
    if finding.family == "ks":
        rho, clear = allowance(finding, tolerances)
        threshold = ks_radius(level, finding.tokens) + rho
    elif finding.family == "tail":
        threshold = -math.log(level)
    elif finding.family == "tilt":
        threshold = -math.log(TILT_LEVEL)
        rejected, clear = finding.statistic >= threshold, drift <= MAX_DRIFT
    else:
        threshold = finding.bound
        rejected = finding.statistic > threshold
    fine = Outcome.PASS if clear and finding.enough else Outcome.COULD_NOT_JUDGE
    return TestResult(
        test=finding.test,
        name=finding.name,
        class_name=finding.class_name,
        tokens=finding.tokens,
        information=finding.information,
        family=finding.family,
        statistic=finding.statistic,
        threshold=threshold,
        p_value=finding.p_value,
        log_e=finding.log_e,
        effect=finding.effect,
        floor=finding.floor,
        outcome=Outcome.FAIL if rejected else fine,
    )


def shortages(sample: AuditSample, demands: Demands) -> tuple[Shortage, ...]:
    """Which classes need how many tokens; sharp policies need more tokens for the same information."""
    counts = sample.class_tokens()
    total = sum(counts.values())
    # Greedy tokens have one law whatever the drafter does; only their number is asked for.
    short = [
        Shortage(class_name=class_name(code), tokens=count, needed=demands.class_tokens)
        for code, count in counts.items()
        if count < demands.class_tokens and count >= demands.class_share * total and not sample.params.is_greedy
    ]
    needed = demands.tokens
    variance = sample.pooled_tilts().variance
    # A law of one token, but for rounding, says nothing about the temperature however many are drawn.
    if variance > LEAST_VARIANCE * total:
        wanted = (t3_tilt.DETECTABLE_Z / demands.temperature_error) ** 2
        needed = max(needed, math.ceil(total * wanted / variance))
    if total < needed:
        short.append(Shortage(class_name="all", tokens=total, needed=needed))
    return tuple(short)


def judge(sample: AuditSample, generator: str, precision: str, demands: Demands) -> Verdict:
    """The verdict on everything added so far."""
    results = judge_findings(all_findings(sample), sample.tolerances, sample.tilt_drift)
    short = shortages(sample, demands)
    outcome, reason = _conclude(sample, results, short, precision)
    if outcome is Outcome.PASS and demands.drafts and not sample.verified:
        outcome = Outcome.COULD_NOT_JUDGE
        reason = "the drafter drafted nothing, so speculation was not tested: give prompts that it drafts for"
    params = sample.params
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return Verdict(
        outcome=outcome,
        reason=reason,
        generator=generator,
        settings={**{name: getattr(params, name) for name in names}, "precision": precision},
        rollouts=sample.rollouts,
        tokens=sample.tokens,
        information=sample.information,
        ambiguous_share=sample.ambiguous_share,
        class_tokens={class_name(code): count for code, count in sample.class_tokens().items()},
        floors={
            "KS by p": sample.floor.pit.distance,
            "KS by p/q": sample.floor.ratio.distance,
            "KS accepted": sample.floor.accepted.distance,
            "KS corrections": sample.floor.correction.distance,
            "nats per token": sample.floor.entropy_shift,
            "acceptance": sample.floor.accept_shift,
            "log-probability rms": sample.floor.logprob_rms,
        },
        results=tuple(results),
        detectable=smallest_biases(sample),
        unseen=unseen_kinds(sample) + _unjudged(results),
        shortages=short,
    )


def _unjudged(results: list[TestResult]) -> tuple[str, ...]:
    """Tests that rounding drowned."""
    return tuple(
        f"{r.test} ({r.name}, {r.class_name}): rounding moves the statistic by {r.floor:.3f}, too much to judge it"
        for r in results
        if r.outcome is Outcome.COULD_NOT_JUDGE and r.tokens
    )


def _conclude(
    sample: AuditSample, results: list[TestResult], short: tuple[Shortage, ...], precision: str
) -> tuple[Outcome, str]:
    """The answer and its one-line reason."""
    if len(sample.versions) > 1 and not sample.bookkeeping:
        versions = ", ".join(str(version) for version in sorted(sample.versions))
        return Outcome.COULD_NOT_JUDGE, (
            f"the rollouts are of versions {versions}, and the learner holds one of them: say which (version=), and "
            "generate without updates in between"
        )
    finer = "audit in float32, or with" if precision == "bfloat16" else "audit with"
    failed = sorted((r for r in results if r.outcome is Outcome.FAIL), key=lambda r: -r.load)
    if failed:
        tests = sorted({result.test for result in failed})
        if tests == ["T4"]:
            return Outcome.FAIL, (
                f"lossless as far as T1 to T3 see, but not by the declared rule: T4 fails ({failed[0].name})"
            )
        worst = "; ".join(f"{f.test} ({f.name}, {f.class_name})" for f in failed[:3])
        first = f" ({sample.bookkeeping[0]})" if sample.bookkeeping else ""
        return Outcome.FAIL, f"the tokens are not the policy's: {worst}{first}"
    if sample.skipped and not sample.tokens:
        return Outcome.COULD_NOT_JUDGE, (
            f"none of the {sample.skipped} tokens was drawn by the learner's version of the weights: give the "
            "generator the learner's weights first"
        )
    if sample.skipped or sample.unfinished:
        return Outcome.COULD_NOT_JUDGE, (
            f"{sample.skipped} tokens are not of the learner's version and {sample.unfinished} rollouts did not "
            "finish: what is left is a selected sample; generate again without updates and errors"
        )
    if sample.tokens == 0:
        return Outcome.COULD_NOT_JUDGE, "there are no tokens to judge"
    if sample.ambiguous_share > MAX_AMBIGUOUS:
        return Outcome.COULD_NOT_JUDGE, (
            f"{sample.ambiguous_share:.0%} of the tokens lie where rounding decides the filters; "
            f"at most {MAX_AMBIGUOUS:.0%} can be left out ({finer} looser filters)"
        )
    if short:
        wants = "; ".join(f"{s.needed - s.tokens:,} more of {s.class_name}" for s in short)
        return Outcome.COULD_NOT_JUDGE, f"too few tokens: {wants}"
    unclear = [r for r in results if r.outcome is Outcome.COULD_NOT_JUDGE and r.tokens and r.class_name == "all"]
    if unclear and not sample.params.is_greedy:
        named = ", ".join(sorted({r.test for r in unclear}))
        return (
            Outcome.COULD_NOT_JUDGE,
            f"rounding moves {named} more than the test allows ({finer} a higher temperature)",
        )
    return Outcome.PASS, "the tokens are the policy's"
