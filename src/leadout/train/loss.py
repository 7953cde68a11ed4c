"""The policy loss: clipped importance ratios times advantages, summed with weights that fix each loss type.

Pure functions of tensors. Every loss type is a weighted sum over tokens with a weight that is constant within a
rollout and known before any forward pass, so that micro-batches add up to the same gradient however they are cut.

Axes: R response tokens of a micro-batch, N rollouts of an update, B rollouts of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp, so that neither value nor gradient overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Names as in TRL."""

    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    """Ratios below 1 - epsilon earn nothing more for tokens to be made rarer."""
    epsilon_high: float | None = 0.28
    """Ratios above 1 + epsilon_high earn nothing more for tokens to be made likelier; None is epsilon."""
    delta: float | None = None
    """Upper bound of the ratio where the advantage is negative; None is off."""
    beta: float = 0.0
    """Weight of the KL to the reference."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio per rollout, the geometric mean of its tokens' (GSPO, arXiv 2507.18071)."""
    max_completion_length: int = 1
    """Constant denominator of dr_grpo."""
    importance_clip_max: float | None = None
    """Weight tokens by min(learner / generator probability, this); None is off."""

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Where the ratio is not clipped."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1.0 - self.epsilon, 1.0 + high


def rollout_weights(
    active_N: npt.NDArray[np.int64],
    micro_batch_N: npt.NDArray[np.int64],
    loss_type: LossType,
    max_completion_length: int,
) -> npt.NDArray[np.float64]:
    """Weight of each token's loss, by rollout; every denominator counts unmasked tokens and rollouts only.

    - ``dapo``: 1 / tokens of the update (arXiv 2503.14476, equation 12).
    - ``grpo``: 1 / (rollouts of the update x tokens of the rollout) (arXiv 2402.03300, equation 3).
    - ``dr_grpo``: 1 / (rollouts of the update x max_completion_length) (arXiv 2503.20783).
    - ``bnpo``: token mean of each micro-batch, averaged by their rollouts; the only type that depends on the cut.

    Args:
        active_N: Tokens of each rollout that are trained on.
        micro_batch_N: Micro-batch of each rollout.
        loss_type: See above.
        max_completion_length: Of the run.

    Returns:
        f64[N], 0 for rollouts without such tokens.

    """
    counted_N = active_N > 0
    rollouts, tokens = max(int(counted_N.sum()), 1), max(int(active_N.sum()), 1)
    if loss_type == "dapo":
        weight_N = np.full(len(active_N), 1.0 / tokens)
    elif loss_type == "grpo":
        weight_N = 1.0 / (rollouts * np.maximum(active_N, 1))
    elif loss_type == "dr_grpo":
        weight_N = np.full(len(active_N), 1.0 / (rollouts * max_completion_length))
    else:
        size = int(micro_batch_N.max(initial=0)) + 1
        tokens_M = np.bincount(micro_batch_N, weights=active_N, minlength=size)
        rollouts_M = np.bincount(micro_batch_N, weights=counted_N, minlength=size)
        weight_N = (rollouts_M / rollouts / np.maximum(tokens_M, 1.0))[micro_batch_N]
    return np.where(counted_N, weight_N, 0.0)


class LossOutput(NamedTuple):
    """The loss of a micro-batch, and per-token quantities for metrics (detached, meaningful where trained)."""

    loss: Tensor
    kl_R: Tensor | None
    low_clipped_R: Tensor
    high_clipped_R: Tensor


def policy_loss(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    weights_R: Tensor,
    rollout_R: Tensor,
    settings: LossSettings,
    *,
    reference_logprobs_R: Tensor | None = None,
    importance_R: Tensor | None = None,
) -> LossOutput:
    """-min(ratio * A, clip(ratio) * A) + beta * KL, as a weighted sum.

    Args:
        logprobs_R: The policy's, with gradient.
        old_logprobs_R: The policy's before the first update on these rollouts.
        advantages_R: A.
        weights_R: `rollout_weights` of each token's rollout; 0 masks a token.
        rollout_R: Rollout of each token within the micro-batch, 0 <= index.
        settings: See `LossSettings`.
        reference_logprobs_R: The frozen reference's; needed when beta > 0.
        importance_R: `importance_weights`, or None.

    """
    active_R = weights_R > 0
    log_ratio_R = torch.where(active_R, logprobs_R - old_logprobs_R, 0.0)
    if settings.importance_sampling_level == "sequence":
        log_ratio_R = _rollout_mean(log_ratio_R, active_R, rollout_R)
    ratio_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = settings.ratio_range
    unclipped_R = ratio_R if settings.delta is None else ratio_R.clamp(max=settings.delta)
    loss_R = -torch.minimum(unclipped_R * advantages_R, ratio_R.clamp(low, high) * advantages_R)
    if importance_R is not None:
        loss_R = loss_R * importance_R
    kl_R = None
    if settings.beta > 0.0:
        assert reference_logprobs_R is not None, "beta > 0 needs the reference's log-probabilities"
        kl_R = k3_divergence(torch.where(active_R, reference_logprobs_R - logprobs_R, 0.0))
        loss_R = loss_R + settings.beta * kl_R
    return LossOutput(
        loss=torch.where(active_R, loss_R * weights_R, 0.0).sum(),
        kl_R=None if kl_R is None else kl_R.detach(),
        low_clipped_R=active_R & (ratio_R < low) & (advantages_R < 0),
        high_clipped_R=active_R & (ratio_R > high) & (advantages_R > 0),
    )


def k3_divergence(log_ratio_R: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(reference / policy): unbiased, non-negative (Schulman, "Approximating KL", k3).

    d is clamped before exp; clamping the result would leave 0 * inf in the gradient.
    """
    d_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_R.exp() - d_R - 1.0


def importance_weights(learner_logprobs_R: Tensor, engine_logprobs_R: Tensor, clip_max: float) -> Tensor:
    """Truncated importance sampling: min(learner / generator probability, clip_max), detached."""
    log_ratio_R = (learner_logprobs_R - engine_logprobs_R).detach()
    return log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=clip_max)


def _rollout_mean(values_R: Tensor, active_R: Tensor, rollout_R: Tensor) -> Tensor:
    """Mean over each rollout's active tokens, given back to every token."""
    size = int(rollout_R.max()) + 1 if rollout_R.numel() else 0
    sums_B = values_R.new_zeros(size).index_add(0, rollout_R, values_R * active_R)
    counts_B = values_R.new_zeros(size).index_add(0, rollout_R, active_R.to(values_R.dtype))
    return (sums_B / counts_B.clamp(min=1.0))[rollout_R]
