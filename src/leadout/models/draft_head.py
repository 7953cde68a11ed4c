"""What every draft head shares: one transformer layer that guesses the policy's next tokens from its inner states.

Learner and engine both use these modules: the learner trains them (`leadout.train.cotrain`), the engine reads the same
parameters for its cached steps (`leadout.drafters.head_cache`). Heads differ in how an entry is made and in what the
next one carries; attention, the rest of the layer and rotation are written once, here.

Entries. Entry j joins the feature of the token before, f_{j-1}, with the embedding of token x_j and predicts x_{j+1}.
Its rotary position is j-1, the position of its feature. The feature is `fuse` of the tapped policy layers where the
policy has seen x_{j-1}; what deeper entries of a draft carry is the head's own choice (`deeper`).

Axes: N entries (any leading axes), F concatenated taps, H head width, E attention input, Q query heads, G key-value
heads, D head dimension, V draft vocabulary, P policy vocabulary.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.errors import ModelError
from leadout.models.rope import RopeSpec
from leadout.models.spec import DecoderSpec
from leadout.records import DraftSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadSpec:
    """What fixes the shape of any draft head."""

    hidden_size: int
    """Width of the head's residual stream."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeSpec
    """The policy's rotary embedding."""
    max_position_embeddings: int
    """The policy's; written to the checkpoint, no table depends on it."""
    vocab_size: int
    """The policy's vocabulary."""
    draft_vocab_size: int
    """Tokens that can be drafted; equal to `vocab_size` when nothing is left out."""
    layer_ids: tuple[int, ...]
    """Tapped policy layers: tap i is the residual stream entering layer i."""
    target_hidden_size: int
    """Width of the policy's residual stream."""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
        for name in (*sizes, "target_hidden_size", "draft_vocab_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ModelError(f"draft head: {name} must be at least 1, got {getattr(self, name)}")
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
            (0.0 < self.rms_norm_eps < 1.0, f"rms_norm_eps must lie between 0 and 1, got {self.rms_norm_eps:g}"),
            (self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}"),
            (
                self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size must be at most vocab_size {self.vocab_size}, got {self.draft_vocab_size}",
            ),
            (len(self.layer_ids) > 0, "expected at least one tapped layer, got none"),
            (
                list(self.layer_ids) == sorted(set(self.layer_ids)),
                f"expected tapped layers in rising order, each once (engines join them so), got {list(self.layer_ids)}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ModelError(f"draft head: {message}")

    @property
    def is_reduced(self) -> bool:
        """Whether some policy tokens can never be drafted."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def fused_size(self) -> int:
        """Width of the concatenated taps."""
        return len(self.layer_ids) * self.target_hidden_size


def policy_shape(spec: DecoderSpec) -> dict[str, Any]:
    """The fields of a `DraftHeadSpec` that a head takes over from its policy; its layer is as wide as one of those."""
    return {
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope": spec.rope,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
    }


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the root mean square taken in at least float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_NH: Tensor) -> Tensor:
        """Same shape and dtype as the input."""
        wide_NH = x_NH.to(torch.promote_types(x_NH.dtype, torch.float32))
        scale_N1 = torch.rsqrt(wide_NH.square().mean(-1, keepdim=True) + self.eps)
        return (wide_NH * scale_N1).to(x_NH.dtype) * self.weight.to(x_NH.dtype)


def linear(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
    """A matrix as checkpoints have them."""
    return nn.Linear(size_in, size_out, bias=bias)


class Attention(nn.Module):
    """The projections of grouped-query attention; who attends to what is the caller's business."""

    def __init__(self, spec: DraftHeadSpec, size_in: int, *, bias: bool = False) -> None:
        """`bias`: of query, key and value, as the Qwen2 family has it."""
        super().__init__()
        self.q_proj = linear(size_in, spec.num_heads * spec.head_dim, bias)
        self.k_proj = linear(size_in, spec.num_kv_heads * spec.head_dim, bias)
        self.v_proj = linear(size_in, spec.num_kv_heads * spec.head_dim, bias)
        self.o_proj = linear(spec.num_heads * spec.head_dim, spec.hidden_size)


class GatedMLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, spec: DraftHeadSpec) -> None:
        super().__init__()
        self.gate_proj = linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x_NH: Tensor) -> Tensor:
        """Same shape as the input."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))
        return out


class Entry(NamedTuple):
    """What the layer's attention input gives: the input itself and where its residual starts."""

    input_NE: Tensor
    residual_NH: Tensor


