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
from leadout.models.native.fields import OUTSIDE, RIGHT, SIGNATURES, JudgementFields

_log = logging.getLogger(__name__)

LAW_BLOCK = 512
"""Width of the blocks whose sums `law` leaves."""


def _are_uniforms(u_BW: npt.NDArray[np.float64], rows: int, positions: int, other_BW: npt.NDArray[np.float64]) -> bool:
    """Whether C++ can read them: numbers side by side, and rows as far apart as those of the others."""
    right_shape = u_BW.shape[0] == rows and u_BW.shape[1] >= positions
    return right_shape and u_BW.dtype == np.float64 and u_BW.strides == (other_BW.strides[0], 8)


class NativeLibrary:
    """The loaded library; sizes and types are checked here, since C++ trusts its caller."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        for name, (result, arguments) in SIGNATURES.items():
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

    def law(self, logits_XV: torch.Tensor, temperature_B: torch.Tensor, times: int) -> tuple[torch.Tensor, ...]:
        """Weights, block sums and totals of ``exp((logit - largest) / temperature)``, in place on the logits.

        `logits_XV` is f32 with rows that lie V or V rounded up to 512 elements apart; returns f32[X, 512 C], f32[X, C]
        and f64[X]. Each temperature, f64[B], serves `times` rows; 0 puts weight 1 on the largest, lowest id first.
        """
        num_rows, vocab_size = logits_XV.shape
        blocks = -(-vocab_size // LAW_BLOCK)
        stride = blocks * LAW_BLOCK
        assert logits_XV.dtype is torch.float32 and logits_XV.stride() == (stride, 1)
        assert temperature_B.dtype is torch.float64 and temperature_B.is_contiguous()
        assert temperature_B.shape[0] * times == num_rows
        sums_XC = torch.empty((num_rows, blocks), dtype=torch.float32)
        total_X = torch.empty(num_rows, dtype=torch.float64)
        self.follow_threads()
        self.functions.lo_law(
            logits_XV.data_ptr(),
            num_rows,
            stride,
            vocab_size,
            temperature_B.data_ptr(),
            times,
            sums_XC.data_ptr(),
            total_X.data_ptr(),
        )
        if vocab_size < stride:
            logits_XV = logits_XV.as_strided((num_rows, stride), (stride, 1))
        return logits_XV, sums_XC, total_X

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

    def logprobs(self, weights_XV: torch.Tensor, total_X: torch.Tensor, ids_X: torch.Tensor) -> torch.Tensor:
        """f64[X]: log-probability of one token under each law."""
        num_rows, width = weights_XV.shape
        assert weights_XV.dtype is torch.float32 and weights_XV.stride() == (width, 1) and ids_X.dtype is torch.int64
        assert ids_X.shape == total_X.shape == (num_rows,)
        assert total_X.dtype is torch.float64 and total_X.is_contiguous()
        ids_X = ids_X.contiguous()
        out_X = torch.empty(num_rows, dtype=torch.float64)
        if not self.functions.lo_logprobs(
            weights_XV.data_ptr(), num_rows, width, total_X.data_ptr(), ids_X.data_ptr(), out_X.data_ptr()
        ):
            raise IndexError("token ids outside the vocabulary")
        return out_X

    def judge(
        self,
        law: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tokens_BK: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        q_BKD: torch.Tensor,
        columns_BK: torch.Tensor,
        ids_D: torch.Tensor | None,
        uniforms_3BW: tuple[npt.NDArray[np.float64], ...],
        least: float,
    ) -> tuple[npt.NDArray[np.int64], torch.Tensor] | None:
        """Drafts kept, i64[B], and the token after them, i64[B]: the accept rule for sampled drafts.

        None if a q is not finite.

        `law` is weights f32[X, V], block sums and totals of X = B (K + 1) positions; columns of q are the policy's ids
        `ids_D` (None: the first D). Uniforms are those for accepting, correcting and drawing. Where less than `least`
        is left of (p - q)+ the correction is drawn from p.
        """
        weights_XV, sums_XC, total_X = law
        (num_rows, num_drafts), (blocks, num_q) = tokens_BK.shape, (sums_XC.shape[-1], q_BKD.shape[-1])
        assert weights_XV.shape == (num_rows * (num_drafts + 1), blocks * LAW_BLOCK) and weights_XV.stride(1) == 1
        assert weights_XV.dtype is sums_XC.dtype is q_BKD.dtype is torch.float32 and total_X.dtype is torch.float64
        assert q_BKD.shape[:2] == columns_BK.shape == tokens_BK.shape and num_q <= weights_XV.shape[1]
        assert counts_B.shape == (num_rows,) and tokens_BK.dtype is columns_BK.dtype is torch.int64
        assert ids_D is None or (ids_D.shape == (num_q,) and ids_D.dtype is torch.int64 and ids_D.is_contiguous())
        assert all(_are_uniforms(u, num_rows, num_drafts + 1, uniforms_3BW[0]) for u in uniforms_3BW)
        tokens_BK, columns_BK, q_BKD = tokens_BK.contiguous(), columns_BK.contiguous(), q_BKD.contiguous()
        sums_XC, total_X = sums_XC.contiguous(), total_X.contiguous()
        counts_B = np.ascontiguousarray(counts_B, np.int64)
        accepted_B, next_B = np.empty(num_rows, np.int64), torch.empty(num_rows, dtype=torch.int64)
        judgement = JudgementFields(
            weights=weights_XV.data_ptr(),
            sums=sums_XC.data_ptr(),
            totals=total_X.data_ptr(),
            tokens=tokens_BK.data_ptr(),
            counts=counts_B.ctypes.data,
            q=q_BKD.data_ptr(),
            columns=columns_BK.data_ptr(),
            ids=None if ids_D is None else ids_D.data_ptr(),
            **dict(zip(("accept", "correct", "draw"), (u.ctypes.data for u in uniforms_3BW), strict=True)),
            accepted=accepted_B.ctypes.data,
            next=next_B.data_ptr(),
            least=least,
            stride=weights_XV.stride(0),
            width=uniforms_3BW[0].strides[0] // 8,
            blocks=blocks,
            batch=num_rows,
            drafts=num_drafts,
            num_q=num_q,
            vocab=weights_XV.shape[1],
        )
        self.follow_threads()
        judged = self.functions.lo_judge(ctypes.byref(judgement))
        if judged == OUTSIDE:
            raise IndexError("drafts outside the vocabulary, or more of them than there is room for")
        return (accepted_B, next_B) if judged == RIGHT else None

    def copy_rows(
        self,
        target_ZF: torch.Tensor,
        to_X: npt.NDArray[np.int64],
        source_YF: torch.Tensor,
        from_X: npt.NDArray[np.int64],
    ) -> None:
        """Row ``to_X[x]`` of the target becomes row ``from_X[x]`` of the source; both contiguous and of one type."""
        assert target_ZF.dtype is source_YF.dtype and target_ZF.is_contiguous() and source_YF.is_contiguous()
        assert target_ZF.shape[1:] == source_YF.shape[1:] and to_X.shape == from_X.shape
        if to_X.size == 0:
            return
        if min(to_X.min(), from_X.min()) < 0 or to_X.max() >= len(target_ZF) or from_X.max() >= len(source_YF):
            raise IndexError(f"expected rows within {len(target_ZF)} and {len(source_YF)}")
        to_X, from_X = np.ascontiguousarray(to_X, np.int64), np.ascontiguousarray(from_X, np.int64)
        self.functions.lo_copy_rows(
            target_ZF.data_ptr(),
            to_X.ctypes.data,
            source_YF.data_ptr(),
            from_X.ctypes.data,
            to_X.size,
            target_ZF.stride(0) * target_ZF.element_size(),
        )


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
