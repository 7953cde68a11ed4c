"""What a forward pass of the generating decoder leaves behind.

Axes: B rows, N tokens of the block, H hidden, F concatenated taps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStates:
    """What a forward pass leaves behind for the head and the drafter."""

    hidden_BNH: torch.Tensor
    """After the final norm; `leadout.models.decoder.FusedDecoder.logits` takes it."""
    taps_BNF: torch.Tensor | None
    """Inputs of the tapped layers, concatenated in the order asked for; None without taps."""


def keep_newest(states: DecoderStates, counts_B: npt.NDArray[np.int64] | None) -> DecoderStates:
    """The states of each row's last real token, [B, 1, H]."""
    hidden_BNH = states.hidden_BNH
    batch, width, size = hidden_BNH.shape
    last_B = np.full(batch, width - 1) if counts_B is None else np.maximum(counts_B - 1, 0)
    index_B11 = torch.from_numpy(last_B).to(hidden_BNH.device)[:, None, None]
    return replace(states, hidden_BNH=hidden_BNH.gather(1, index_B11.expand(batch, 1, size)))