class DraftHead(nn.Module):
    """A draft head. A forward pass is `fuse` -> `entry` -> `queries` / `keys_values` -> attention -> `complete` ->
    `logits`; the caller owns attention since training, cached drafting and prefill see different keys.
    """

    method: ClassVar[str]
    """Its name in `speculative_config.method`."""
    parallel: ClassVar[bool] = False
    """Whether deeper entries are the same whatever was drafted before, so that all drafts come from one pass."""
    spec: DraftHeadSpec

    @property
    @abstractmethod
    def layer(self) -> Any:
        """The module with `self_attn`, `mlp` and `post_attention_layernorm`."""

    @abstractmethod
    def before_fuse(self, taps_NF: Tensor) -> Tensor:
        """Norms over the tapped states, ahead of `fuse_matrix`."""

    @property
    @abstractmethod
    def fuse_matrix(self) -> nn.Linear | None:
        """What turns the taps into a feature; None where the tap is the feature."""

    @abstractmethod
    def entry(self, features_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """Join the feature of each token's predecessor with the token's embedding."""

    @abstractmethod
    def deeper(self, hidden_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """The entry after one whose output (of `complete`) is given, for the token drafted from it."""

    @abstractmethod
    def final(self, hidden_NH: Tensor) -> Tensor:
        """`complete`'s output after the last norm: what the output matrix takes."""

    @abstractmethod
    def output_rows(self, policy_rows_VH: Tensor | None) -> Tensor:
        """The output matrix [V, H]: the head's own, or the policy's rows of the draft vocabulary."""

    @property
    def has_embeddings(self) -> bool:
        """Whether it carries its own `embed_tokens` (frozen) in place of the policy's."""
        return "embed_tokens" in self._modules

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        dtype: torch.dtype = self.layer.self_attn.o_proj.weight.dtype
        return dtype

    def draft_token_ids(self) -> Tensor | None:
        """Policy id of each draft id, i64[V]; None for the identity."""
        return None

    def draft_spec(self) -> DraftSpec:
        """What a generator holds against every weight update."""
        token_ids = self.draft_token_ids()
        crc = 0 if token_ids is None else zlib.crc32(token_ids.cpu().numpy().tobytes())
        return DraftSpec(
            method=self.method,
            layer_ids=self.spec.layer_ids,
            vocab_size=self.spec.draft_vocab_size,
            vocab_map_crc32=crc,
            rope=self.spec.rope.text,
        )

    def embed(self, token_ids_N: Tensor, policy_embedding_PH: Tensor) -> Tensor:
        """Token embeddings [N, H], its own if it has them; never a path for gradients."""
        return F.embedding(token_ids_N, self.embedding_table(policy_embedding_PH))

    def embedding_table(self, policy_embedding_PH: Tensor) -> Tensor:
        """[P, H], detached: its own if it has one, else the policy's."""
        own: Any = self._modules.get("embed_tokens")
        table: Tensor = policy_embedding_PH if own is None else own.weight
        return table.detach()

    def fuse(self, taps_NF: Tensor) -> Tensor:
        """Features [N, H] of tapped policy states, concatenated in the order of `layer_ids`."""
        matrix = self.fuse_matrix
        taps_NF = self.before_fuse(taps_NF)
        return taps_NF if matrix is None else matrix(taps_NF)

    def queries(self, input_NE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [N, Q, D]."""
        query_N: Tensor = self.layer.self_attn.q_proj(input_NE)
        return rotate(_heads(query_N, self.spec.num_heads), rotary)

    def keys_values(self, input_NE: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [N, G, D]."""
        heads = self.spec.num_kv_heads
        key_N: Tensor = self.layer.self_attn.k_proj(input_NE)
        value_N: Tensor = self.layer.self_attn.v_proj(input_NE)
        return rotate(_heads(key_N, heads), rotary), _heads(value_N, heads)

    def complete(self, attended_NQD: Tensor, residual_NH: Tensor) -> Tensor:
        """The layer after attention: its output before the final norm [N, H]."""
        layer = self.layer
        hidden_NH = residual_NH + layer.self_attn.o_proj(attended_NQD.flatten(-2))
        out_NH: Tensor = hidden_NH + layer.mlp(layer.post_attention_layernorm(hidden_NH))
        return out_NH

    def logits(self, hidden_NH: Tensor, policy_rows_VH: Tensor | None = None) -> Tensor:
        """Draft logits [N, V] of `complete`'s output; `policy_rows_VH` for heads without a matrix of their own."""
        return F.linear(self.final(hidden_NH), self.output_rows(policy_rows_VH))

    def rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, D], computed for any position: there is no table to run out of.

        Angles are float32 whatever the head's dtype, as the policy's own are.
        """
        rope = self.spec.rope
        frequencies = rope.inverse_frequencies().to(positions_N.device)
        angles_ND = positions_N[..., None].float() * frequencies
        angles_ND = torch.cat([angles_ND, angles_ND], dim=-1)
        dtype = torch.promote_types(self.dtype, torch.float32)
        return (angles_ND.cos() * rope.attention_factor).to(dtype), (angles_ND.sin() * rope.attention_factor).to(dtype)


def _heads(x_N: Tensor, heads: int) -> Tensor:
    return x_N.view(*x_N.shape[:-1], heads, x_N.shape[-1] // heads)


def rotate(x_NGD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in Llama's half-split layout; keeps the input's dtype."""
    cos_N1D, sin_N1D = (part.unsqueeze(-2).to(x_NGD.dtype) for part in rotary)
    first, second = x_NGD.chunk(2, dim=-1)
    return x_NGD * cos_N1D + torch.cat([-second, first], dim=-1) * sin_N1D
