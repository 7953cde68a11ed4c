"""The native kernels as Python functions, or None with one line in the log that says why not.

Axes: X positions, V vocabulary, C blocks of 512 of the vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.native.build import BuildError, build

_log = logging.getLogger(__name__)

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

LAW_BLOCK = 512
"""Width of the blocks whose sums `law` leaves."""


class SpecFields(ctypes.Structure):
    """`Spec` in decoder.hpp."""

    _fields_ = [
        *((name, _int) for name in ("hidden", "layers", "heads", "kv_heads", "dim", "inner", "vocab", "qk_norm")),
        ("eps", ctypes.c_float),
    ]


class BlockFields(ctypes.Structure):
    """`Block` in decoder.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("tokens", "counts", "lengths", "rows")),
        ("batch", _int),
        ("width", _int),
        ("caches", _pointer),
        ("row_stride", _long),
        ("head_stride", _long),
    ]


class HeadFields(ctypes.Structure):
    """`HeadSpec` in draft_head.hpp."""

    _fields_ = [
        *((name, _int) for name in ("hidden", "heads", "kv_heads", "dim", "inner", "vocab", "target", "num_taps")),
        *((name, _int) for name in ("fc_norm", "norm_before_fc", "norm_before_residual")),
        ("eps", ctypes.c_float),
    ]


