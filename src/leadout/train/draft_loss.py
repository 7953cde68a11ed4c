"""Stage train, drafter: what the head learns and how its acceptance is foretold. Pure functions of tensors.

Axes: N positions, V draft vocabulary, B rollouts, L tokens of a rollout (padded), K drafts of a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def teacher_probabilities(
    hidden_NH: Tensor, head_rows_VH: Tensor, log_normalizer_N: Tensor, temperature: float
) -> Tensor:
    """The policy's probabilities of the draft vocabulary [N, V], detached.

    They are not renormalised: the full vocabulary's normaliser is given, so a row sums to the share of the policy's
    mass that can be drafted at all.
    """
    dtype = log_normalizer_N.dtype
    logits_NV = hidden_NH.detach().to(dtype) @ head_rows_VH.detach().to(dtype).T
    return logits_NV.div_(temperature).sub_(log_normalizer_N[:, None]).exp_()


def soft_cross_entropy(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """-sum_v p(v) log q(v) per position, f32[N], with q = softmax(draft logits / temperature).

    With a reduced vocabulary p is not renormalised, so a position weighs as much as the policy's mass on the draft
    vocabulary there: no draft can be accepted more often than that, and its gradient should not count for more.
    """
    logits_NV = draft_logits_NV.to(teacher_NV.dtype) / temperature
    mass_N = teacher_NV.sum(-1)
    return mass_N * logits_NV.logsumexp(-1) - (teacher_NV * logits_NV).sum(-1)


def unrolled_loss(losses: Sequence[Tensor], decay: float) -> Tensor:
    """Mean loss of each unrolled step weighted by decay**i and normalised by the sum of the weights; 0 for none.

    Args:
        losses: Per step, the loss of each valid position; a step may have none.
        decay: Weight of a step relative to the one before.

    """
    weighted = [(decay**i, loss_N.mean()) for i, loss_N in enumerate(losses) if loss_N.numel()]
    total = sum(weight for weight, _ in weighted)
    parts = [weight / total * mean for weight, mean in weighted]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def acceptance_of_token(token_logprobs_N: Tensor, draft_logprobs_N: Tensor) -> Tensor:
    """min(1, q/p) of the token that was emitted: the probability that it had been drafted and accepted."""
    return (draft_logprobs_N - token_logprobs_N).clamp(max=0.0).exp()


def expected_rounds(accept_BLK: npt.NDArray[np.float64], lengths_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Expected number of rounds that drafting K tokens a round needs for each rollout.

    Given the rollout, a draft was its token with probability min(1, q/p) (Bayes: q min(1, p/q) / p). A round that
    starts at token m therefore ends after c tokens with the chance that drafts 1..c-1 match and draft c does not, or
    after K + 1 when all match. Drafts past the end are wasted but their round counts. Token 0 comes from the prefill.

    Args:
        accept_BLK: accept[b, m, i] = min(1, q/p) at token m + i for a round that starts at token m.
        lengths_B: Tokens of each rollout.

    Returns:
        f64[B], 0 for rollouts of fewer than two tokens.

    """
    num_rows, num_tokens, num_drafts = accept_BLK.shape
    starts_BL = np.zeros((num_rows, num_tokens + num_drafts + 2))
    starts_BL[:, 1] = 1.0
    rounds_B = np.zeros(num_rows)
    for m in range(1, num_tokens):
        reached_B = np.where(m < lengths_B, starts_BL[:, m], 0.0)
        rounds_B += reached_B
        for i in range(num_drafts):
            accept_B = accept_BLK[:, m, i]
            starts_BL[:, m + i + 1] += reached_B * (1.0 - accept_B)
            reached_B = reached_B * accept_B
        starts_BL[:, m + num_drafts + 1] += reached_B
    return rounds_B
