"""The rows that take part in a round, with what of them is constant while the set does not change.

Axes: B live rows, N columns of a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.sampling import ParamsBatch
from leadout.rollout.numbers import RoundNumbers
from leadout.rollout.rows import Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LiveRows:
    """B rows in the order in which the engine runs them."""

    rows: list[Row]
    slots: list[int]
    slots_B: Ints
    params: ParamsBatch
    seed_B: npt.NDArray[np.uint64]
    draw_B: Ints
    sibling_B: Ints
    end_ids: list[tuple[npt.NDArray[np.bool_], Ints]]
    """Distinct sets of end-of-sequence ids with the rows (bool[B]) that use each."""

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> LiveRows:
        """Prepare a set of rows."""
        params = [row.request.params for row in rows]
        distinct = sorted({p.stop_token_ids for p in params if p.stop_token_ids})
        return cls(
            rows=rows,
            slots=[row.slot for row in rows],
            slots_B=np.array([row.slot for row in rows], np.int64),
            params=ParamsBatch.of(params, device),
            seed_B=np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], np.uint64),
            draw_B=np.array([row.request.rollout_id.draw for row in rows], np.int64),
            sibling_B=np.array([row.request.rollout_id.sibling for row in rows], np.int64),
            end_ids=[(np.array([p.stop_token_ids == ids for p in params]), np.array(ids)) for ids in distinct],
        )

    def take(self, index_R: Ints) -> LiveRows:
        """Some of the rows."""
        return LiveRows(
            rows=[self.rows[index] for index in index_R],
            slots=[self.slots[index] for index in index_R],
            slots_B=self.slots_B[index_R],
            params=self.params.take(index_R),
            seed_B=self.seed_B[index_R],
            draw_B=self.draw_B[index_R],
            sibling_B=self.sibling_B[index_R],
            end_ids=[(uses_B[index_R], ids) for uses_B, ids in self.end_ids],
        )

    def ends(self, tokens_BN: Ints) -> npt.NDArray[np.bool_]:
        """bool[B, N]: which tokens end their row."""
        ends_BN = np.zeros(tokens_BN.shape, bool)
        for uses_B, ids in self.end_ids:
            ends_BN |= uses_B[:, None] & (tokens_BN[:, :, None] == ids).any(-1)
        return ends_BN

    def numbers(self, start_B: Ints, device: torch.device, width: int = 1) -> RoundNumbers:
        """The random numbers of a round that starts at these positions and is `width` positions long."""
        return RoundNumbers(self.seed_B, self.draw_B, self.sibling_B, start_B, device, width)
