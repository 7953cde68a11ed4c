"""Stage logprob: attention over a pack, every completion against its prompt and itself and nothing else.

A mask over the whole pack is right too (`leadout.logprob.pack.block_mask`) and costs the square of the pack's length,
of which siblings need little: eight completions of a group look at each other's tokens only to drop them. Here prompts
attend among themselves, once each, and completions in rows of their own, to keys gathered from the prompt and from
themselves. Cost grows with the number of completions, not with its square, so packs may be large. A small pack takes
the mask: its square costs less than the gathering.

Registered with transformers as an attention implementation; a model is switched to it by name and behaves as with
``sdpa`` wherever no layout is passed.

Axes: T tokens of a pack, G prompts, P longest prompt, C completions, L longest completion, K = P + L keys of a
completion, Q query heads, N key-value heads, F = Q / N, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from leadout.batch import TrainBatch
from leadout.errors import ModelError
from leadout.logprob.pack import segments

NAME = "leadout_pack"
"""As models know it."""

_CHANGED_SCORES = ("softcap", "s_aux", "position_bias")
"""What other families hand to attention, and this one does not know."""
_GATHERED_KEY = 180
"""Scores that take as long as gathering one key and its value, measured on two cores with heads of 64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackLayout:
    """Where the tokens of a pack go. Padding points at token 0 and its results are dropped."""

    prompt_GP: Tensor
    """Index into the pack, i64."""
    completion_CL: Tensor
    """Index into the pack, i64."""
    key_CK: Tensor
    """Index into the pack of every key: the prompt's, then the completion's own, i64."""
    bias_C1LK: Tensor
    """0 where a completion's token sees a key, else -inf."""
    place_T: Tensor
    """Where each token's result lies among those of all prompts and then all completions, i64."""

    @classmethod
    def of(cls, batch: TrainBatch, dtype: torch.dtype) -> PackLayout:
        """`dtype`: of the queries."""
        device = batch.token_ids_T.device
        blocks = segments(batch)
        prompts = {segment: index_T for segment, index_T in blocks.items() if segment < 0}
        parts = [index_T for segment, index_T in blocks.items() if segment >= 0]
        owner = [prompts[int(batch.parent_T[index_T[0]])] for index_T in parts]
        prompt_GP, completion_CL, own_CP = _padded([*prompts.values()]), _padded(parts), _padded(owner)
        longest_P, longest_L = prompt_GP.shape[1], completion_CL.shape[1]
        own_CP = F.pad(own_CP, (0, longest_P - own_CP.shape[1]))
        column_P, column_L = (torch.arange(size, device=device) for size in (longest_P, longest_L))
        length_C = torch.tensor([each.numel() for each in owner], device=device)
        prompt_C1P = (column_P < length_C[:, None])[:, None].expand(-1, longest_L, -1)
        causal_CLL = (column_L <= column_L[:, None]).expand(len(parts), -1, -1)
        bias_CLK = torch.zeros(len(parts), longest_L, longest_P + longest_L, dtype=dtype, device=device)
        bias_CLK.masked_fill_(~torch.cat([prompt_C1P, causal_CLL], -1), -torch.inf)
        place_T = torch.empty(batch.num_tokens, dtype=torch.int64, device=device)
        for row, index_T in enumerate(prompts.values()):
            place_T[index_T] = row * longest_P + column_P[: index_T.numel()]
        for row, index_T in enumerate(parts):
            place_T[index_T] = prompt_GP.numel() + row * longest_L + column_L[: index_T.numel()]
        return cls(
            prompt_GP=prompt_GP,
            completion_CL=completion_CL,
            key_CK=torch.cat([own_CP, completion_CL], 1),
            bias_C1LK=bias_CLK[:, None],
            place_T=place_T,
        )


