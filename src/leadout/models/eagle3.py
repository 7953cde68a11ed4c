"""The EAGLE-3 draft head: one Llama-style layer that guesses the policy's next tokens from its inner states.

Learner and engine both use this module: the learner trains it (`leadout.train.cotrain`), the engine reads the same
parameters by name for its cached steps. The layout is the published one (EAGLE-3, arXiv 2503.01840; tensors as in
`LlamaForCausalLMEagle3` checkpoints).

Entries. Entry j joins the feature of the token before, f_{j-1}, with the embedding of token x_j and predicts x_{j+1}.
Its rotary position is j-1, the position of its feature. The feature is `fuse` of the tapped policy layers where the
policy has seen x_{j-1}; deeper in a draft it is the head's own output of the entry before.

Axes: N entries (any leading axes), F concatenated taps, H head width, E 2H, Q query heads, G key-value heads,
D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.errors import ModelError
from leadout.models.eagle3_spec import Eagle3Spec as Eagle3Spec
from leadout.records import DraftSpec


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


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class _Attention(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.q_proj = _linear(2 * spec.hidden_size, spec.num_heads * spec.head_dim)
        self.k_proj = _linear(2 * spec.hidden_size, spec.num_kv_heads * spec.head_dim)
        self.v_proj = _linear(2 * spec.hidden_size, spec.num_kv_heads * spec.head_dim)
        self.o_proj = _linear(spec.num_heads * spec.head_dim, spec.hidden_size)


class _MLP(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.gate_proj = _linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = _linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = _linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x_NH: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))
        return out


class _Layer(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = _MLP(spec)


class Entry(NamedTuple):
    """What the layer's attention input gives: the input itself and where its residual starts."""

    input_NE: Tensor
    """Normed embedding and normed feature side by side."""
    residual_NH: Tensor


