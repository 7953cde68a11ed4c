"""How far rounding alone may move a correct generator, by the precision it computes in.

Sources: measured on a 135M model; bf16 cached decoding against an fp32 pass moves single logits by up to 0.3, the
log-probability of the emitted token by 0.05 (rms); two fp32 paths differ by 7e-5 in a logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bfloat16", "float32", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Allowances of one precision."""

    delta: float
    """Every logit may move by this much, before temperature; decides who is surely inside or outside a filter."""
    tau: float
    """The mass that top-p compares may move by this much."""
    logprob_max: float
    """Largest error of a returned log-probability; infinite where rms and mean are bounded instead."""
    outside_rate: float
    """Share of tokens that rounding may put outside the outer support."""
    impossible_rate: float
    """Share of corrections that rounding may put where the residual is zero."""
    rho_min: float = 0.002
    """Least allowance of a KS distance."""
    rho_max: float = 0.005
    """Beyond this allowance a KS test of the policy's law cannot be judged."""
    rho_max_rule: float = 0.02
    """The same for the parts of the accept rule, which rounding moves more (they are differences of laws)."""


def tolerances_for(precision: Precision) -> Tolerances:
    """Allowances for a generator that computes in `precision`."""
    if precision == "bfloat16":
        return Tolerances(delta=0.3, tau=0.06, logprob_max=float("inf"), outside_rate=2e-6, impossible_rate=1e-3)
    largest = 2e-4 if precision == "float32" else 1e-9
    return Tolerances(delta=1e-3, tau=1e-4, logprob_max=largest, outside_rate=0.0, impossible_rate=0.0)
