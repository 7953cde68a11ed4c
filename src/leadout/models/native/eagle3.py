"""The native EAGLE-3 head: packed weights, true entries and drafts in one call each.

Axes: as in `leadout.drafters.head_cache`.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.eagle3 import Eagle3Head
from leadout.models.native.check import usable_library
from leadout.models.native.fields import NOT_FINITE, OUTSIDE, DraftingFields, EntryFields, HeadFields
from leadout.models.native.library import LAW_BLOCK, NativeLibrary
from leadout.models.native.scratch import Scratch

_log = logging.getLogger(__name__)

_LANES = 16


def native_head(head: Eagle3Head, num_slots: int, num_positions: int) -> NativeEagle3 | None:
    """A native runner of this head, or None where PyTorch's operators must do."""
    spec = head.spec
    aligned = not any(size % _LANES for size in (spec.hidden_size, spec.intermediate_size, spec.target_hidden_size))
    library = usable_library()
    if library is None:
        return None
    if not aligned or not library.functions.lo_has_kernels(spec.head_dim):
        _log.warning(
            "the draft head runs on PyTorch operators: hidden %d, inner %d or head size %d do not suit the kernels",
            spec.hidden_size,
            spec.intermediate_size,
            spec.head_dim,
        )
        return None
    return NativeEagle3(library, head, num_slots, num_positions)


