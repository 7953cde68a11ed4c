"""The law a token is drawn from: logits -> penalties -> temperature -> top-k -> top-p -> min-p -> draw.

The engine makes one `Law` per round over all verified positions and asks it for probabilities, draws and
log-probabilities; drafters use the same code for q. Draws are by inverse CDF over token ids from a given uniform, so a
law and a number always give the same token.

Axes: X positions (rows x positions of a round, flattened), V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.native.library import LAW_BLOCK, NativeLibrary, native_library
from leadout.records import SamplingParams

_BLOCK = LAW_BLOCK
_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsBatch:
    """The sampling parameters of X positions as tensors; built once per change of the live rows."""

    temperature_X: torch.Tensor
    top_k_X: torch.Tensor
    top_p_X: torch.Tensor
    min_p_X: torch.Tensor
    repetition_X: torch.Tensor
    presence_X: torch.Tensor
    frequency_X: torch.Tensor
    any_tempered: bool
    any_greedy: bool
    any_filters: bool
    any_penalties: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> ParamsBatch:
        """One entry per row, in order."""

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        return cls(
            temperature_X=column("temperature", torch.float64),
            top_k_X=column("top_k", torch.int64).clamp_min(0),
            top_p_X=column("top_p", torch.float64),
            min_p_X=column("min_p", torch.float64),
            repetition_X=column("repetition_penalty", torch.float64),
            presence_X=column("presence_penalty", torch.float64),
            frequency_X=column("frequency_penalty", torch.float64),
            any_tempered=any(p.temperature not in (0.0, 1.0) for p in params),
            any_greedy=any(p.is_greedy for p in params),
            any_filters=any(p.has_filters for p in params),
            any_penalties=any(p.has_penalties for p in params),
        )

    def take(self, index_R: npt.NDArray[np.int64]) -> ParamsBatch:
        """Some of the entries."""
        index = torch.from_numpy(index_R).to(self.temperature_X.device)
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_X")}
        return replace(self, **{name: value[index] for name, value in columns.items()})

    def repeat(self, times: int) -> ParamsBatch:
        """Every row `times` times in a row, for the positions of a round."""
        if times == 1:
            return self
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_X")}
        return replace(self, **{name: value.repeat_interleave(times) for name, value in columns.items()})


@dataclass(frozen=True, slots=True)
class Law:
    """X categorical laws as unnormalised weights; `weights / total` are the probabilities."""

    weights_XV: torch.Tensor
    """exp(logit - largest logit), 0 outside the support."""
    block_sums_XC: torch.Tensor
    """Sums over blocks of the vocabulary, the coarse level of the inverse CDF."""
    total_X: torch.Tensor
    log_weights_XV: torch.Tensor | None = None
    """Logarithms of the weights, where tokens are asked for that are too improbable for a float32 weight."""

    @classmethod
    def from_weights(cls, weights_XV: torch.Tensor, log_weights_XV: torch.Tensor | None = None) -> Law:
        """Wrap non-negative weights; every row must have a positive sum."""
        vocab_size = weights_XV.shape[-1]
        block = min(_BLOCK, vocab_size)
        blocks = -(-vocab_size // block)
        if vocab_size < _BLOCK:
            # Rows of a smaller vocabulary may lie a block apart; the native kernels would take them for whole blocks.
            weights_XV = weights_XV.contiguous()
        if blocks * block != vocab_size:
            weights_XV = torch.nn.functional.pad(weights_XV, (0, blocks * block - vocab_size))
        block_sums_XC = weights_XV.reshape(-1, blocks, block).sum(-1)
        return cls(weights_XV, block_sums_XC, block_sums_XC.double().sum(-1), log_weights_XV)

    @classmethod
    def from_logits(cls, logits_XV: torch.Tensor, params: ParamsBatch, times: int = 1) -> Law:
        """The tempered law, no filters; an entry of `params` serves `times` positions; may write into `logits_XV`."""
        library = native_for(logits_XV)
        if library is None:
            return cls.from_weights(tempered_weights(logits_XV, params.repeat(times)))
        return cls(*library.law(logits_XV, params.temperature_X, times))

    def prob(self, ids_X: torch.Tensor) -> torch.Tensor:
        """f64[X]: probability of one token per law."""
        return self.weights_XV.gather(-1, ids_X[:, None]).squeeze(-1).double() / self.total_X

    def logprob(self, ids_X: torch.Tensor) -> torch.Tensor:
        """f64[X]: log-probability of one token per law."""
        if self.log_weights_XV is None:
            library = native_for(self.weights_XV)
            if library is not None:
                return library.logprobs(self.weights_XV, self.total_X, ids_X)
            return self.prob(ids_X).log()
        return self.log_weights_XV.gather(-1, ids_X[:, None]).squeeze(-1).double() - self.total_X.log()

    def rows(self, index_R: torch.Tensor) -> Law:
        """The laws of some positions."""
        logs = self.log_weights_XV
        return Law(
            self.weights_XV[index_R],
            self.block_sums_XC[index_R],
            self.total_X[index_R],
            None if logs is None else logs[index_R],
        )

    def probs(self, vocab_size: int) -> torch.Tensor:
        """[X, V] normalised probabilities in the weights' dtype."""
        return self.weights_XV[:, :vocab_size] / self.total_X[:, None].to(self.weights_XV.dtype)

    def draw(self, uniforms_X: torch.Tensor) -> torch.Tensor:
        """i64[X]: the token whose slice of the cumulative distribution holds each uniform (f64[X])."""
        library = native_for(self.weights_XV)
        if library is not None:
            return library.draw(self.weights_XV, self.block_sums_XC, uniforms_X)
        cumulative_XC = self.block_sums_XC.double().cumsum(-1)
        target_X = uniforms_X * cumulative_XC[:, -1]
        block_X = _first_above(cumulative_XC, self.block_sums_XC, target_X)
        before_X = cumulative_XC.gather(-1, block_X[:, None]).squeeze(-1)
        before_X = before_X - self.block_sums_XC.gather(-1, block_X[:, None]).squeeze(-1).double()
        blocks = self.block_sums_XC.shape[-1]
        block = self.weights_XV.shape[-1] // blocks
        index_X = torch.arange(block_X.shape[0], device=block_X.device)
        inside_XK = self.weights_XV.reshape(-1, blocks, block)[index_X, block_X]
        offset_X = _first_above(inside_XK.double().cumsum(-1), inside_XK, target_X - before_X)
        return block_X * block + offset_X


