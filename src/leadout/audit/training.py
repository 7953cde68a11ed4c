"""Watches a training run: are the rollouts it learns from still the policy's?

The learner hands over the logits of its first pass over a rollout, at the rollout's own version. The temperature
e-value is multiplied over steps and stops the run at 10,000, which a correct generator reaches with a chance below
1e-4 in the whole run however long it is (Ville's inequality). The other, cheaper-to-fool tests only warn.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from leadout.audit.bookkeeping import Declared
from leadout.audit.observe import Scores, add_rollout, admit
from leadout.audit.sample import AuditSample
from leadout.audit.t3_tilt import TILTS, tilt_log_e
from leadout.audit.t6_logprobs import error_findings, sharpening
from leadout.audit.tails import Floats, ks_distance, ks_p_value
from leadout.audit.tolerances import Precision, tolerances_for
from leadout.errors import AuditError
from leadout.records import Rollout, SamplingParams

STOP_E_VALUE = 1e4
"""E-value at which the run stops."""
WARN_P_VALUE = 1e-6
"""A step's KS test warns below this."""
DRIFT = {"bfloat16": 2e-3, "float32": 1e-5, "float64": 1e-9}
"""Nats per token that rounding may move the mean of -log p at temperature 1, by 1/T^2 more below; about the KL of bf16
against fp32 (1.2e-3 to 1.8e-3)."""
FLOOR_RMS = 0.05
"""bf16: rms log-probability error of a correct engine against a bf16 learner (measured 0.048 to 0.059)."""

_log = logging.getLogger("leadout.audit")


class TrainingAuditor:
    """The in-training `Auditor`.

    Example: ``TrainingAuditor(params, precision="bfloat16", share=0.05)`` looks at one rollout in twenty.
    """

    def __init__(
        self, params: SamplingParams, *, precision: Precision, share: float, every: int = 1, seed: int = 0
    ) -> None:
        """`params` of the rollouts, `precision` of the coarser of generator and learner.

        `share` of the rollouts of every n-th step are seen. Choose it as wanted tokens / expected tokens of a step: a
        cut by what has been seen so far would select.
        """
        self._params = params
        self._sharper = sharpening(params.temperature)
        self._precision: Precision = precision
        self._share = share
        self._every = every
        self._step = 0
        self._seed = seed
        self._tilts: Floats = np.zeros(len(TILTS))
        self._tokens = 0
        self._sample = self._new_sample()

    def select(self, rollout: Rollout) -> bool:
        """Whether this rollout is in the sample: a hash of its id in audited steps, nothing it contains."""
        return self._step % self._every == 0 and is_selected(
            rollout.request_id.draw, rollout.request_id.sibling, self._seed, self._share
        )

    def observe(self, rollout: Rollout, logits_TV: torch.Tensor) -> None:
        """Take the learner's logits (before temperature) at the positions that produced the rollout's tokens."""
        if not admit(self._sample, rollout, Declared(params=self._params), version=None):
            return
        exact_TV = logits_TV.detach()
        if exact_TV.dtype is not torch.float64:
            exact_TV = exact_TV.float()
        scores = Scores(exact_TV=exact_TV.cpu(), rounded_TV=None)
        add_rollout(self._sample, rollout, scores, seed=self._seed, floor_every=1)

    @property
    def log_e(self) -> float:
        """log e-value of everything seen since the run began."""
        return tilt_log_e(self._tilts, self._tokens, DRIFT[self._precision] * self._sharper**2)

    def finish_step(self) -> Mapping[str, float]:
        """audit/* metrics of the step; raises AuditError when the e-value reaches its limit or a record is broken."""
        self._step += 1
        sample, self._sample = self._sample, self._new_sample()
        sums = sample.pooled_tilts()
        self._tilts = self._tilts + sums.tilts
        self._tokens += sums.n
        metrics = {"audit/tokens": float(sample.tokens), "audit/log_e": self.log_e}
        if sample.bookkeeping:
            raise AuditError(f"expected consistent rollouts, got {sample.bookkeeping[0]}; the generator is faulty")
        if sample.used:
            metrics |= self._cheap_tests(sample)
            metrics["audit/temperature_error"] = sums.excess / max(sums.variance, 1e-12)
        if self.log_e >= math.log(STOP_E_VALUE):
            error = sums.excess / max(sums.variance, 1e-12)
            raise AuditError(
                f"expected tokens drawn at temperature {self._params.temperature}, got an e-value of "
                f"{math.exp(min(self.log_e, 700.0)):.3g} against it over {self._tokens} tokens (this step looks "
                f"{error:+.1%} off); run `leadout audit` on this generator, or set audit.every: 0 to go on regardless"
            )
        return metrics

    def _cheap_tests(self, sample: AuditSample) -> dict[str, float]:
        """T1 pooled, T5 and T6; they warn and never stop the run."""
        uniform_N = sample.pooled_uniforms()
        distance = ks_distance(uniform_N)
        p_value = ks_p_value(distance, uniform_N.shape[0], sample.tolerances.rho_max)
        error_N = sample.policy_errors()
        rms = float(np.sqrt(np.mean(error_N**2)))
        if p_value < WARN_P_VALUE:
            _log.warning("audit: tokens do not follow the policy (KS distance %.4f, p = %.1e)", distance, p_value)
        if sample.outside:
            _log.warning("audit: %d tokens lie outside the filters", sample.outside)
        bounds = FLOOR_RMS * self._sharper, sample.tolerances.logprob_max, self._params.temperature
        for finding in error_findings("log-probability", error_N, *bounds):
            if finding.statistic > finding.bound:
                _log.warning("audit: %s is %.3g, allowed %.3g", finding.name, finding.statistic, finding.bound)
        return {
            "audit/ks": distance,
            "audit/ks_p_value": p_value,
            "audit/outside": float(sample.outside),
            "audit/ambiguous_share": sample.ambiguous_share,
            "audit/logprob_rms": rms,
            "audit/logprob_mean": float(np.mean(error_N)),
        }

    def _new_sample(self) -> AuditSample:
        return AuditSample(self._params, tolerances_for(self._precision), has_floor=False)

    def state_dict(self) -> dict[str, object]:
        """What the e-value needs to go on after a resume."""
        return {"tilts": self._tilts.tolist(), "tokens": self._tokens, "step": self._step}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        self._tilts = np.asarray(state["tilts"], np.float64)
        tokens, step = state["tokens"], state["step"]
        assert isinstance(tokens, int) and isinstance(step, int), "state of another auditor"
        assert self._tilts.shape == (len(TILTS),), "state of another auditor"
        self._tokens, self._step = tokens, step


def is_selected(draw: int, sibling: int, seed: int, share: float) -> bool:
    """Whether a hash of the rollout's id falls under `share`."""
    return zlib.crc32(f"{seed}/{draw}/{sibling}".encode()) < share * 2**32
