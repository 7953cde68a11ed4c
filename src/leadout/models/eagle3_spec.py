"""What fixes an EAGLE-3 draft head: its sizes, its taps, its vocabulary and the order of its norms.

Made from a draft folder's config or, for an untrained head, from the policy's; see `leadout.models.eagle3`.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadout.errors import ModelError
from leadout.models.draft_head import DraftHeadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(DraftHeadSpec):
    """Everything that fixes the head's shape and arithmetic; `draft_vocab_size` is the rows of its own `lm_head`."""

    norm_before_residual: bool = False
    """Whether the layer's residual starts from the normed feature."""
    norm_before_fc: bool = False
    """One RMSNorm (`input_norm`) over the concatenated taps."""
    fc_norm: bool = True
    """An RMSNorm of its own for every tap (`fc_norm.i`)."""
    mask_token_id: int | None = None
    """Set for a head that drafts all tokens in one pass: the token whose embedding row stands for the unknown ones in
    formats that keep no row of its own for it."""

    def __post_init__(self) -> None:
        # super() without arguments would name the class as it was before slots were added.
        DraftHeadSpec.__post_init__(self)
        mask = self.mask_token_id
        checks = (
            (not (self.norm_before_fc and self.fc_norm), "norm_before_fc and fc_norm exclude each other, both are on"),
            (mask is None or 0 <= mask < self.vocab_size, f"mask token id must be below {self.vocab_size}, got {mask}"),
        )
        for holds, message in checks:
            if not holds:
                raise ModelError(f"draft head: {message}")
