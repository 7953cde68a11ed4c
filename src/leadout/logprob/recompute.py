"""Stage logprob, second half: log-probabilities of given tokens from the policy's last hidden state.

The output matrix is applied to a chunk of positions at a time, in the forward pass and, where there are several
chunks, again in the backward pass, so that logits over the vocabulary never exist for a whole batch. Logits are float32
(float64 for a float64 policy) whatever the body runs in; in native code their products' operands are bfloat16.

Axes: R positions, H policy width, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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
    native: HeadMath | None = None,
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
        native: Takes the place of PyTorch's operators where there is no bias; its products take bfloat16 operands, and
            `low_gradients` is for the operators.
        watch: Sees the logits of every chunk in the forward pass.

    """
    assert temperature > 0.0, "the law of a greedy rollout has no density to train on"
    dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
    math = native if native is not None and bias_V is None else OperatorHead(bias_V, low_gradients=low_gradients)
    with torch.autocast(hidden_RH.device.type, enabled=False):
        out: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_RH.to(dtype), head_VH.to(dtype), bias_V, targets_R, temperature, chunk_size, math, watch
        )
    return TokenLogprobs(*out)


class HeadMath(Protocol):
    """How a chunk's logits, law and gradients are computed."""

    def logits(self, hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
        """hidden @ head^T, [C, V]."""
        ...

    def law(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of softmax(logits / temperature): log-probabilities of the targets, entropies, log normalizers."""
        ...

    def back(
        self,
        hidden_CH: Tensor,
        head_VH: Tensor,
        logits_CV: Tensor,
        targets_C: Tensor,
        temperature: float,
        log_normalizer_C: Tensor,
        slope_C: Tensor,
        grad_head_VH: Tensor | None,
        *,
        add: bool,
    ) -> Tensor:
        """Gradient of sum(slope * logprob) to the hidden states; `grad_head_VH` is set, or added to.

        d logprob[r] / d logits[r] = (onehot(target) - softmax) / temperature.
        """
        ...


class OperatorHead:
    """PyTorch's operators, on any device and in any type; the gradient of a bias falls off in `back`."""

    def __init__(self, bias_V: Tensor | None, *, low_gradients: bool) -> None:
        """`low_gradients`: matrix products of the backward pass in bfloat16."""
        self._bias_V = bias_V
        self._low_gradients = low_gradients
        self.grad_bias_V: Tensor | None = None

    def logits(self, hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
        """In the type of its arguments."""
        return torch.nn.functional.linear(hidden_CH, head_VH, self._bias_V)

    def law(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves the logits as they are."""
        log_probs_CV = logits_CV / temperature
        log_normalizer_C = log_probs_CV.logsumexp(-1)
        log_probs_CV.sub_(log_normalizer_C[:, None])
        logprobs_C = log_probs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        return logprobs_C, -torch.linalg.vecdot(log_probs_CV.exp(), log_probs_CV), log_normalizer_C

    def back(
        self,
        hidden_CH: Tensor,
        head_VH: Tensor,
        logits_CV: Tensor,
        targets_C: Tensor,
        temperature: float,
        log_normalizer_C: Tensor,
        slope_C: Tensor,
        grad_head_VH: Tensor | None,
        *,
        add: bool,
    ) -> Tensor:
        """As `HeadMath` has it."""
        scaled_C = slope_C / temperature
        grad_CV = (logits_CV / temperature).sub_(log_normalizer_C[:, None]).exp_().mul_(-scaled_C[:, None])
        grad_CV.scatter_add_(-1, targets_C[:, None], scaled_C[:, None])
        if self._bias_V is not None:
            part_V = grad_CV.sum(0)
            self.grad_bias_V = self.grad_bias_V + part_V if add and self.grad_bias_V is not None else part_V
        dtype = torch.bfloat16 if self._low_gradients else head_VH.dtype
        factor_CV = grad_CV.to(dtype)
        if grad_head_VH is not None:
            part_VH = torch.mm(factor_CV.T, hidden_CH.to(dtype))
            if add:
                grad_head_VH.add_(part_VH)
            else:
                grad_head_VH.copy_(part_VH)
        return torch.mm(factor_CV, head_VH.to(dtype)).to(hidden_CH.dtype)


class _TokenLogprobs(torch.autograd.Function):
    """The logits of a lone chunk are kept for the backward pass, which follows at once; others are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        chunk_size: int,
        math: HeadMath,
        watch: Watch | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_R, entropy_R, log_normalizer_R = (hidden_RH.new_empty(hidden_RH.shape[0]) for _ in range(3))
        logits_CV: Tensor | None = None
        for start in range(0, hidden_RH.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits_CV = math.logits(hidden_RH[rows], head_VH)
            if watch is not None:
                watch(start, logits_CV)
            logprobs_R[rows], entropy_R[rows], log_normalizer_R[rows] = math.law(
                logits_CV, targets_R[rows], temperature
            )
        keeps = any(ctx.needs_input_grad[:3]) and hidden_RH.shape[0] <= chunk_size
        ctx.save_for_backward(hidden_RH, head_VH, targets_R, log_normalizer_R, logits_CV if keeps else None)
        ctx.temperature, ctx.chunk_size, ctx.math = temperature, chunk_size, math
        ctx.mark_non_differentiable(entropy_R, log_normalizer_R)
        return logprobs_R, entropy_R, log_normalizer_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, targets_R, log_normalizer_R, kept_RV = ctx.saved_tensors
        math: HeadMath = ctx.math
        _, needs_head, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_RH = torch.empty_like(hidden_RH)
        make = torch.empty_like if hidden_RH.shape[0] else torch.zeros_like
        grad_head_VH = make(head_VH) if needs_head else None
        for start in range(0, hidden_RH.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            grad_hidden_RH[rows] = math.back(
                hidden_RH[rows],
                head_VH,
                math.logits(hidden_RH[rows], head_VH) if kept_RV is None else kept_RV,
                targets_R[rows],
                ctx.temperature,
                log_normalizer_R[rows],
                grads[0][rows],
                grad_head_VH,
                add=start > 0,
            )
        grad_bias_V = math.grad_bias_V if needs_bias and isinstance(math, OperatorHead) else None
        return grad_hidden_RH, grad_head_VH, grad_bias_V, None, None, None, None, None