class EntryFields(ctypes.Structure):
    """`Entries` in draft_head.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("taps", "features", "embeddings", "counts", "starts", "rows")),
        ("batch", _int),
        ("width", _int),
        ("cache", _pointer),
        ("row_stride", _long),
        ("head_stride", _long),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "lo_has_kernels": (_int, [_int]),
    "lo_configure": (None, [_int, _int]),
    "lo_decoder_new": (_pointer, [_pointer]),
    "lo_decoder_free": (None, [_pointer]),
    "lo_decoder_layer": (None, [_pointer, _int, *[_pointer] * 12]),
    "lo_decoder_ends": (None, [_pointer, *[_pointer] * 5, _int]),
    "lo_decoder_forward": (None, [_pointer, _pointer, _pointer, _int, _pointer, _pointer]),
    "lo_decoder_logits": (None, [_pointer, _pointer, _int, _long, _pointer]),
    "lo_head_new": (_pointer, [_pointer]),
    "lo_head_free": (None, [_pointer]),
    "lo_head_load": (None, [_pointer, *[_pointer] * 13, _int]),
    "lo_head_run": (None, [_pointer, _pointer, _pointer]),
    "lo_head_logits": (None, [_pointer, _pointer, _int, _long, _pointer]),
    "lo_train_layer_new": (_pointer, [_pointer]),
    "lo_train_layer_free": (None, [_pointer]),
    "lo_train_layer_forward": (None, [_pointer] * 6),
    "lo_train_layer_backward": (None, [_pointer] * 8),
    "lo_output_head_new": (_pointer, []),
    "lo_output_head_free": (None, [_pointer]),
    "lo_output_head_logits": (None, [*[_pointer] * 3, *[_int] * 3, _pointer]),
    "lo_output_head_law": (None, [_pointer, _int, _int, ctypes.c_float, *[_pointer] * 4]),
    "lo_output_head_back": (None, [*[_pointer] * 4, *[_int] * 3, ctypes.c_float, *[_pointer] * 5, _int]),
    "lo_filter": (None, [_pointer, _int, _long, _pointer, _pointer, _pointer, _pointer]),
    "lo_law": (None, [_pointer, _int, _long, _int, _pointer, _pointer, _pointer]),
    "lo_draw_next": (
        None,
        [
            _pointer,
            _long,
            _int,
            _pointer,
            _pointer,
            _int,
            *[_pointer] * 3,
            _int,
            _pointer,
            ctypes.c_double,
            *[_pointer] * 2,
        ],
    ),
    "lo_uniforms": (None, [_int, *[_pointer] * 6]),
    "lo_round_uniforms": (None, [*[_int] * 4, *[_pointer] * 5]),
    "lo_draw": (None, [_pointer, _int, _long, _int, _pointer, _pointer, _pointer]),
}


class NativeLibrary:
    """The loaded library; sizes and types are checked here, since C++ trusts its caller."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        self._threads = 0
        # Helpers that spin between calls would take the core from others that were told to wait passively.
        self._spin_us = 20 if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else 300
        self.follow_threads()

    def follow_threads(self) -> None:
        """Use as many threads as PyTorch does at this moment."""
        threads = torch.get_num_threads()
        if threads != self._threads:
            self.functions.lo_configure(threads, self._spin_us)
            self._threads = threads

    def law(self, logits_XV: torch.Tensor, temperature_X: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Weights, block sums and totals of ``exp((logit - largest) / temperature)``, in place on the logits.

        `logits_XV` is f32 with rows that lie V or V rounded up to 512 elements apart; returns f32[X, 512 C], f32[X, C]
        and f64[X]. Temperature 0 puts weight 1 on the largest, lowest id first.
        """
        num_rows, vocab_size = logits_XV.shape
        blocks = -(-vocab_size // LAW_BLOCK)
        stride = logits_XV.stride(0)
        assert logits_XV.dtype is torch.float32 and logits_XV.stride(1) == 1 and stride == blocks * LAW_BLOCK
        temperature_X = temperature_X.to(torch.float64).contiguous()
        sums_XC = torch.empty((num_rows, blocks), dtype=torch.float32)
        total_X = torch.empty(num_rows, dtype=torch.float64)
        self.follow_threads()
        self.functions.lo_law(
            logits_XV.data_ptr(),
            num_rows,
            stride,
            vocab_size,
            temperature_X.data_ptr(),
            sums_XC.data_ptr(),
            total_X.data_ptr(),
        )
        return logits_XV.as_strided((num_rows, blocks * LAW_BLOCK), (stride, 1)), sums_XC, total_X

    def filtered(
        self, weights_XV: torch.Tensor, top_k_X: torch.Tensor, top_p_X: torch.Tensor, min_p_X: torch.Tensor
    ) -> torch.Tensor:
        """The weights with 0 outside top-k (i64), top-p (f64) and min-p (f64), in this order; a new tensor."""
        weights_XV = weights_XV.contiguous()
        num_rows, width = weights_XV.shape
        assert weights_XV.dtype is torch.float32 and top_k_X.dtype is torch.int64
        assert top_p_X.dtype is min_p_X.dtype is torch.float64
        top_k_X, top_p_X, min_p_X = top_k_X.contiguous(), top_p_X.contiguous(), min_p_X.contiguous()
        out_XV = torch.empty_like(weights_XV)
        self.follow_threads()
        self.functions.lo_filter(
            weights_XV.data_ptr(),
            num_rows,
            width,
            top_k_X.data_ptr(),
            top_p_X.data_ptr(),
            min_p_X.data_ptr(),
            out_XV.data_ptr(),
        )
        return out_XV

    def draw(self, weights_XV: torch.Tensor, sums_XC: torch.Tensor, uniforms_X: torch.Tensor) -> torch.Tensor:
        """i64[X]: the token whose slice of the cumulative distribution holds each uniform."""
        num_rows, blocks = sums_XC.shape
        assert weights_XV.dtype is sums_XC.dtype is torch.float32 and uniforms_X.dtype is torch.float64
        assert weights_XV.shape == (num_rows, blocks * LAW_BLOCK) and uniforms_X.shape == (num_rows,)
        assert weights_XV.stride(1) == 1
        sums_XC, uniforms_X = sums_XC.contiguous(), uniforms_X.contiguous()
        ids_X = torch.empty(num_rows, dtype=torch.int64)
        self.functions.lo_draw(
            weights_XV.data_ptr(),
            num_rows,
            weights_XV.stride(0),
            blocks,
            sums_XC.data_ptr(),
            uniforms_X.data_ptr(),
            ids_X.data_ptr(),
        )
        return ids_X

    def uniforms(
        self,
        seed_X: npt.NDArray[np.uint64],
        position_X: npt.NDArray[np.integer],
        second_X: npt.NDArray[np.integer],
        sibling_X: npt.NDArray[np.integer],
        draw_X: npt.NDArray[np.integer],
    ) -> npt.NDArray[np.float64]:
        """f64[X] of Philox4x32-10 with counter (position, second, sibling, draw), low 32 bits each, and key seed."""
        words = [np.ascontiguousarray(x, np.uint32) for x in (position_X, second_X, sibling_X, draw_X)]
        seed_X = np.ascontiguousarray(seed_X, np.uint64)
        assert all(word.shape == seed_X.shape for word in words), "one counter per key"
        out_X = np.empty(seed_X.shape)
        self.functions.lo_uniforms(seed_X.size, seed_X.ctypes.data, *(w.ctypes.data for w in words), out_X.ctypes.data)
        return out_X

    def round_uniforms(
        self,
        seed_B: npt.NDArray[np.uint64],
        draw_B: npt.NDArray[np.int64],
        sibling_B: npt.NDArray[np.int64],
        start_B: npt.NDArray[np.int64],
        *,
        width: int,
        purposes: int,
        shift: int,
    ) -> npt.NDArray[np.float64]:
        """f64[purposes, B, width]: `uniforms` at positions start..start + width - 1.

        Its second word is start | purpose << shift, and 0 for purpose 0.
        """
        seed_B = np.ascontiguousarray(seed_B, np.uint64)
        columns = [np.ascontiguousarray(x, np.int64) for x in (draw_B, sibling_B, start_B)]
        assert all(column.shape == seed_B.shape for column in columns), "one row per key"
        out_PBW = np.empty((purposes, seed_B.size, width))
        addresses = [column.ctypes.data for column in columns]
        self.functions.lo_round_uniforms(
            purposes, shift, seed_B.size, width, seed_B.ctypes.data, *addresses, out_PBW.ctypes.data
        )
        return out_PBW

    def draw_next(
        self,
        weights_XV: torch.Tensor,
        sums_XC: torch.Tensor,
        total_X: torch.Tensor,
        at_B: npt.NDArray[np.int64],
        draft_B: npt.NDArray[np.int64],
        q_YD: torch.Tensor,
        token_ids_D: torch.Tensor | None,
        least: float,
        uniforms_B: torch.Tensor,
    ) -> torch.Tensor:
        """i64[B]: one token per row.

        Drawn from law ``at_B[b]``, or, where ``draft_B[b] >= 0``, from (p - q)+ of that law and of row ``draft_B[b]``
        of q (columns are the policy's ids `token_ids_D`; None: the first D); from p where less than `least` is left.
        """
        num_rows, blocks, num_q = len(at_B), sums_XC.shape[-1], q_YD.shape[-1]
        assert weights_XV.dtype is sums_XC.dtype is q_YD.dtype is torch.float32 and q_YD.is_contiguous()
        assert weights_XV.shape[-1] == weights_XV.stride(0) == blocks * LAW_BLOCK and weights_XV.stride(1) == 1
        assert at_B.max() < weights_XV.shape[0] and draft_B.max() < q_YD.shape[0] and num_q <= weights_XV.shape[-1]
        sums_XC, total_X, uniforms_B = sums_XC.contiguous(), total_X.contiguous(), uniforms_B.contiguous()
        at_B, draft_B = np.ascontiguousarray(at_B, np.int64), np.ascontiguousarray(draft_B, np.int64)
        ids_D = None if token_ids_D is None else token_ids_D.contiguous()
        drawn_B = torch.empty(num_rows, dtype=torch.int64)
        self.functions.lo_draw_next(
            weights_XV.data_ptr(),
            weights_XV.stride(0),
            blocks,
            sums_XC.data_ptr(),
            total_X.data_ptr(),
            num_rows,
            at_B.ctypes.data,
            draft_B.ctypes.data,
            q_YD.data_ptr(),
            num_q,
            None if ids_D is None else ids_D.data_ptr(),
            least,
            uniforms_B.data_ptr(),
            drawn_B.data_ptr(),
        )
        return drawn_B


@functools.cache
def native_library() -> NativeLibrary | None:
    """The kernels, built on first use; None, logged once, where they cannot be had or ``LEADOUT_NATIVE=0``."""
    if os.environ.get("LEADOUT_NATIVE") == "0":
        _log.warning("native kernels are off (LEADOUT_NATIVE=0), the slower PyTorch operators are used")
        return None
    try:
        return NativeLibrary(str(build()))
    except (BuildError, OSError) as error:
        _log.warning("native kernels are off, the slower PyTorch operators are used: %s", error)
        return None
