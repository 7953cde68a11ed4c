"""The random numbers of one round, for the rows that take part in it.

Made anew each round by the engine and handed to the drafter (as `leadout.interfaces.Noise`) and to the accept rule.

Axes: B rows, K drafts, N = K + 1 positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.randomness import Purpose, round_uniforms


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    """Uniforms keyed by rollout, position, purpose and round; made together when the first of them is asked for."""

    seed_B: npt.NDArray[np.uint64]
    draw_B: npt.NDArray[np.int64]
    sibling_B: npt.NDArray[np.int64]
    start_B: npt.NDArray[np.int64]
    """Position (count of tokens generated so far) at which this round starts."""
    device: torch.device
    """Where the numbers are needed."""
    width: int = 1
    """Positions of the round that are expected to be asked for."""
    _made: list[npt.NDArray[np.float64]] = field(default_factory=list, init=False, repr=False)
    """The numbers of every purpose so far, f64[4, B, N], in the last place."""

    @property
    def correcting(self) -> Purpose:
        """The purpose whose numbers draw corrections; the audit injects wrong ones."""
        return Purpose.RESIDUAL

    def take(self, index_R: npt.NDArray[np.int64]) -> RoundNumbers:
        """The numbers of some of the rows."""
        return RoundNumbers(
            self.seed_B[index_R],
            self.draw_B[index_R],
            self.sibling_B[index_R],
            self.start_B[index_R],
            self.device,
            self.width,
        )

    def _block(self, width: int, purpose: Purpose) -> npt.NDArray[np.float64]:
        """f64[B, width]: the numbers for the round's first `width` positions."""
        if not self._made or self._made[-1].shape[2] < width:
            wide = max(width, self.width)
            self._made.append(round_uniforms(self.seed_B, self.draw_B, self.sibling_B, self.start_B, wide))
        return np.asarray(self._made[-1][purpose, :, :width])

    def _place(self, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
        placed = torch.from_numpy(np.ascontiguousarray(numbers))
        return placed if self.device.type == "cpu" else placed.to(self.device)

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        """f64[B] for sampling draft `depth` (0-based)."""
        return self._place(self._block(depth + 1, Purpose.DRAFT)[:, depth])

    def accept_uniforms(self, num_drafts: int) -> torch.Tensor:
        """f64[B, K] for accepting each draft."""
        return self._place(self._block(num_drafts, Purpose.ACCEPT))

    def token_uniforms(self, num_positions: int) -> torch.Tensor:
        """f64[B, N] for drawing from the policy itself at each position."""
        return self._place(self._block(num_positions, Purpose.TOKEN))

    def next_uniforms(self) -> torch.Tensor:
        """f64[B] for drawing the round's first token from the policy itself."""
        return self._place(self._block(1, Purpose.TOKEN)[:, 0])

    def judging_uniforms(self, num_positions: int) -> tuple[npt.NDArray[np.float64], ...]:
        """f64[B, N] each for accepting, correcting and drawing, with one stride; on the host, wherever the rest is."""
        purposes = (Purpose.ACCEPT, self.correcting, Purpose.TOKEN)
        return tuple(self._block(num_positions, purpose) for purpose in purposes)

    def residual_uniforms(self, offset_B: npt.NDArray[np.int64]) -> torch.Tensor:
        """f64[B] for the correction at round position `offset_B`."""
        block_BN = self._block(int(offset_B.max()) + 1, self.correcting)
        return self._place(block_BN[np.arange(len(offset_B)), offset_B])