def native_for(x_XV: torch.Tensor) -> NativeLibrary | None:
    """The native kernels, where they can take these rows: float32 on CPU, whole blocks apart."""
    if x_XV.dtype is not torch.float32 or not x_XV.is_cpu:
        return None
    return native_library() if x_XV.stride() == (-(-x_XV.shape[-1] // _BLOCK) * _BLOCK, 1) else None


def _first_above(cumulative_XN: torch.Tensor, steps_XN: torch.Tensor, target_X: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds the target, but never one of zero weight (rounding at the end)."""
    found_X = (cumulative_XN <= target_X[:, None]).sum(-1)
    positive_XN = steps_XN > 0
    last_X = steps_XN.shape[-1] - 1 - positive_XN.flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(found_X, last_X)


def tempered_weights(logits_XV: torch.Tensor, params: ParamsBatch) -> torch.Tensor:
    """exp((logit - max) / temperature); a greedy row puts weight 1 on its argmax (lowest id on ties).

    May write into `logits_XV`.
    """
    greedy_X = params.temperature_X == 0.0
    best_X = logits_XV.argmax(-1) if params.any_greedy else None
    weights_XV = tempered_scores(logits_XV, params).exp_()
    if best_X is not None:
        one_hot_XV = torch.zeros_like(weights_XV).scatter_(-1, best_X[:, None], 1.0)
        weights_XV = torch.where(greedy_X[:, None], one_hot_XV, weights_XV)
    return weights_XV


def tempered_scores(logits_XV: torch.Tensor, params: ParamsBatch) -> torch.Tensor:
    """(logit - max) / temperature, untempered where greedy; may write into `logits_XV`."""
    logits_XV = logits_XV.sub_(logits_XV.amax(-1, keepdim=True))
    if params.any_tempered:
        greedy_X = params.temperature_X == 0.0
        logits_XV = logits_XV.div_(params.temperature_X.masked_fill(greedy_X, 1.0)[:, None].to(logits_XV.dtype))
    return logits_XV


def filter_weights(weights_XV: torch.Tensor, params: ParamsBatch) -> torch.Tensor:
    """Zero the weights outside top-k, then top-p, then min-p, as transformers' warpers do.

    Ties at the k-th are kept; top-p keeps the smallest set reaching its share, ties by id; min-p is relative to the
    largest. Only a window of the largest weights is sorted; rows it does not settle are sorted whole.
    """
    library = native_library() if weights_XV.dtype is torch.float32 and weights_XV.device.type == "cpu" else None
    if library is not None:
        return library.filtered(weights_XV, params.top_k_X, params.top_p_X, params.min_p_X)
    return filter_sorted(weights_XV, params)


def filter_sorted(weights_XV: torch.Tensor, params: ParamsBatch) -> torch.Tensor:
    """`filter_weights` with PyTorch's operators."""
    weights_XV = weights_XV.clone()
    vocab_size = weights_XV.shape[-1]
    active_X = (params.top_k_X > 0) | (params.top_p_X < 1.0) | (params.min_p_X > 0.0)
    todo_R = active_X.nonzero().squeeze(-1)
    for window in (min(_WINDOW, vocab_size), vocab_size):
        if todo_R.numel() == 0:
            break
        kept_RV, settled_R = _filter_rows(
            weights_XV[todo_R], params.top_k_X[todo_R], params.top_p_X[todo_R], params.min_p_X[todo_R], window
        )
        weights_XV[todo_R[settled_R]] = kept_RV[settled_R]
        todo_R = todo_R[~settled_R]
    return weights_XV


def _filter_rows(
    weights_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filtered weights, and which rows the window of the largest `window` weights was enough for."""
    vocab_size = weights_RV.shape[-1]
    largest_RW = weights_RV.topk(window, dim=-1).values
    k_R = torch.where(top_k_R > 0, top_k_R, vocab_size)
    k_inside_R = k_R <= window
    kth_R1 = largest_RW.gather(-1, (k_R.clamp_max(window) - 1)[:, None])
    limit_R1 = torch.where((k_inside_R & (top_k_R > 0))[:, None], kth_R1, torch.zeros_like(kth_R1))
    weights_RV = torch.where(weights_RV >= limit_R1, weights_RV, torch.zeros_like(weights_RV))
    settled_R = k_inside_R | (top_k_R == 0) | (k_R >= vocab_size)

    limited_R = top_p_R < 1.0
    mass_R = weights_RV.sum(-1, dtype=torch.float64)
    ordered_RW = torch.where(largest_RW >= limit_R1, largest_RW, torch.zeros_like(largest_RW)).double()
    reached_RW = ordered_RW.cumsum(-1) >= (top_p_R * mass_R)[:, None]
    count_R = torch.where(reached_RW.any(-1), reached_RW.to(torch.uint8).argmax(-1) + 1, window)
    settled_R &= ~limited_R | reached_RW.any(-1) | (window == vocab_size)
    edge_R1 = largest_RW.gather(-1, (count_R - 1)[:, None])
    ties_RV = weights_RV == edge_R1
    allowed_R1 = (count_R - (largest_RW > edge_R1).sum(-1))[:, None]
    kept_RV = (weights_RV > edge_R1) | (ties_RV & (ties_RV.cumsum(-1) <= allowed_R1))
    weights_RV = torch.where(kept_RV | ~limited_R[:, None], weights_RV, torch.zeros_like(weights_RV))

    floor_R1 = (min_p_R * weights_RV.amax(-1).double())[:, None]
    return torch.where(weights_RV.double() >= floor_R1, weights_RV, torch.zeros_like(weights_RV)), settled_R


def penalise(
    logits_XV: torch.Tensor, seen_XV: torch.Tensor, output_counts_XV: torch.Tensor, params: ParamsBatch
) -> torch.Tensor:
    """Repetition penalty over `seen_XV` (prompt and output), presence and frequency over the output's counts.

    Repetition (Keskar et al. 2019, CTRL, eq. in section 4.1, as in transformers): positive logits are divided,
    negative ones multiplied. Returns a new tensor.
    """
    dtype = logits_XV.dtype
    repetition_X1 = params.repetition_X[:, None].to(dtype)
    scaled_XV = torch.where(logits_XV > 0, logits_XV / repetition_X1, logits_XV * repetition_X1)
    out_XV = torch.where(seen_XV, scaled_XV, logits_XV)
    out_XV = out_XV - params.frequency_X[:, None].to(dtype) * output_counts_XV.to(dtype)
    return out_XV - params.presence_X[:, None].to(dtype) * (output_counts_XV > 0).to(dtype)
