"""Cached forward passes of a draft head: true entries in batches, drafts one by one or all in one pass.

Entry i of a row sits at cache position i, which is also its rotary position. Only the newest entries of a batch need
queries; the others contribute keys and values. The arithmetic is `leadout.models.draft_head.DraftHead`'s, with its
matrix products packed for generation. In bfloat16 on a CPU that can, an EAGLE-3 head runs in `leadout.models.native`.

Axes: B rows, M entries, K drafts, N = B x K, H head width, G key-value heads, R query heads per key-value head, D head
dimension, L cache positions, V draft vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from leadout.models.draft_head import DraftHead, DraftHeadSpec, Entry, rotate
from leadout.models.eagle3 import Eagle3Head, ParallelHead
from leadout.models.linear import PackedLinear
from leadout.models.native.eagle3 import native_head

_SLACK = 32


class HeadCache:
    """Keys and values of one head layer for every slot."""

    def __init__(
        self,
        head: DraftHead,
        *,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        native: bool | None = None,
        policy_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`native` False keeps to PyTorch operators; None uses the native kernels where they exist.

        `policy_logits`: the policy's output matrix on normed states, for heads without one of their own.
        """
        spec = head.spec
        self._head = head
        self._device = device
        self.lengths = np.zeros(num_slots, np.int64)
        eligible = native is not False and dtype is torch.bfloat16 and device.type == "cpu"
        self._native = None
        self._policy_logits = policy_logits
        if eligible and isinstance(head, Eagle3Head):
            self._native = native_head(head, num_slots, max_len + _SLACK)
        if self._native is not None:
            self._native.pack()
            return
        shape = (num_slots, spec.num_kv_heads, max_len + _SLACK, spec.head_dim)
        self._keys_SGLD = torch.zeros(shape, dtype=dtype, device=device)
        self._values_SGLD = torch.zeros(shape, dtype=dtype, device=device)
        positions_L = torch.arange(max_len + _SLACK, device=device)
        self._cos_LD, self._sin_LD = (part.to(dtype) for part in head.rotary(positions_L))
        self.pack()

    @staticmethod
    def bytes_per_slot(spec: DraftHeadSpec, max_len: int, dtype: torch.dtype) -> int:
        """Memory of one slot in bytes."""
        return 2 * spec.num_kv_heads * (max_len + _SLACK) * spec.head_dim * dtype.itemsize

    def pack(self) -> None:
        """Lay the head's present weights out for generation."""
        if self._native is not None:
            self._native.pack()
            return
        head, attention, mlp = self._head, self._head.layer.self_attn, self._head.layer.mlp
        dtype = head.dtype

        def packed(*parts: nn.Linear) -> PackedLinear:
            weights: list[torch.Tensor] = [part.weight for part in parts]
            biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
            return PackedLinear(
                torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None, dtype
            )

        self._fc = None if head.fuse_matrix is None else packed(head.fuse_matrix)
        self._q = packed(attention.q_proj)
        self._kv = packed(attention.k_proj, attention.v_proj)
        self._qkv = packed(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = packed(attention.o_proj)
        self._gate_up = packed(mlp.gate_proj, mlp.up_proj)
        self._down = packed(mlp.down_proj)
        self._lm_head = packed(head.lm_head) if isinstance(head, Eagle3Head) else None

    @property
    def drafts_at_once(self) -> bool:
        """Whether `draft` makes whole drafts: one token after another, where the native kernels run the head."""
        return self._native is not None and not self._head.parallel

    def draft(
        self,
        slots: Sequence[int],
        tokens_SM: torch.Tensor,
        taps_SMF: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        embedding_PH: torch.Tensor,
        uniforms_BK: torch.Tensor,
        temperature_B: torch.Tensor,
        token_ids_V: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Append the true entries that wait in the slots, then draft K tokens a row from the tempered laws.

        Returns columns and policy ids i64[B, K] and laws f32[B, K, V]; None if the head's logits are not finite.
        """
        assert self._native is not None
        slots_B = np.array(slots, np.int64)
        start_B = self.lengths[slots_B]
        self.lengths[slots_B] = start_B + counts_B
        return self._native.draft(
            slots_B, start_B, counts_B, tokens_SM, taps_SMF, embedding_PH, uniforms_BK, temperature_B, token_ids_V
        )

    def run(
        self,
        slots: Sequence[int],
        taps_BMF: torch.Tensor,
        embeddings_BMH: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Append `counts_B` true entries per row; the head's output [B, H] of the newest one."""
        if self._native is not None:
            slots_B = np.array(slots, np.int64)
            start_B, counts_B = self.lengths[slots_B], np.ascontiguousarray(counts_B, np.int64)
            self.lengths[slots_B] = start_B + counts_B
            return self._native.run(slots_B, start_B, counts_B, embeddings_BMH, taps_BMF=taps_BMF)
        entry = self._head.entry(self._fuse(taps_BMF), embeddings_BMH)
        hidden_B1H = self._append(slots, entry, counts_B, 1)
        self.lengths[list(slots)] += counts_B
        return hidden_B1H[:, 0]

    def run_parallel(
        self,
        slots: Sequence[int],
        taps_BMF: torch.Tensor,
        embeddings_BMH: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        num_drafts: int,
    ) -> torch.Tensor:
        """Append true entries and, in the same pass, the unknown ones of a whole draft: outputs [B, K, H].

        Column 0 belongs to the newest true entry; the unknown ones after it will be overwritten by true ones.
        """
        head = self._head
        assert isinstance(head, ParallelHead)
        unknown = num_drafts - 1
        if self._native is not None:
            newest_BH = self.run(slots, taps_BMF, embeddings_BMH, counts_B)
            return torch.stack([newest_BH, *self._native_unknown(head, slots, unknown, embeddings_BMH.dtype)], 1)
        width = taps_BMF.shape[1]
        taps_BLF = F.pad(taps_BMF, (0, 0, 0, unknown))
        embeddings_BLH = F.pad(embeddings_BMH.to(head.dtype), (0, 0, 0, unknown))
        unknown_BL = np.arange(width + unknown) >= counts_B[:, None]
        is_unknown_BL1 = torch.from_numpy(unknown_BL).to(self._device)[:, :, None]
        taps_BLF = torch.where(is_unknown_BL1, head.mask_hidden.to(taps_BLF.dtype), taps_BLF)
        embeddings_BLH = torch.where(is_unknown_BL1, head.mask_embedding, embeddings_BLH)
        entry = head.entry(self._fuse(taps_BLF), embeddings_BLH)
        hidden_BKH = self._append(slots, entry, counts_B + unknown, num_drafts)
        self.lengths[list(slots)] += counts_B
        return hidden_BKH

    def _native_unknown(
        self, head: ParallelHead, slots: Sequence[int], unknown: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Outputs [B, H] of the unknown entries, one call for all: the n-th as the newest of a block of n.

        Blocks of one row write the same keys and values to the same places, so their order does not matter.
        """
        assert self._native is not None
        if unknown == 0:
            return []
        slots_N = np.tile(np.array(slots, np.int64), unknown)
        counts_N = np.repeat(np.arange(1, unknown + 1, dtype=np.int64), len(slots))
        taps_NMF = head.mask_hidden.expand(len(slots_N), unknown, -1)
        embeddings_NMH = head.mask_embedding.to(dtype).expand(len(slots_N), unknown, -1)
        hidden_NH = self._native.run(slots_N, self.lengths[slots_N], counts_N, embeddings_NMH, taps_BMF=taps_NMF)
        return list(hidden_NH.split(len(slots)))

    def _append(
        self, slots: Sequence[int], entry: Entry, counts_B: npt.NDArray[np.int64], num_queries: int
    ) -> torch.Tensor:
        """Write M entries per row behind the true ones; the outputs of the newest `num_queries`, [B, K, H]."""
        start_B = self.lengths[list(slots)]
        self._write(slots, start_B, self._kv(entry.input_NE))
        newest_BK = counts_B[:, None] + np.arange(-num_queries, 0)
        rows_B1 = torch.arange(len(slots), device=self._device)[:, None]
        at_BK = torch.from_numpy(newest_BK).to(self._device)
        query_BKX = self._q(entry.input_NE[rows_B1, at_BK])
        return self._attend(slots, query_BKX, entry.residual_NH[rows_B1, at_BK], start_B[:, None] + newest_BK + 1)

    def extend(
        self, slots: Sequence[int], features_BH: torch.Tensor, embeddings_BH: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """One draft entry per row, `depth` entries past the true ones; it will be overwritten by true ones."""
        if self._native is not None:
            slots_B = np.array(slots, np.int64)
            ones_B = np.ones(len(slots_B), np.int64)
            return self._native.run(
                slots_B, self.lengths[slots_B] + depth, ones_B, embeddings_BH[:, None], features_BH=features_BH
            )
        entry = self._head.deeper(features_BH, embeddings_BH)
        spec = self._head.spec
        query_BX, kv_BX = self._qkv(entry.input_NE).split(
            [spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim], dim=-1
        )
        start_B = self.lengths[list(slots)] + depth
        self._write(slots, start_B, kv_BX[:, None])
        query_B1X, residual_B1H = query_BX[:, None], entry.residual_NH[:, None]
        return self._attend(slots, query_B1X, residual_B1H, start_B[:, None] + 1)[:, 0]

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Draft logits [B, V], fp32 or fp64."""
        if self._native is not None:
            return self._native.logits(hidden_BH)
        final_BH = self._head.final(hidden_BH)
        if self._lm_head is None:
            assert self._policy_logits is not None, "a head without an output matrix needs the policy's"
            return self._policy_logits(final_BH)
        logits_BV = self._lm_head(final_BH)
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give other slots the entries of one."""
        length = int(self.lengths[source])
        if self._native is not None:
            if targets:
                self._native.copy(source, targets, length)
            self.lengths[list(targets)] = length
            return
        for target in targets:
            self._keys_SGLD[target, :, :length] = self._keys_SGLD[source, :, :length]
            self._values_SGLD[target, :, :length] = self._values_SGLD[source, :, :length]
            self.lengths[target] = length

    def _fuse(self, taps_BMF: torch.Tensor) -> torch.Tensor:
        normed_BMF = self._head.before_fuse(taps_BMF)
        return normed_BMF if self._fc is None else self._fc(normed_BMF)

    def _write(self, slots: Sequence[int], start_B: npt.NDArray[np.int64], kv_BMX: torch.Tensor) -> None:
        """Store keys (rotated) and values of M entries per row from `start_B` on; padding is overwritten later."""
        spec = self._head.spec
        heads = (spec.num_kv_heads, spec.head_dim)
        key_BMX, value_BMX = kv_BMX.chunk(2, dim=-1)
        limit = self._keys_SGLD.shape[2] - 1
        position_BM = np.minimum(start_B[:, None] + np.arange(kv_BMX.shape[1]), limit)
        at_BM = torch.from_numpy(position_BM).to(self._device)
        key_BMGD = rotate(key_BMX.unflatten(-1, heads), (self._cos_LD[at_BM], self._sin_LD[at_BM]))
        index_B1 = torch.as_tensor(list(slots), device=self._device)[:, None]
        self._keys_SGLD[index_B1, :, at_BM] = key_BMGD
        self._values_SGLD[index_B1, :, at_BM] = value_BMX.unflatten(-1, heads)

    def _attend(
        self,
        slots: Sequence[int],
        query_BKX: torch.Tensor,
        residual_BKH: torch.Tensor,
        lengths_BK: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """K queries per row, each over its first `lengths_BK` cache positions, then the rest of the layer."""
        spec = self._head.spec
        longest, num_queries = int(lengths_BK.max()), lengths_BK.shape[1]
        index_B = torch.as_tensor(list(slots), device=self._device)
        at_BK = torch.from_numpy(lengths_BK - 1).to(self._device)
        query_BKQD = query_BKX.unflatten(-1, (spec.num_heads, spec.head_dim))
        query_BKQD = rotate(query_BKQD, (self._cos_LD[at_BK], self._sin_LD[at_BK]))
        # Queries of a key-value head's group and of all columns side by side: query r of column k is row r K + k.
        query_BGRKD = query_BKQD.unflatten(2, (spec.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        mask_BKL = torch.from_numpy(np.arange(longest) < lengths_BK[:, :, None]).to(self._device)
        attended_BGND = F.scaled_dot_product_attention(
            query_BGRKD.flatten(2, 3),
            self._keys_SGLD[index_B, :, :longest],
            self._values_SGLD[index_B, :, :longest],
            attn_mask=mask_BKL.repeat(1, spec.num_heads // spec.num_kv_heads, 1)[:, None],
        )
        attended_BKGRD = attended_BGND.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
        hidden_BKH = residual_BKH + self._o(attended_BKGRD.flatten(2))
        gate_BKI, up_BKI = self._gate_up(self._head.layer.post_attention_layernorm(hidden_BKH)).chunk(2, dim=-1)
        return hidden_BKH + self._down(F.silu(gate_BKI) * up_BKI)
