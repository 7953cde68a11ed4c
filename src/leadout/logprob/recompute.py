"""Stage logprob, second half: log-probabilities of given tokens from the policy's last hidden state.

The output matrix is applied to a chunk of positions at a time, in the forward pass and, where there are several
chunks, again in the backward pass, so that logits over the vocabulary never exist for a whole batch. Logits are
computed in float32 (float64 for a float64 policy) whatever the body runs in.

Axes: R positions, H policy width, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token per position and what falls off on the way."""

    logprobs_R: Tensor
    """log softmax(logits / temperature)[target], differentiable."""
    entropy_R: Tensor
    """Entropy of the distribution in nats; no gradient."""
    log_normalizer_R: Tensor
    """logsumexp(logits / temperature); no gradient."""


Watch = Callable[[int, Tensor], None]
"""Called with the first position of a chunk and its logits before temperature, [C, V]."""


def token_logprobs(
    hidden_RH: Tensor,
    head_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias_V: Tensor | None = None,
    low_gradients: bool = False,
    watch: Watch | None = None,
) -> TokenLogprobs:
    """Log-probabilities of `targets_R` under softmax(hidden @ head^T / temperature).

    Args:
        hidden_RH: Last hidden states after the final norm.
        head_VH: The output matrix.
        targets_R: Token ids, i64.
        temperature: > 0, the sampling temperature.
        chunk_size: Positions whose logits exist at once.
        bias_V: The output matrix's bias, if it has one.
        low_gradients: Matrix products of the backward pass in bfloat16, as autocast does for all other layers.
        watch: Sees the logits of every chunk in the forward pass.

    """
    assert temperature > 0.0, "the law of a greedy rollout has no density to train on"
    dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
    with torch.autocast(hidden_RH.device.type, enabled=False):
        out: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_RH.to(dtype), head_VH.to(dtype), bias_V, targets_R, temperature, chunk_size, low_gradients, watch
        )
    return TokenLogprobs(*out)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob[r] / d logits[r] = (onehot(target) - softmax) / temperature.

    The softmax of a lone chunk is kept for the backward pass, which follows at once; those of several are computed
    again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        chunk_size: int,
        low_gradients: bool,
        watch: Watch | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_R, entropy_R, log_normalizer_R = (hidden_RH.new_empty(hidden_RH.shape[0]) for _ in range(3))
        kept_CV: Tensor | None = None
        for start in range(0, hidden_RH.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits_CV = torch.nn.functional.linear(hidden_RH[rows], head_VH, bias_V)
            if watch is not None:
                watch(start, logits_CV)
            if temperature != 1.0:
                logits_CV /= temperature
            log_normalizer_C = logits_CV.logsumexp(-1)
            log_normalizer_R[rows] = log_normalizer_C
            log_probs_CV = logits_CV.sub_(log_normalizer_C[:, None])
            logprobs_R[rows] = log_probs_CV.gather(-1, targets_R[rows, None]).squeeze(-1)
            probs_CV = log_probs_CV.exp()
            entropy_R[rows] = -torch.linalg.vecdot(probs_CV, log_probs_CV)
            kept_CV = probs_CV
        keeps = any(ctx.needs_input_grad[:3]) and hidden_RH.shape[0] <= chunk_size
        ctx.save_for_backward(hidden_RH, head_VH, bias_V, targets_R, log_normalizer_R, kept_CV if keeps else None)
        ctx.temperature, ctx.chunk_size, ctx.low_gradients = temperature, chunk_size, low_gradients
        ctx.mark_non_differentiable(entropy_R, log_normalizer_R)
        return logprobs_R, entropy_R, log_normalizer_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, bias_V, targets_R, log_normalizer_R, kept_RV = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        scaled_R = grads[0] / ctx.temperature
        product_type = torch.bfloat16 if ctx.low_gradients else head_VH.dtype
        factors_VH = head_VH.to(product_type) if needs_hidden else None
        grad_hidden_RH = torch.empty_like(hidden_RH) if needs_hidden else None
        grad_head_VH: Tensor | None = None
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        for start in range(0, hidden_RH.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            if kept_RV is not None:
                grad_CV = kept_RV * -scaled_R[:, None]
            else:
                logits_CV = torch.nn.functional.linear(hidden_RH[rows], head_VH, bias_V).div_(ctx.temperature)
                grad_CV = logits_CV.sub_(log_normalizer_R[rows, None]).exp_().mul_(-scaled_R[rows, None])
            grad_CV.scatter_add_(-1, targets_R[rows, None], scaled_R[rows, None])
            factor_CV = grad_CV.to(product_type)
            if grad_hidden_RH is not None and factors_VH is not None:
                grad_hidden_RH[rows] = torch.mm(factor_CV, factors_VH)
            if needs_head:
                part_VH = torch.mm(factor_CV.T, hidden_RH[rows].to(product_type)).to(head_VH.dtype)
                grad_head_VH = part_VH if grad_head_VH is None else grad_head_VH.add_(part_VH)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        if needs_head and grad_head_VH is None:
            grad_head_VH = torch.zeros_like(head_VH)
        return grad_hidden_RH, grad_head_VH, grad_bias_V, None, None, None, None, None
