"""Cached forward passes of the EAGLE-3 head: true entries in batches, own drafts one by one.

Entry i of a row sits at cache position i, which is also its rotary position. Only the newest entry of a batch needs a
query; the others contribute keys and values. The arithmetic is `leadout.models.eagle3.Eagle3Head`'s, with its matrix
products packed for generation. In bfloat16 on a CPU that can, all of it runs in `leadout.models.native`.

Axes: B rows, M entries, H head width, G key-value heads, R query heads per key-value head, D head dimension, L cache
positions, V draft vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from leadout.models.eagle3 import Eagle3Head, rotate
from leadout.models.linear import PackedLinear
from leadout.models.native.eagle3 import native_head

_SLACK = 32


class Eagle3Cache:
    """Keys and values of one head layer for every slot."""

    def __init__(
        self,
        head: Eagle3Head,
        *,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        native: bool | None = None,
    ) -> None:
        """`native` False keeps to PyTorch operators; None uses the native kernels where they exist."""
        spec = head.spec
        self._head = head
        self._device = device
        self.lengths = np.zeros(num_slots, np.int64)
        eligible = native is not False and dtype is torch.bfloat16 and device.type == "cpu"
        self._native = native_head(head, num_slots, max_len + _SLACK) if eligible else None
        if self._native is not None:
            self._native.pack()
            return
        shape = (num_slots, spec.num_kv_heads, max_len + _SLACK, spec.head_dim)
        self._keys_SGLD = torch.zeros(shape, dtype=dtype, device=device)
        self._values_SGLD = torch.zeros(shape, dtype=dtype, device=device)
        positions_L = torch.arange(max_len + _SLACK, device=device)
        self._cos_LD, self._sin_LD = (part.to(dtype) for part in head.rotary(positions_L))
        self.pack()

    def pack(self) -> None:
        """Lay the head's present weights out for generation."""
        if self._native is not None:
            self._native.pack()
            return
        head, attention, mlp = self._head, self._head.midlayer.self_attn, self._head.midlayer.mlp
        dtype = head.fc.weight.dtype

        def packed(*weights: torch.Tensor) -> PackedLinear:
            return PackedLinear(torch.cat(weights) if len(weights) > 1 else weights[0], None, dtype)

        self._fc = packed(head.fc.weight)
        self._q = packed(attention.q_proj.weight)
        self._kv = packed(attention.k_proj.weight, attention.v_proj.weight)
        self._qkv = packed(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self._o = packed(attention.o_proj.weight)
        self._gate_up = packed(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = packed(mlp.down_proj.weight)
        self._lm_head = packed(head.lm_head.weight)

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
        features_BMH = self._fuse(taps_BMF)
        entry = self._head.entry(features_BMH, embeddings_BMH)
        last_B = torch.from_numpy(counts_B - 1).to(self._device)
        newest = torch.arange(len(slots), device=self._device)
        start_B = self.lengths[list(slots)]
        self._write(slots, start_B, self._kv(entry.input_NE))
        self.lengths[list(slots)] = start_B + counts_B
        query_BX = self._q(entry.input_NE[newest, last_B])
        return self._attend(slots, query_BX, entry.residual_NH[newest, last_B], self.lengths[list(slots)])

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
        entry = self._head.entry(features_BH, embeddings_BH)
        spec = self._head.spec
        query_BX, kv_BX = self._qkv(entry.input_NE).split(
            [spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim], dim=-1
        )
        start_B = self.lengths[list(slots)] + depth
        self._write(slots, start_B, kv_BX[:, None])
        return self._attend(slots, query_BX, entry.residual_NH, start_B + 1)

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Draft logits [B, V], fp32 or fp64."""
        if self._native is not None:
            return self._native.logits(hidden_BH)
        logits_BV = self._lm_head(self._head.norm(hidden_BH))
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
        spec = self._head.spec
        if spec.fc_norm:
            parts = taps_BMF.split(spec.target_hidden_size, dim=-1)
            taps_BMF = torch.cat([norm(part) for norm, part in zip(self._head.fc_norm, parts, strict=True)], dim=-1)
        if spec.norm_before_fc:
            taps_BMF = self._head.input_norm(taps_BMF)
        return self._fc(taps_BMF)

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
        query_BX: torch.Tensor,
        residual_BH: torch.Tensor,
        lengths_B: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """One query per row over its first `lengths_B` cache positions, then the rest of the layer."""
        spec = self._head.spec
        longest = int(lengths_B.max())
        index_B = torch.as_tensor(list(slots), device=self._device)
        at_B = torch.from_numpy(lengths_B - 1).to(self._device)
        query_BQD = query_BX.unflatten(-1, (spec.num_heads, spec.head_dim))
        query_BQD = rotate(query_BQD, (self._cos_LD[at_B], self._sin_LD[at_B]))
        query_BGRD = query_BQD.unflatten(1, (spec.num_kv_heads, -1))
        mask_BL = torch.from_numpy(np.arange(longest) < lengths_B[:, None]).to(self._device)
        attended_BGRD = F.scaled_dot_product_attention(
            query_BGRD,
            self._keys_SGLD[index_B, :, :longest],
            self._values_SGLD[index_B, :, :longest],
            attn_mask=mask_BL[:, None, None, :],
        )
        hidden_BH = residual_BH + self._o(attended_BGRD.flatten(1))
        gate_BI, up_BI = self._gate_up(self._head.midlayer.post_attention_layernorm(hidden_BH)).chunk(2, dim=-1)
        return hidden_BH + self._down(F.silu(gate_BI) * up_BI)
