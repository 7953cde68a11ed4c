"""The native decoder: packs a policy's weights and runs all layers of a block of tokens in one call.

`leadout.models.decoder.FusedDecoder` owns one and checks its arguments; what is different from its PyTorch path is only
how numbers are rounded: the residual stream, query, key and value before the cache, and softmax stay in float32.

Axes: as in `leadout.models.decoder`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.native.fields import BlockFields, SpecFields
from leadout.models.native.library import LAW_BLOCK, NativeLibrary
from leadout.models.native.scratch import Scratch
from leadout.models.spec import DecoderSpec

_LANES = 16


def fits(library: NativeLibrary, spec: DecoderSpec) -> bool:
    """Whether there are kernels for these sizes."""
    aligned = spec.hidden_size % _LANES == 0 and spec.intermediate_size % _LANES == 0
    return aligned and bool(library.functions.lo_has_kernels(spec.head_dim))


class NativeDecoder:
    """The layers and the head of one policy."""

    def __init__(self, library: NativeLibrary, spec: DecoderSpec, max_len: int) -> None:
        self._library = library
        self._spec = spec
        self._positions = max_len + 1
        self._scratch = Scratch()
        cosine_PD, sine_PD = spec.rope.tables(self._positions, torch.float32, torch.device("cpu"))
        half = spec.head_dim // 2
        self._cosine, self._sine = cosine_PD[:, :half].contiguous(), sine_PD[:, half:].contiguous()
        fields = SpecFields(
            hidden=spec.hidden_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            inner=spec.intermediate_size,
            vocab=spec.vocab_size,
            qk_norm=int(spec.qk_norm),
            eps=spec.rms_norm_eps,
        )
        self._handle = library.functions.lo_decoder_new(ctypes.byref(fields))
        weakref.finalize(self, library.functions.lo_decoder_free, self._handle)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pack checked weights by Hugging Face name; the old ones are overwritten."""
        functions, spec = self._library.functions, self._spec
        self._library.follow_threads()
        for index in range(spec.num_layers):
            prefix = f"model.layers.{index}."
            kept: list[torch.Tensor] = []

            def matrix(*names: str, prefix: str = prefix, kept: list[torch.Tensor] = kept) -> int:
                parts = [tensors[f"{prefix}{name}.weight"].detach().to(torch.bfloat16) for name in names]
                kept.append((torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous())
                return kept[-1].data_ptr()

            def vector(present: bool, *names: str, prefix: str = prefix, kept: list[torch.Tensor] = kept) -> int | None:
                if not present:
                    return None
                parts = [tensors[prefix + name].detach().to(torch.bfloat16).to(torch.float32) for name in names]
                kept.append(torch.cat(parts).contiguous())
                return kept[-1].data_ptr()

            functions.lo_decoder_layer(
                self._handle,
                index,
                matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                vector(spec.qkv_bias, *(f"self_attn.{name}_proj.bias" for name in "qkv")),
                matrix("self_attn.o_proj"),
                vector(spec.output_bias, "self_attn.o_proj.bias"),
                matrix("mlp.gate_proj", "mlp.up_proj"),
                vector(spec.mlp_bias, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
                matrix("mlp.down_proj"),
                vector(spec.mlp_bias, "mlp.down_proj.bias"),
                vector(True, "input_layernorm.weight"),
                vector(True, "post_attention_layernorm.weight"),
                vector(spec.qk_norm, "self_attn.q_norm.weight"),
                vector(spec.qk_norm, "self_attn.k_norm.weight"),
            )
        name = "model.embed_tokens.weight"
        self.embedding = tensors[name].detach().to(torch.bfloat16, copy=True).contiguous()
        head = self.embedding if spec.tied else tensors["lm_head.weight"].detach().to(torch.bfloat16).contiguous()
        norm = tensors["model.norm.weight"].detach().to(torch.bfloat16).to(torch.float32)
        functions.lo_decoder_ends(
            self._handle,
            self.embedding.data_ptr(),
            head.data_ptr(),
            norm.data_ptr(),
            self._cosine.data_ptr(),
            self._sine.data_ptr(),
            self._positions,
        )

    def forward(
        self,
        tokens_BN: torch.Tensor,
        caches: npt.NDArray[np.int64],
        strides: tuple[int, int],
        rows_B: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        counts_B: npt.NDArray[np.int64],
        taps: tuple[int, ...],
        newest: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States after the final norm [B, N, H] (0 for padding), of each row's last token [B, 1, H] if `newest`; taps.

        `caches` are the addresses of the layers' caches, `strides` their elements from row to row and head to head,
        `rows_B` the physical rows; the caller has checked that everything fits.
        """
        batch, width = tokens_BN.shape
        if not tokens_BN.is_contiguous():
            tokens_BN = tokens_BN.contiguous()
        make = torch.zeros if int(counts_B.min()) < width else torch.empty
        newest = newest and self._spec.num_layers not in taps
        hidden_BNH = make((batch, 1 if newest else width, self._spec.hidden_size), dtype=torch.bfloat16)
        taps_BNF = make((batch, width, len(taps) * self._spec.hidden_size), dtype=torch.bfloat16) if taps else None
        tap_ids = np.asarray(taps, np.int32)
        block = BlockFields(
            tokens=tokens_BN.data_ptr(),
            counts=counts_B.ctypes.data,
            lengths=lengths_B.ctypes.data,
            rows=rows_B.ctypes.data,
            batch=batch,
            width=width,
            caches=caches.ctypes.data,
            row_stride=strides[0],
            head_stride=strides[1],
            newest=int(newest),
        )
        self._library.follow_threads()
        self._library.functions.lo_decoder_forward(
            self._handle,
            ctypes.byref(block),
            tap_ids.ctypes.data,
            len(taps),
            None if taps_BNF is None else taps_BNF.data_ptr(),
            hidden_BNH.data_ptr(),
        )
        return hidden_BNH, taps_BNF

    def logits(self, hidden_XH: torch.Tensor) -> torch.Tensor:
        """[X, H] -> f32[X, V]; rows lie a multiple of 512 elements apart, as the sampler's blocks want them."""
        if hidden_XH.dtype is not torch.bfloat16 or not hidden_XH.is_contiguous():
            hidden_XH = hidden_XH.to(torch.bfloat16).contiguous()
        stride = -(-self._spec.vocab_size // LAW_BLOCK) * LAW_BLOCK
        logits_XV = self._scratch.take(hidden_XH.shape[0], stride)
        self._library.follow_threads()
        self._library.functions.lo_decoder_logits(
            self._handle, hidden_XH.data_ptr(), hidden_XH.shape[0], stride, logits_XV.data_ptr()
        )
        return logits_XV if self._spec.vocab_size == stride else logits_XV[:, : self._spec.vocab_size]
