"""The key-value cache of the generating decoder: slots with stable ids, rows kept compact where that helps.

Callers hold slot ids from `allocate` to `release`. For PyTorch's attention live slots occupy physical rows 0..n-1: when
one is released the last row moves into its place, so that attention over all live rows, in the order given by `order`,
reads a plain view and copies nothing. Native attention finds every row by its address, and nothing moves.

Axes: B slots of one call, K key-value heads, L positions, D head dimension, M = 2K (keys, then values).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.errors import CapacityError
from leadout.models.spec import DecoderSpec

_FREE = -1


class KVSlots:
    """Keys and values of `num_slots` rows of up to `max_len` tokens.

    One extra position per row (`trash`) takes writes of padding tokens that would fall past the end.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        compact: bool = True,
    ) -> None:
        """`compact` False leaves rows where they are when others are released; `FusedDecoder.new_kv` knows."""
        self.max_len = max_len
        self.num_slots = num_slots
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Tokens held by each slot, by slot id."""
        self._num_kv_heads = spec.num_kv_heads
        self._row_of: npt.NDArray[np.int64] = np.full(num_slots, _FREE, np.int64)
        self._compact = compact
        self._slot_at: list[int] = []
        """Live slots; in the order of their rows where those are kept compact."""
        # Zeros, not empty: masked positions are multiplied by weight 0, and 0 times NaN is NaN.
        self._shape = (num_slots, 2 * spec.num_kv_heads, max_len + 1, spec.head_dim)
        self._num_layers = spec.num_layers
        self.dtype = dtype
        self._device = torch.device(device)
        self._layers: list[torch.Tensor] = []
        self.addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Where each layer's cache lies, i64[num_layers], for code that reads it in place."""
        self.set_allocated(True)

    def set_allocated(self, allocated: bool) -> None:
        """Drop the memory (no slot may be live) or take it again, zeroed."""
        assert not self._slot_at, "release all slots first"
        if not allocated:
            self._layers = []
        elif not self._layers:
            self._layers = [
                torch.zeros(self._shape, dtype=self.dtype, device=self._device) for _ in range(self._num_layers)
            ]
        self.addresses = np.array([layer.data_ptr() for layer in self._layers], np.int64)

    @staticmethod
    def bytes_per_slot(spec: DecoderSpec, max_len: int, dtype: torch.dtype) -> int:
        """Memory of one slot in bytes."""
        return spec.num_layers * 2 * spec.num_kv_heads * (max_len + 1) * spec.head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Memory of all slots in bytes."""
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    @property
    def num_free(self) -> int:
        """Slots that can still be allocated."""
        return self.num_slots - len(self._slot_at)

    @property
    def trash(self) -> int:
        """The position that no attention reads."""
        return self.max_len

    def allocate(self, num: int) -> list[int]:
        """Take `num` empty slots and return their ids.

        Raises:
            CapacityError: fewer are free.

        """
        if num > self.num_free:
            raise CapacityError(f"expected at most {self.num_free} new rows, got {num}; raise max_num_seqs")
        slots = [int(slot) for slot in np.flatnonzero(self._row_of == _FREE)[:num]]
        for slot in slots:
            self._row_of[slot] = len(self._slot_at) if self._compact else slot
            self._slot_at.append(slot)
            self.lengths[slot] = 0
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; where rows are kept compact the last live one moves into each hole."""
        for slot in slots:
            hole = int(self._row_of[slot])
            assert hole != _FREE, f"slot {slot} is not allocated"
            if self._compact:
                self._fill(hole)
            else:
                self._slot_at.remove(slot)
            self._row_of[slot] = _FREE
            self.lengths[slot] = 0

    def _fill(self, hole: int) -> None:
        """Move the last live row into a hole."""
        mover = self._slot_at.pop()
        last = int(self._row_of[mover])
        if last != hole:
            self._copy_rows(last, slice(hole, hole + 1), int(self.lengths[mover]))
            self._row_of[mover] = hole
            self._slot_at[hole] = mover

    def check_fits(self, lengths_B: npt.NDArray[np.int64]) -> None:
        """Raise CapacityError where a row would grow past its end."""
        needed = int(lengths_B.max())
        if needed > self.max_len:
            raise CapacityError(f"expected at most {self.max_len} tokens in a row, got {needed}; raise max_model_len")

    def advance(self, slots: Sequence[int], counts_B: npt.NDArray[np.int64]) -> None:
        """Count tokens whose keys and values were written."""
        index = list(slots)
        grown_B = self.lengths[index] + counts_B
        assert int(grown_B.max(initial=0)) <= self.max_len, "advanced past the end of a slot"
        self.lengths[index] = grown_B

    def rollback(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64]) -> None:
        """Forget everything past these lengths; the memory is overwritten by later tokens."""
        assert bool((lengths_B <= self.lengths[list(slots)]).all()), "rollback cannot lengthen a slot"
        self.lengths[list(slots)] = lengths_B

    def copy_prefix(self, source_slot: int, target_slots: Sequence[int], length: int) -> None:
        """Give the targets the first `length` tokens of the source; their own content is dropped."""
        assert length <= self.lengths[source_slot], "the source is shorter than the prefix"
        source = int(self._row_of[source_slot])
        targets = [int(row) for row in self._row_of[list(target_slots)] if row != source]
        if targets:
            first, last = min(targets), max(targets)
            consecutive = last - first + 1 == len(targets)
            rows = slice(first, last + 1) if consecutive else torch.tensor(targets, device=self._layers[0].device)
            self._copy_rows(source, rows, length)
        self.lengths[list(target_slots)] = length

    def order(self, slots: Sequence[int]) -> list[int]:
        """The same slots in physical order; where rows are compact, all live slots are read so without a copy."""
        return sorted(slots, key=lambda slot: int(self._row_of[slot]))

    def rows(self, slots: Sequence[int]) -> slice | torch.Tensor:
        """Physical rows of the slots: a slice if they follow one another, else an index, i64[B]."""
        rows_B = self.rows_array(slots)
        first = int(rows_B[0])
        if np.array_equal(rows_B, np.arange(first, first + len(rows_B))):
            return slice(first, first + len(rows_B))
        return torch.from_numpy(rows_B).to(self._layers[0].device)

    def view(self, layer: int, slots: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `length` positions, each [B, K, L, D].

        Views of the cache when the slots are consecutive rows in order, copies otherwise.
        """
        return self.read(layer, self.rows(slots), length)

    def read(self, layer: int, rows: slice | torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `view`, for physical rows from `rows`."""
        cache = self._layers[layer][:, :, :length]
        block_BMLD = cache[rows] if isinstance(rows, slice) else cache.index_select(0, rows)
        return block_BMLD[:, : self._num_kv_heads], block_BMLD[:, self._num_kv_heads :]

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one physical row to the next, and from one head to the next within a row."""
        _, heads, positions, dim = self._shape
        return heads * positions * dim, positions * dim

    def rows_array(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        """Physical rows of the slots, i64[B]."""
        rows_B = self._row_of[list(slots)]
        assert bool((rows_B != _FREE).all()), "a slot is not allocated"
        return rows_B

    def write_block(self, layer: int, rows: slice, start: int, block_BNMD: torch.Tensor) -> None:
        """Store keys and values of N tokens at positions start..start+N-1 of consecutive rows."""
        end = start + block_BNMD.shape[1]
        self._layers[layer][rows, :, start:end].copy_(block_BNMD.transpose(1, 2))

    def write_at(self, layer: int, rows_B1: torch.Tensor, positions_BN: torch.Tensor, block_BNMD: torch.Tensor) -> None:
        """Store keys and values of tokens at positions of their own; `trash` may repeat."""
        self._layers[layer][rows_B1, :, positions_BN] = block_BNMD

    def _copy_rows(self, source: int, targets: slice | torch.Tensor, length: int) -> None:
        for layer in self._layers:
            layer[targets, :, :length] = layer[source, :, :length].clone()
