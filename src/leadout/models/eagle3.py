"""The EAGLE-3 draft head, and its sibling that drafts all tokens in one pass.

The layout is the published one (EAGLE-3, arXiv 2503.01840; tensors as in `LlamaForCausalLMEagle3` checkpoints). Deeper
in a draft an entry carries the head's own output of the entry before. In the parallel head (P-EAGLE, the layout that
vLLM calls parallel drafting) it carries a learnt state and a learnt embedding in place of what is not known yet, so
that no draft waits for the one before.

Axes: N entries (any leading axes), F concatenated taps, H head width, E 2H, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from leadout.errors import ModelError
from leadout.models.draft_head import Attention, DraftHead, Entry, GatedMLP, RMSNorm, linear
from leadout.models.eagle3_spec import Eagle3Spec as Eagle3Spec
from leadout.models.head_files import FileForm

_SOME_ROWS = 8


class _Layer(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, 2 * spec.hidden_size)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)


class Eagle3Head(DraftHead):
    """The draft head. Its `state_dict` has the published tensor names."""

    method: ClassVar[str] = "eagle3"
    spec: Eagle3Spec
    d2t: Tensor | None
    t2d: Tensor | None
    form: FileForm | None = None
    """Of the files that it was read from."""
    borrows_output: bool = False
    """Whether its files held no output matrix, and the policy's was copied."""

    def __init__(self, spec: Eagle3Spec, *, own_embeddings: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.fc = linear(spec.fused_size, spec.hidden_size)
        self.midlayer = _Layer(spec)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = linear(spec.hidden_size, spec.draft_vocab_size)
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
    def layer(self) -> Any:
        """The layer."""
        return self.midlayer

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

    def before_fuse(self, taps_NF: Tensor) -> Tensor:
        """The norms of the config."""
        if self.spec.fc_norm:
            parts = taps_NF.chunk(len(self.spec.layer_ids), dim=-1)
            return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        if self.spec.norm_before_fc:
            normed_NF: Tensor = self.input_norm(taps_NF)
            return normed_NF
        return taps_NF

    @property
    def fuse_matrix(self) -> nn.Linear | None:
        """`fc`."""
        return self.fc

    def entry(self, features_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """Normed embedding and normed feature side by side."""
        normed_NH = self.midlayer.hidden_norm(features_NH)
        embedded_NH = self.midlayer.input_layernorm(embeddings_NH.to(features_NH.dtype))
        residual_NH = normed_NH if self.spec.norm_before_residual else features_NH
        return Entry(torch.cat([embedded_NH, normed_NH], dim=-1), residual_NH)

    def deeper(self, hidden_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """The output before the final norm is the next feature."""
        return self.entry(hidden_NH, embeddings_NH)

    def final(self, hidden_NH: Tensor) -> Tensor:
        """The final norm."""
        normed_NH: Tensor = self.norm(hidden_NH)
        return normed_NH

    def output_rows(self, policy_rows_VH: Tensor | None) -> Tensor:
        """Its own."""
        return self.lm_head.weight


class ParallelHead(Eagle3Head):
    """The head that drafts in one pass: entries past the newest token carry `mask_hidden` and `mask_embedding`."""

    method: ClassVar[str] = "parallel"
    parallel: ClassVar[bool] = True

    def __init__(self, spec: Eagle3Spec, *, own_embeddings: bool = False) -> None:
        super().__init__(spec, own_embeddings=own_embeddings)
        self.mask_hidden = nn.Parameter(torch.zeros(1, spec.fused_size))
        self.mask_embedding = nn.Parameter(torch.zeros(1, spec.hidden_size))

    def deeper(self, hidden_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """What is not known yet, whatever came before."""
        # A product with one row is a matrix-vector product, whose rounding depends on where the memory lies.
        feature_NH = self.fuse(self.mask_hidden.expand(_SOME_ROWS, -1))[:1].expand(hidden_NH.shape)
        return self.entry(feature_NH, self.mask_embedding.expand(embeddings_NH.shape))


def make_head(spec: Eagle3Spec, *, own_embeddings: bool = False) -> Eagle3Head:
    """The head that a spec describes."""
    kind = Eagle3Head if spec.mask_token_id is None else ParallelHead
    return kind(spec, own_embeddings=own_embeddings)


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
    head = make_head(spec)
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
