"""A native multi-token head: one decoder layer of the policy's own kind that a checkpoint brings along.

Layout of MiMo (arXiv 2505.07608): tensors `model.mtp_layers.0.*`, a Qwen2 layer behind a projection of the policy's
state and the next token's embedding. The state is the residual stream that leaves the policy's last layer, ahead of
the final norm. For longer drafts the layer is used again on its own normed output. Embeddings and output matrix are
the policy's, so that it drafts from the whole vocabulary; neither learns from it.

Axes: N entries (any leading axes), H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from leadout.errors import ModelError
from leadout.models.draft_head import Attention, DraftHead, DraftHeadSpec, Entry, GatedMLP, RMSNorm, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec(DraftHeadSpec):
    """The policy's sizes; one tap, the stream that enters its final norm."""

    def __post_init__(self) -> None:
        # super() without arguments would name the class as it was before slots were added.
        DraftHeadSpec.__post_init__(self)
        if self.hidden_size != self.target_hidden_size or self.is_reduced or len(self.layer_ids) != 1:
            raise ModelError(
                "multi-token head: expected the policy's width and whole vocabulary and one tap, "
                f"got width {self.hidden_size} for {self.target_hidden_size}, {self.draft_vocab_size} of "
                f"{self.vocab_size} tokens and taps {list(self.layer_ids)}"
            )


class MtpHead(DraftHead):
    """The head. Its `state_dict` has the checkpoint's names without `model.mtp_layers.0.`."""

    method: ClassVar[str] = "mtp"
    spec: MtpSpec

    def __init__(self, spec: MtpSpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.input_proj = linear(2 * spec.hidden_size, spec.hidden_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, spec.hidden_size, bias=True)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)
        self.final_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    @property
    def layer(self) -> Any:
        """The head is its layer."""
        return self

    def before_fuse(self, taps_NF: Tensor) -> Tensor:
        """The tap is the feature."""
        return taps_NF

    @property
    def fuse_matrix(self) -> nn.Linear | None:
        """None."""
        return None

    def entry(self, features_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """Normed state and normed embedding, projected to the stream of the layer."""
        embedded_NH = self.token_layernorm(embeddings_NH.to(features_NH.dtype))
        joined_NE = torch.cat([self.hidden_layernorm(features_NH), embedded_NH], dim=-1)
        stream_NH: Tensor = self.input_proj(joined_NE)
        return Entry(self.input_layernorm(stream_NH), stream_NH)

    def deeper(self, hidden_NH: Tensor, embeddings_NH: Tensor) -> Entry:
        """The layer's normed output stands for the policy's state."""
        return self.entry(self.final(hidden_NH), embeddings_NH)

    def final(self, hidden_NH: Tensor) -> Tensor:
        """`final_layernorm`."""
        normed_NH: Tensor = self.final_layernorm(hidden_NH)
        return normed_NH

    def output_rows(self, policy_rows_VH: Tensor | None) -> Tensor:
        """The policy's; no path for gradients."""
        assert policy_rows_VH is not None, "a multi-token head has no output matrix of its own"
        return policy_rows_VH.detach()


def initial_mtp_head(spec: MtpSpec, policy: Mapping[str, Tensor], generator: torch.Generator) -> MtpHead:
    """An untrained head in float32: matrices normal(0, 0.02), biases 0, norms 1 but the last.

    The last norm is the policy's times 0.2: at full scale random states would give logits too large to start from.
    """
    head = MtpHead(spec)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()
        head.final_layernorm.weight.copy_(policy["model.norm.weight"] * 0.2)
    return head
