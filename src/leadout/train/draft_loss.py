"""Stage train, drafter: what the head learns and how its acceptance is foretold. Pure functions of tensors.

Axes: N positions, V draft vocabulary, B rollouts, L tokens of a rollout (padded), K drafts of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadout.errors import ConfigError


def teacher_probabilities(
    hidden_NH: Tensor, head_rows_VH: Tensor, log_normalizer_N: Tensor, temperature: float
) -> Tensor:
    """The policy's probabilities of the draft vocabulary [N, V], detached.

    They are not renormalised: the full vocabulary's normaliser is given, so a row sums to the share of the policy's
    mass that can be drafted at all.
    """
    dtype = log_normalizer_N.dtype
    logits_NV = hidden_NH.detach().to(dtype) @ head_rows_VH.detach().to(dtype).T
    if temperature != 1.0:
        logits_NV /= temperature
    return logits_NV.sub_(log_normalizer_N[:, None]).exp_()


def tempered(draft_logits_NV: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Draft logits / temperature in `dtype`; a temperature of one costs no pass over them."""
    logits_NV = draft_logits_NV.to(dtype)
    return logits_NV if temperature == 1.0 else logits_NV / temperature


def soft_cross_entropy(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """-sum_v p(v) log q(v) per position, f32[N], with q = softmax(draft logits / temperature).

    With a reduced vocabulary p is not renormalised, so a position weighs as much as the policy's mass on the draft
    vocabulary there: no draft can be accepted more often than that, and its gradient should not count for more.
    """
    logits_NV = tempered(draft_logits_NV, temperature, teacher_NV.dtype)
    mass_N = teacher_NV.sum(-1)
    return mass_N * logits_NV.logsumexp(-1) - (teacher_NV * logits_NV).sum(-1)


def shared_mass(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """sum_v min(p(v), q(v)) per position, [N]: the probability that a sampled draft is accepted."""
    draft_NV = tempered(draft_logits_NV, temperature, teacher_NV.dtype).softmax(-1)
    # The gradient of `minimum` splits ties and takes four passes to do so; that of `where` takes one.
    return torch.where(teacher_NV < draft_NV, teacher_NV, draft_NV).sum(-1)


def kl_divergence(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """sum_v p(v) log(p(v) / q(v)) per position, [N]: `soft_cross_entropy` less the policy's part, same gradient."""
    entropy_N = -torch.xlogy(teacher_NV, teacher_NV).sum(-1)
    return soft_cross_entropy(draft_logits_NV, teacher_NV, temperature) - entropy_N


def total_variation(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """1 - sum_v min(p(v), q(v)) per position, [N]: the probability that a sampled draft is rejected.

    Over the full vocabulary this is half the L1 distance; with a reduced one the mass that cannot be drafted counts as
    rejected. Its gradient vanishes where q has no overlap with p, so it is weak from a random start.
    """
    return 1.0 - shared_mass(draft_logits_NV, teacher_NV, temperature)


def log_acceptance(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """-log sum_v min(p(v), q(v)) per position, [N]: a round's chain of acceptances is a product, this its log.

    It is `total_variation` with the gradient divided by the acceptance: positions that are rarely accepted weigh more.
    Positions without any policy mass in the draft vocabulary are constant.
    """
    least = torch.finfo(teacher_NV.dtype).tiny
    return -shared_mass(draft_logits_NV, teacher_NV, temperature).clamp_min(least).log()


class DraftLoss(Protocol):
    """Loss per position of draft logits against the policy's probabilities of the draft vocabulary."""

    def __call__(self, draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
        """[N]."""
        ...


LOSSES: Mapping[str, DraftLoss] = {
    "ce": soft_cross_entropy,
    "kl": kl_divergence,
    "tv": total_variation,
    "lk": log_acceptance,
}


def make_loss(text: str) -> DraftLoss:
    """A loss by name, or a weighted sum: ``ce``, ``ce+tv``, ``0.3*ce+0.7*tv``; a term without weight counts once.

    Raises:
        ConfigError: a term is none of ce, kl, tv, lk, or its weight is not a number.

    """
    terms: list[tuple[float, DraftLoss]] = []
    for term in text.split("+"):
        weight, _, name = term.strip().rpartition("*")
        try:
            terms.append((float(weight) if weight else 1.0, LOSSES[name.strip()]))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"draft.loss_fn: expected a sum of {', '.join(LOSSES)} such as ce+tv or 0.3*ce+0.7*tv, got {text!r}"
            ) from error

    def total(draft_logits_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
        parts = [weight * loss(draft_logits_NV, teacher_NV, temperature) for weight, loss in terms]
        return torch.stack(parts).sum(0)

    return terms[0][1] if len(terms) == 1 and terms[0][0] == 1.0 else total


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