class Eagle3Head(nn.Module):
    """The draft head. Its `state_dict` has the published tensor names.

    A forward pass is `fuse` -> `entry` -> `queries` / `keys_values` -> attention (the caller's) -> `complete` ->
    `logits`; the caller owns attention since training, cached drafting and prefill see different keys.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, spec: Eagle3Spec, *, own_embeddings: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.fc = _linear(spec.fused_size, spec.hidden_size)
        self.midlayer = _Layer(spec)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = _linear(spec.hidden_size, spec.draft_vocab_size)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.layer_ids)
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(spec.fused_size, spec.rms_norm_eps)
        if own_embeddings:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
            self.embed_tokens.weight.requires_grad_(False)
        elif spec.hidden_size != spec.target_hidden_size:
            raise ModelError(
                f"draft head: expected embed_tokens.weight since its width {spec.hidden_size} differs from the "
                f"policy's {spec.target_hidden_size}, got none; export the head with its embeddings"
            )
        if spec.is_reduced:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))
        else:
            self.d2t = self.t2d = None

    @property
    def has_embeddings(self) -> bool:
        """Whether it carries its own `embed_tokens` (frozen) in place of the policy's."""
        return "embed_tokens" in self._modules

    def draft_token_ids(self) -> Tensor | None:
        """Policy id of each draft id, i64[V] (`d2t` holds offsets: id + d2t[id]); None for the identity."""
        if self.d2t is None:
            return None
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, token_ids_V: Tensor) -> None:
        """Fix which policy tokens can be drafted: distinct ids i64[V], one per `lm_head` row."""
        assert self.d2t is not None and self.t2d is not None, "a full vocabulary has no map"
        distinct = len(set(token_ids_V.tolist()))
        if token_ids_V.shape != self.d2t.shape or distinct != token_ids_V.numel():
            raise ModelError(
                f"draft head: expected {self.d2t.numel()} distinct policy ids as draft vocabulary, "
                f"got {token_ids_V.numel()} with {distinct} distinct"
            )
        self.d2t.copy_(token_ids_V - torch.arange(token_ids_V.numel(), device=token_ids_V.device))
        self.t2d.zero_()
        self.t2d[token_ids_V] = True

    def draft_spec(self) -> DraftSpec:
        """What a generator holds against every weight update."""
        token_ids = self.draft_token_ids()
        crc = 0 if token_ids is None else zlib.crc32(token_ids.cpu().numpy().tobytes())
        return DraftSpec(
            method="eagle3",
            layer_ids=self.spec.layer_ids,
            vocab_size=self.spec.draft_vocab_size,
            vocab_map_crc32=crc,
            rope=self.spec.rope.text,
        )

    def embed(self, token_ids_N: Tensor, policy_embedding_VH: Tensor) -> Tensor:
        """Token embeddings [N, H], its own if it has them; never a path for gradients."""
        table = self.embed_tokens.weight if self.has_embeddings else policy_embedding_VH
        return F.embedding(token_ids_N, table.detach())

    def fuse(self, taps_NF: Tensor) -> Tensor:
        """Features [N, H] of tapped policy states, concatenated in the order of `layer_ids`."""
        if self.spec.fc_norm:
            parts = taps_NF.chunk(len(self.spec.layer_ids), dim=-1)
            taps_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        if self.spec.norm_before_fc:
            taps_NF = self.input_norm(taps_NF)
        features_NH: Tensor = self.fc(taps_NF)
        return features_NH

    def entry(self, features_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """Join the feature of each token's predecessor with the token's embedding."""
        normed_NH = self.midlayer.hidden_norm(features_NH)
        embedded_NH = self.midlayer.input_layernorm(embeddings_NH.to(features_NH.dtype))
        residual_NH = normed_NH if self.spec.norm_before_residual else features_NH
        return Entry(torch.cat([embedded_NH, normed_NH], dim=-1), residual_NH)

    def queries(self, input_NE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [N, Q, D]."""
        query_N: Tensor = self.midlayer.self_attn.q_proj(input_NE)
        return rotate(_heads(query_N, self.spec.num_heads), rotary)

    def keys_values(self, input_NE: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [N, G, D]."""
        heads = self.spec.num_kv_heads
        key_N: Tensor = self.midlayer.self_attn.k_proj(input_NE)
        value_N: Tensor = self.midlayer.self_attn.v_proj(input_NE)
        return rotate(_heads(key_N, heads), rotary), _heads(value_N, heads)

    def complete(self, attended_NQD: Tensor, residual_NH: Tensor) -> Tensor:
        """The layer after attention: its output before the final norm [N, H], the next draft step's feature."""
        layer = self.midlayer
        hidden_NH = residual_NH + layer.self_attn.o_proj(attended_NQD.flatten(-2))
        out_NH: Tensor = hidden_NH + layer.mlp(layer.post_attention_layernorm(hidden_NH))
        return out_NH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Draft logits [N, V] of `complete`'s output."""
        logits_NV: Tensor = self.lm_head(self.norm(hidden_NH))
        return logits_NV

    def rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, D], computed for any position: there is no table to run out of.

        Angles are float32 whatever the head's dtype, as the policy's own are.
        """
        rope = self.spec.rope
        frequencies = rope.inverse_frequencies().to(positions_N.device)
        angles_ND = positions_N[..., None].float() * frequencies
        angles_ND = torch.cat([angles_ND, angles_ND], dim=-1)
        dtype = torch.promote_types(self.fc.weight.dtype, torch.float32)
        return (angles_ND.cos() * rope.attention_factor).to(dtype), (angles_ND.sin() * rope.attention_factor).to(dtype)


def _heads(x_N: Tensor, heads: int) -> Tensor:
    return x_N.view(*x_N.shape[:-1], heads, x_N.shape[-1] // heads)


def rotate(x_NGD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in Llama's half-split layout; keeps the input's dtype."""
    cos_N1D, sin_N1D = (part.unsqueeze(-2).to(x_NGD.dtype) for part in rotary)
    first, second = x_NGD.chunk(2, dim=-1)
    return x_NGD * cos_N1D + torch.cat([-second, first], dim=-1) * sin_N1D


Init = Literal["policy", "random"]


def initial_head(
    spec: Eagle3Spec,
    policy: Mapping[str, Tensor],
    generator: torch.Generator,
    *,
    token_ids_V: Tensor | None = None,
    init: Init = "policy",
) -> Eagle3Head:
    """An untrained head in float32.

    Matrices are normal(0, 0.02), norms 1. With ``init="policy"`` the `lm_head` rows are the policy's and the final norm
    is the policy's times 0.2: at full scale random states would give logits too large to start from.

    Args:
        spec: Shape of the head.
        policy: The policy's state dict in Hugging Face names.
        generator: Source of the random weights.
        token_ids_V: Policy ids of the draft vocabulary, i64[V]; needed exactly when the vocabulary is reduced.
        init: Where head and final norm come from.

    Raises:
        ModelError: the vocabulary map is missing, or the policy has another width than the head.

    """
    if spec.is_reduced != (token_ids_V is not None):
        raise ModelError(
            f"draft head: expected a draft vocabulary exactly when draft_vocab_size ({spec.draft_vocab_size}) is below "
            f"vocab_size ({spec.vocab_size}), got {'none' if token_ids_V is None else 'one'}"
        )
    head = Eagle3Head(spec)
    if token_ids_V is not None:
        head.set_draft_vocabulary(token_ids_V)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
        if init == "policy":
            rows_VH = policy["lm_head.weight"] if "lm_head.weight" in policy else policy["model.embed_tokens.weight"]
            head.lm_head.weight.copy_(rows_VH if token_ids_V is None else rows_VH[token_ids_V])
            head.norm.weight.copy_(policy["model.norm.weight"] * 0.2)
    return head