class NativeEagle3:
    """One head with a cache of its own; hidden states are float32 here."""

    def __init__(self, library: NativeLibrary, head: Eagle3Head, num_slots: int, num_positions: int) -> None:
        spec = head.spec
        self._library, self._head, self._positions = library, head, num_positions
        self._cache = torch.zeros(
            (num_slots, 2 * spec.num_kv_heads, num_positions, spec.head_dim), dtype=torch.bfloat16
        )
        self._scratch, self._laws = Scratch(), Scratch()
        fields = HeadFields(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            inner=spec.intermediate_size,
            vocab=spec.draft_vocab_size,
            target=spec.target_hidden_size,
            num_taps=len(spec.layer_ids),
            fc_norm=int(spec.fc_norm),
            norm_before_fc=int(spec.norm_before_fc),
            norm_before_residual=int(spec.norm_before_residual),
            eps=spec.rms_norm_eps,
        )
        self._handle = library.functions.lo_head_new(ctypes.byref(fields))
        weakref.finalize(self, library.functions.lo_head_free, self._handle)

    def pack(self) -> None:
        """Take the head's present weights."""
        head, layer = self._head, self._head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        kept: list[torch.Tensor] = []

        def place(dtype: torch.dtype, *parts: torch.Tensor) -> int:
            kept.append(torch.cat([part.detach().to(dtype) for part in parts]).contiguous())
            return kept[-1].data_ptr()

        def matrix(*parts: torch.Tensor) -> int:
            return place(torch.bfloat16, *parts)

        def vector(*parts: torch.Tensor) -> int:
            return place(torch.float32, *parts)

        fuse_norm = None
        if head.spec.fc_norm:
            fuse_norm = vector(*head.fc_norm.parameters())
        elif head.spec.norm_before_fc:
            fuse_norm = vector(head.input_norm.weight)
        half = head.spec.head_dim // 2
        cosine_LD, sine_LD = head.rotary(torch.arange(self._positions))
        self._library.follow_threads()
        self._library.functions.lo_head_load(
            self._handle,
            matrix(head.fc.weight),
            matrix(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            matrix(attention.o_proj.weight),
            matrix(mlp.gate_proj.weight, mlp.up_proj.weight),
            matrix(mlp.down_proj.weight),
            matrix(head.lm_head.weight),
            fuse_norm,
            vector(layer.hidden_norm.weight),
            vector(layer.input_layernorm.weight),
            vector(layer.post_attention_layernorm.weight),
            vector(head.norm.weight),
            vector(cosine_LD[:, :half]),
            vector(sine_LD[:, :half]),
            self._positions,
        )

    def run(
        self,
        slots_B: npt.NDArray[np.int64],
        start_B: npt.NDArray[np.int64],
        counts_B: npt.NDArray[np.int64],
        embeddings_BMH: torch.Tensor,
        *,
        taps_BMF: torch.Tensor | None = None,
        features_BH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append entries at `start_B`; the layer's output f32[B, H] for the newest of each row.

        Entries carry either the policy's tapped states or, M = 1, the feature f32[B, H] that a call before returned.
        """
        batch, width, _ = embeddings_BMH.shape
        assert (taps_BMF is None) != (features_BH is None) and int(counts_B.min()) >= 1
        assert int((start_B + counts_B).max()) <= self._positions, "draft entries past the end of the cache"
        embeddings_BMH = embeddings_BMH.to(torch.bfloat16).contiguous()
        if taps_BMF is not None:
            taps_BMF = taps_BMF.to(torch.bfloat16).contiguous()
        if features_BH is not None:
            features_BH = features_BH.to(torch.float32).contiguous()
        entries = EntryFields(
            taps=None if taps_BMF is None else taps_BMF.data_ptr(),
            features=None if features_BH is None else features_BH.data_ptr(),
            embeddings=embeddings_BMH.data_ptr(),
            counts=counts_B.ctypes.data,
            starts=start_B.ctypes.data,
            rows=slots_B.ctypes.data,
            batch=batch,
            width=width,
            cache=self._cache.data_ptr(),
            row_stride=self._cache.stride(0),
            head_stride=self._cache.stride(1),
        )
        hidden_BH = torch.empty((batch, self._head.spec.hidden_size), dtype=torch.float32)
        self._library.follow_threads()
        self._library.functions.lo_head_run(self._handle, ctypes.byref(entries), hidden_BH.data_ptr())
        return hidden_BH

    def draft(
        self,
        slots_B: npt.NDArray[np.int64],
        start_B: npt.NDArray[np.int64],
        counts_B: npt.NDArray[np.int64],
        tokens_SM: torch.Tensor,
        taps_SMF: torch.Tensor,
        embedding_PH: torch.Tensor,
        uniforms_BK: torch.Tensor,
        temperature_B: torch.Tensor,
        token_ids_V: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """As `leadout.drafters.head_cache.HeadCache.draft`; waiting entries get cache positions from `start_B` on."""
        (batch, drafts), vocab_size = uniforms_BK.shape, self._head.spec.draft_vocab_size
        assert taps_SMF.dtype is embedding_PH.dtype is torch.bfloat16 and tokens_SM.dtype is torch.int64
        assert taps_SMF.is_contiguous() and tokens_SM.is_contiguous() and taps_SMF.shape[:2] == tokens_SM.shape
        assert embedding_PH.is_contiguous() and embedding_PH.shape[1] == self._head.spec.hidden_size
        assert uniforms_BK.dtype is temperature_B.dtype is torch.float64 and temperature_B.shape == (batch,)
        assert int(counts_B.min()) >= 1 and int(counts_B.max()) <= tokens_SM.shape[1]
        assert int((start_B + counts_B).max()) + drafts - 1 <= self._positions, "drafts past the end of the cache"
        assert token_ids_V is None or (token_ids_V.shape == (vocab_size,) and token_ids_V.is_contiguous())
        assert (token_ids_V is None or token_ids_V.dtype is torch.int64) and counts_B.dtype == start_B.dtype == np.int64
        uniforms_BK, temperature_B = uniforms_BK.contiguous(), temperature_B.contiguous()
        columns_BK, drafted_BK = torch.empty((2, batch, drafts), dtype=torch.int64)
        probs_XV = self._laws.take(batch * drafts, vocab_size)
        drafting = DraftingFields(
            taps=taps_SMF.data_ptr(),
            tokens=tokens_SM.data_ptr(),
            embedding=embedding_PH.data_ptr(),
            slots=slots_B.ctypes.data,
            counts=counts_B.ctypes.data,
            starts=start_B.ctypes.data,
            ids=None if token_ids_V is None else token_ids_V.data_ptr(),
            temperatures=temperature_B.data_ptr(),
            uniforms=uniforms_BK.data_ptr(),
            cache=self._cache.data_ptr(),
            columns=columns_BK.data_ptr(),
            drafted=drafted_BK.data_ptr(),
            probs=probs_XV.data_ptr(),
            depth=tokens_SM.shape[1],
            num_embeddings=len(embedding_PH),
            width=drafts,
            row_stride=self._cache.stride(0),
            head_stride=self._cache.stride(1),
            batch=batch,
            drafts=drafts,
        )
        self._library.follow_threads()
        outcome = self._library.functions.lo_head_draft(self._handle, ctypes.byref(drafting))
        if outcome == OUTSIDE:
            raise IndexError("tokens outside the vocabulary")
        if outcome == NOT_FINITE:
            return None
        return columns_BK, drafted_BK, probs_XV.view(batch, drafts, vocab_size)

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Draft logits f32[B, V] of f32[B, H]; rows lie a multiple of 512 elements apart."""
        num_rows, vocab_size = hidden_BH.shape[0], self._head.spec.draft_vocab_size
        stride = -(-vocab_size // LAW_BLOCK) * LAW_BLOCK
        logits_BV = self._scratch.take(num_rows, stride)
        # Under a name of its own: a copy that nobody holds is freed before the call reads it.
        hidden_BH = hidden_BH.contiguous()
        self._library.follow_threads()
        self._library.functions.lo_head_logits(
            self._handle, hidden_BH.data_ptr(), num_rows, stride, logits_BV.data_ptr()
        )
        return logits_BV[:, :vocab_size]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots the first entries of one."""
        self._cache[list(targets), :, :length] = self._cache[source, :, :length]
