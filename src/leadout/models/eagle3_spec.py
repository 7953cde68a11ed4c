"""What fixes an EAGLE-3 draft head: its sizes, its taps, its vocabulary and the order of its norms.

Made from a draft folder's config or, for an untrained head, from the policy's; see `leadout.models.eagle3`.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadout.errors import ModelError
from leadout.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """Everything that fixes the head's shape and arithmetic."""

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
    """Rows of the head's own `lm_head`; equal to `vocab_size` when nothing is left out."""
    layer_ids: tuple[int, ...]
    """Tapped policy layers: tap i is the residual stream entering layer i."""
    target_hidden_size: int
    """Width of the policy's residual stream."""
    norm_before_residual: bool = False
    """Whether the layer's residual starts from the normed feature."""
    norm_before_fc: bool = False
    """One RMSNorm (`input_norm`) over the concatenated taps."""
    fc_norm: bool = True
    """An RMSNorm of its own for every tap (`fc_norm.i`)."""

    def __post_init__(self) -> None:
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
            (self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}"),
            (
                self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size must be at most vocab_size {self.vocab_size}, got {self.draft_vocab_size}",
            ),
            (len(self.layer_ids) > 0, "expected at least one tapped layer, got none"),
            (not (self.norm_before_fc and self.fc_norm), "norm_before_fc and fc_norm exclude each other, both are on"),
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
