"""T6: the returned log-probabilities are those of a teacher-forced pass.

Two numbers come with every token: the policy's own, which must equal the learner's log softmax at the sampling
temperature, and that of the law it was drawn from, which under filters is known up to the mass of the support and
must lie between the ends. bf16 errors are held against the learner's own fp32-to-bf16 error, others against a maximum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from leadout.audit.findings import Effect, Finding
from leadout.audit.tails import Z_999, Floats

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample

RMS_FLOORS = 3.0
"""bf16: the rms error may be this many times the learner's own."""
RMS_LEAST = 0.05
"""bf16: an rms error up to this always passes; a tiny model's own rounding can be far below the engine's."""
MEAN_MAX = 0.01
"""bf16: largest mean error, in nats."""
LARGE_ERROR = 0.5
"""bf16: at most `LARGE_SHARE` of the errors may be larger, in nats."""
LARGE_SHARE = 1e-3


def _bound_finding(name: str, n: int, statistic: float, bound: float, effect: Effect, floor: float) -> Finding:
    return Finding(
        test="T6",
        name=name,
        class_name="all",
        tokens=n,
        information=float(n),
        family="bound",
        statistic=statistic,
        p_value=1.0,
        effect=effect,
        floor=floor,
        bound=bound,
        enough=n > 0,
    )


def sharpening(temperature: float) -> float:
    """How much a temperature below 1 magnifies what rounding does to logits: 1/T (1 from T = 1 up, and for greedy)."""
    return max(1.0, 1.0 / temperature) if temperature > 0.0 else 1.0


def error_findings(
    label: str, error_N: Floats, floor_rms: float, logprob_max: float, temperature: float = 1.0
) -> list[Finding]:
    """Bounds on one kind of returned log-probability; `error_N` is returned minus teacher-forced.

    Errors of log-probabilities grow with 1/T, their mean (a divergence) with its square; so do the bounds. `floor_rms`
    was measured at the temperature itself.
    """
    n = error_N.shape[0]
    if n == 0:
        return []
    sharper = sharpening(temperature)
    logprob_max *= sharper
    rms, mean = float(np.sqrt(np.mean(error_N**2))), float(np.mean(error_N))
    half = Z_999 * rms / n**0.5
    mean_effect = Effect(value=mean, low=mean - half, high=mean + half, unit="nats")
    if np.isfinite(logprob_max):
        largest = float(np.abs(error_N).max())
        effect = Effect(value=largest, low=largest, high=largest, unit="nats")
        return [_bound_finding(f"{label}: largest error", n, largest, logprob_max, effect, floor_rms)]
    large = int(np.count_nonzero(np.abs(error_N) > LARGE_ERROR * sharper))
    rms_effect = Effect(value=rms, low=rms - half, high=rms + half, unit="nats")
    share = Effect(
        value=large / n, low=large / n, high=large / n, unit=f"share beyond {LARGE_ERROR * sharper:.2g} nats"
    )
    rms_bound = max(RMS_FLOORS * floor_rms, RMS_LEAST * sharper)
    # A small sample may exceed the bounds by chance alone, by this much.
    slack = 5.0 * max(floor_rms, RMS_LEAST * sharper / RMS_FLOORS) / n**0.5
    return [
        _bound_finding(f"{label}: rms error", n, rms, rms_bound + slack, rms_effect, floor_rms),
        _bound_finding(f"{label}: mean error", n, abs(mean), MEAN_MAX * sharper**2 + slack, mean_effect, floor_rms),
        _bound_finding(f"{label}: large errors", n, float(large), max(LARGE_SHARE * n, 3.0), share, floor_rms),
    ]


def findings(sample: AuditSample) -> list[Finding]:
    """Both log-probabilities."""
    bounds = sample.floor.logprob_rms, sample.tolerances.logprob_max, sample.params.temperature
    return [
        *error_findings("policy log-probability", sample.policy_errors(), *bounds),
        *error_findings("sampled log-probability", sample.law_errors(), *bounds),
    ]
