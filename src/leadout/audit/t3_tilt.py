"""T3: an e-value against "sampled at another temperature".

For every tilt lambda, the product over tokens of p(x)^-lambda / sum_y p(y)^(1 - lambda) is the likelihood ratio of
"drawn at temperature 1/(1 - lambda)" against p. Its mean under p is 1, so the average over lambdas is an e-value: it
exceeds 1/alpha with chance at most alpha at any sample size and under any stopping rule (Ville's inequality).

`alternative_log_e` gives the same for any law r with a closed form.

Axes: N positions, V vocabulary, L tilts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from leadout.audit.classes import class_name
from leadout.audit.findings import Effect, Finding
from leadout.audit.tails import Z_999, Floats, log_mean_exp, p_from_log_e

if TYPE_CHECKING:
    from leadout.audit.sample import AuditSample
    from leadout.audit.sums import TiltSums

_STEP = 0.01
TILTS: tuple[float, ...] = tuple(sign * _STEP * 2**power for sign in (1, -1) for power in range(4))
"""lambda: +-0.01, 0.02, 0.04, 0.08."""
DETECTABLE_Z = 4.06 + 1.64
"""A temperature error of this many standard errors fails with about 95 % chance at the level of T3."""
MIXTURE_SHARES: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Shares of tokens drawn from the alternative that `alternative_log_e` averages over."""


def tilt_terms(log_p_NV: torch.Tensor, p_NV: torch.Tensor, log_p_x_N: torch.Tensor) -> torch.Tensor:
    """log growth of each tilt's likelihood ratio, f64[N, L], from two exponentials a row."""
    # Clamped near the smallest probability of the format: beyond it p itself is 0.
    finite_NV = log_p_NV.clamp(min=-100.0)
    columns = []
    for sign in (1, -1):
        weight_NV = torch.exp(-sign * _STEP * finite_NV)
        for power in range(4):
            tilt = sign * _STEP * 2**power
            columns.append(-tilt * log_p_x_N.double() - torch.linalg.vecdot(p_NV, weight_NV).double().log())
            weight_NV.mul_(weight_NV)
    return torch.stack(columns, -1)


def tilt_log_e(sums_L: Floats, n: int, drift: float) -> float:
    """log e-value of the average over tilts.

    `drift` is how far (nats per token) rounding may move the mean of -log p; it makes the e-value one against every
    law within that distance, so that a long run of a correct bf16 engine is not stopped by rounding.
    """
    return log_mean_exp(sums_L - np.abs(np.asarray(TILTS)) * drift * n)


def alternative_log_e(log_ratio_N: Floats, shares: tuple[float, ...] = MIXTURE_SHARES) -> float:
    """log e-value against "a share of tokens follows r": mean over eps of prod(1 - eps + eps r(x)/p(x)).

    `log_ratio_N` is log r(x) - log p(x) of each emitted token, -inf where r is 0.
    """
    logs = []
    for share in shares:
        with np.errstate(divide="ignore"):
            logs.append(float(np.log1p(share * np.expm1(log_ratio_N)).sum()))
    top = max(logs)
    return top if math.isinf(top) else log_mean_exp(np.maximum(logs, top - 700.0))


def temperature_effect(sums: TiltSums) -> Effect:
    """Relative temperature error by one score step: (mean of -log p minus entropy) / variance of log p."""
    variance = max(sums.variance, 1e-12)
    value, half = sums.excess / variance, Z_999 / variance**0.5
    return Effect(value=value, low=value - half, high=value + half, unit="relative temperature error")


def tilt_finding(sums: TiltSums, label: str, drift: float, floor: float, pooled: bool) -> Finding:
    """One e-value over the tokens summed in `sums`."""
    log_e = tilt_log_e(sums.tilts, sums.n, drift)
    return Finding(
        test="T3",
        name="the temperature is the declared one",
        class_name=label,
        tokens=sums.n,
        information=sums.variance,
        family="tilt" if pooled else "tail",
        statistic=log_e,
        p_value=p_from_log_e(log_e),
        log_e=log_e,
        floor=floor,
        effect=temperature_effect(sums),
        enough=sums.variance > 0.0,
    )


def findings(sample: AuditSample) -> list[Finding]:
    """One e-value per class and one over all tokens; the pooled one has its own share of the false-alarm level."""
    drift, floor = sample.tilt_drift, sample.floor.entropy_shift
    found = [tilt_finding(sums, class_name(code), drift, floor, False) for code, sums in sample.tilts_by_class()]
    return [*found, tilt_finding(sample.pooled_tilts(), "all", drift, floor, True)]