def layout_pays(batch: TrainBatch) -> bool:
    """Whether attention in rows takes less time than a mask over the whole pack."""
    blocks = segments(batch)
    prompts = [index_T.numel() for segment, index_T in blocks.items() if segment < 0]
    parts = [index_T.numel() for segment, index_T in blocks.items() if segment >= 0]
    longest_P, longest_L = max(prompts, default=0), max(parts, default=0)
    keys = len(parts) * (longest_P + longest_L)
    scores = len(prompts) * longest_P**2 + keys * longest_L
    return batch.num_tokens**2 > scores + _GATHERED_KEY * keys


def _padded(parts: list[Tensor]) -> Tensor:
    return pad_sequence(parts, batch_first=True) if parts else torch.zeros(0, 0, dtype=torch.int64)


def use_pack_attention(decoder: Any) -> None:
    """Switch a transformers decoder to attention that takes a `PackLayout`."""
    AttentionInterface.register(NAME, attend_pack)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.set_attn_implementation(NAME)


def attend_pack(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: queries [1, Q, T, D], keys and values [1, N, T, D]; result [1, T, Q, D].

    Raises ModelError for scores that are changed on the way to the softmax.
    """
    layout: PackLayout | None = settings.pop("pack_layout", None)
    changed = [name for name in _CHANGED_SCORES if settings.get(name) is not None]
    if changed:
        raise ModelError(f"attention with {', '.join(changed)} does not run on packs; this model is not supported")
    if layout is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return out
    scale, dropout = settings.get("scaling"), settings.get("dropout", 0.0)
    query_TQD, key_TND, value_TND = (each[0].transpose(0, 1) for each in (query, key, value))
    at = layout.prompt_GP
    prompts = _prompts(_rows(query_TQD, at), _rows(key_TND, at), _rows(value_TND, at), scale, dropout)
    found = [prompts.flatten(0, 1)]
    if layout.completion_CL.numel():
        keys, values = _rows(key_TND, layout.key_CK), _rows(value_TND, layout.key_CK)
        queries = _rows(query_TQD, layout.completion_CL)
        rows = _completions(queries, keys, values, layout.bias_C1LK, scale, dropout)
        found.append(rows.flatten(0, 1))
    return torch.cat(found).index_select(0, layout.place_T)[None], None


def _rows(tokens_TND: Tensor, index_BS: Tensor) -> Tensor:
    """[B, S, N, D]; its backward pass adds whole rows, which indexing with two axes does not."""
    rows_BSND: Tensor = tokens_TND.index_select(0, index_BS.flatten()).unflatten(0, index_BS.shape)
    return rows_BSND


def _prompts(query_GPQD: Tensor, key_GPND: Tensor, value_GPND: Tensor, scale: float | None, dropout: float) -> Tensor:
    """[G, P, Q, D]; padding lies behind all that sees it."""
    fold = query_GPQD.shape[2] // key_GPND.shape[2]
    out_GQPD = F.scaled_dot_product_attention(
        query_GPQD.transpose(1, 2),
        key_GPND.repeat_interleave(fold, 2).transpose(1, 2),
        value_GPND.repeat_interleave(fold, 2).transpose(1, 2),
        is_causal=True,
        scale=scale,
        dropout_p=dropout,
    )
    return out_GQPD.transpose(1, 2)


def _completions(
    query_CLQD: Tensor,
    key_CKND: Tensor,
    value_CKND: Tensor,
    bias_C1LK: Tensor,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """[C, L, Q, D]; query heads that share a key head become more queries of it."""
    rows, length, heads, width = query_CLQD.shape
    shared = key_CKND.shape[2]
    fold = heads // shared
    query_CNXD: Tensor = query_CLQD.unflatten(2, (shared, fold)).permute(0, 2, 3, 1, 4).reshape(rows, shared, -1, width)
    out_CNXD = F.scaled_dot_product_attention(
        query_CNXD,
        key_CKND.transpose(1, 2),
        value_CKND.transpose(1, 2),
        attn_mask=bias_C1LK.repeat(1, 1, fold, 1),
        scale=scale,
        dropout_p=dropout,
    )
    out_CLQD: Tensor = out_CNXD.unflatten(2, (fold, length)).permute(0, 3, 1, 2, 4).reshape(rows, length, heads, width)
    return out_CLQD
