"""The entries that a head has yet to run: what the policy committed since a row's last draft, or all of it so far.

Part of the draft head inside the engine (`leadout.drafters.head_drafter`). Plain steps are only noted and many are
written at once, which is most of what a resting drafter costs.

Axes: B rows, N columns of a round, S slots, M entries, F tapped width, X entries of several rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.native.rows import copy_rows

Ints = npt.NDArray[np.int64]

_GROW = 16
_MOST_UNWRITTEN = 32
_AHEAD = 2
"""Places kept free behind a row's newest entry."""


class WaitingEntries:
    """Tokens and the policy's states before them, by slot."""

    def __init__(
        self, num_slots: int, max_len: int, fused_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.taps_SMF = torch.zeros((num_slots, _GROW, fused_size), dtype=dtype, device=device)
        self.tokens_SM = torch.zeros((num_slots, _GROW), dtype=torch.int64, device=device)
        self._counts_S = np.zeros(num_slots, np.int64)
        self._longest = max_len + _AHEAD
        self._unwritten: list[tuple[Sequence[int], torch.Tensor, torch.Tensor]] = []
        """Slots, tokens and taps of plain steps."""

    @staticmethod
    def bytes_per_slot(fused_size: int, max_len: int, dtype: torch.dtype) -> int:
        """Memory of a slot in bytes where none of its entries has been run."""
        return (max_len + _AHEAD) * (fused_size * dtype.itemsize + torch.int64.itemsize)

    @property
    def nbytes(self) -> int:
        """Memory of the states in bytes."""
        return self.taps_SMF.numel() * self.taps_SMF.element_size()

    def open(self, slots: Sequence[int], taps_F: torch.Tensor) -> None:
        """Start rows without entries; `taps_F` are the states before their first token."""
        self.write_steps()
        for slot in slots:
            self.taps_SMF[slot, 0] = taps_F
        self._counts_S[list(slots)] = 0

    def add(self, slots: Sequence[int], tokens_BN: torch.Tensor, counts_B: Ints, taps_BNF: torch.Tensor | None) -> None:
        """The first `counts_B` columns of each row; without taps those of the tokens are there already."""
        if tokens_BN.shape[1] == 1 and taps_BNF is not None:
            self._unwritten.append((slots, tokens_BN, taps_BNF))
            if len(self._unwritten) >= _MOST_UNWRITTEN:
                self.write_steps()
            return
        self.write_steps()
        slots_B = np.array(slots, np.int64)
        num_rows, width = tokens_BN.shape
        column_N = np.arange(width)
        from_X = (np.arange(num_rows)[:, None] * width + column_N)[column_N < counts_B[:, None]]
        row_X, column_X = np.divmod(from_X, width)
        held_B = self._counts_S[slots_B]
        taps_XF = None if taps_BNF is None else taps_BNF.flatten(0, 1)
        self._write(slots_B[row_X], held_B[row_X] + column_X, tokens_BN.reshape(-1), taps_XF, from_X)
        self._counts_S[slots_B] = held_B + counts_B

    def write_steps(self) -> None:
        """Write the plain steps that were only noted."""
        if not self._unwritten:
            return
        steps, self._unwritten = self._unwritten, []
        places, slots = [], []
        for slots_of_step, _, _ in steps:
            slots_B = np.array(slots_of_step, np.int64)
            slots.append(slots_B)
            places.append(self._counts_S[slots_B])
            self._counts_S[slots_B] += 1
        _, tokens, taps = zip(*steps, strict=True)
        slot_X = np.concatenate(slots)
        tokens_X, taps_XF = torch.cat(tokens)[:, 0], torch.cat(taps)[:, 0]
        self._write(slot_X, np.concatenate(places), tokens_X, taps_XF, np.arange(len(slot_X)))

    def _write(
        self, slot_X: Ints, place_X: Ints, tokens_Y: torch.Tensor, taps_YF: torch.Tensor | None, from_X: Ints
    ) -> None:
        """Rows `from_X` of tokens and taps to their places."""
        self._reserve(int(place_X.max()) + _AHEAD)
        to_X = slot_X * self.tokens_SM.shape[1] + place_X
        copy_rows(self.tokens_SM.view(-1, 1), to_X, tokens_Y[:, None], from_X)
        if taps_YF is not None:
            copy_rows(self.taps_SMF.flatten(0, 1), to_X, taps_YF, from_X)

    def _reserve(self, width: int) -> None:
        """Make room, doubling so that growth is rare, but not past the longest row."""
        have = self.tokens_SM.shape[1]
        if width > have:
            extra = max(width, min(2 * have, self._longest)) - have
            self.tokens_SM = torch.nn.functional.pad(self.tokens_SM, (0, extra))
            self.taps_SMF = torch.nn.functional.pad(self.taps_SMF, (0, 0, 0, extra))

    def take(self, slots: Sequence[int]) -> Ints:
        """i64[B]: how many entries wait in each slot, at least one; they count as run from now on."""
        self.write_steps()
        index = list(slots)
        counts_B = self._counts_S[index]
        assert counts_B.min() >= 1, "every row has gained a token since its last draft"
        self._counts_S[index] = 0
        return counts_B

    def release(self, slots: Sequence[int]) -> None:
        """Forget the entries of these slots."""
        self.write_steps()
        self._counts_S[list(slots)] = 0
