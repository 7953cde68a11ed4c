"""The random numbers of one round, for the rows that take part in it.

Made anew each round by the engine and handed to the drafter (as `leadout.interfaces.Noise`) and to the accept rule.

Axes: B rows, K drafts, N = K + 1 positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.randomness import Purpose, uniforms


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    """Uniforms keyed by rollout, position, purpose and round."""

    seed_B: npt.NDArray[np.uint64]
    draw_B: npt.NDArray[np.int64]
    sibling_B: npt.NDArray[np.int64]
    start_B: npt.NDArray[np.int64]
    """Position (count of tokens generated so far) at which this round starts."""
    device: torch.device
    """Where the numbers are needed."""

    def _at(self, position_B: npt.NDArray[np.int64], purpose: Purpose) -> torch.Tensor:
        start_B = None if purpose is Purpose.TOKEN else self.start_B
        flat = uniforms(self.seed_B, self.draw_B, self.sibling_B, position_B, purpose, start_B)
        return torch.from_numpy(flat).to(self.device)

    def _block(self, width: int, purpose: Purpose) -> torch.Tensor:
        """f64[B, width]: the numbers for the round's first `width` positions."""
        position_BW = self.start_B[:, None] + np.arange(width)
        seed_X, draw_X, sibling_X = (np.repeat(a, width) for a in (self.seed_B, self.draw_B, self.sibling_B))
        start_X = None if purpose is Purpose.TOKEN else np.repeat(self.start_B, width)
        flat = uniforms(seed_X, draw_X, sibling_X, position_BW.reshape(-1), purpose, start_X)
        return torch.from_numpy(flat.reshape(position_BW.shape)).to(self.device)

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        """f64[B] for sampling draft `depth` (0-based)."""
        return self._at(self.start_B + depth, Purpose.DRAFT)

    def accept_uniforms(self, num_drafts: int) -> torch.Tensor:
        """f64[B, K] for accepting each draft."""
        return self._block(num_drafts, Purpose.ACCEPT)

    def token_uniforms(self, num_positions: int) -> torch.Tensor:
        """f64[B, N] for drawing from the policy itself at each position."""
        return self._block(num_positions, Purpose.TOKEN)

    def residual_uniforms(self, offset_B: npt.NDArray[np.int64]) -> torch.Tensor:
        """f64[B] for the correction at round position `offset_B`."""
        return self._at(self.start_B + offset_B, Purpose.RESIDUAL)
