"""Linear layers of the generating decoder, with weights packed once per refit.

On CPU a decode step is a walk over all weights, and oneDNN reads pre-packed ones about twice as fast as `F.linear` does
(bfloat16) or faster still (float32). The packed operators are private to PyTorch: each is tried once on a small layer
and held against `F.linear`; where one is missing or wrong, `F.linear` is used and one line says so. Other devices and
float64 always use `F.linear`.

Axes: X rows of any kind, I input features, O output features, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F

_log = logging.getLogger(__name__)

_FLOAT16_MAX = 65504.0


def _pack(weight_OI: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return packed


def _packed_linear(x_XI: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    y_XO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_XI, packed, bias_O, "none", [], "")
    return y_XO


def _packed_linear_add(
    x_XI: torch.Tensor, residual_XO: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    y_XO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_XI, residual_XO, packed, bias_O, "add")
    return y_XO


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether the packed operators exist for this dtype on CPU and agree with `F.linear`, with and without residual."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(96, 64, generator=generator).to(dtype)
    bias_O = torch.randn(96, generator=generator).to(dtype)
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
    try:
        packed = _pack(weight_OI)
        for rows in (1, 5, 40):
            x_XI = torch.randn(rows, 64, generator=generator).to(dtype)
            residual_XO = torch.randn(rows, 96, generator=generator).to(dtype)
            expected = F.linear(x_XI, weight_OI, bias_O)
            torch.testing.assert_close(_packed_linear(x_XI, packed, bias_O), expected, atol=tolerance, rtol=0.02)
            torch.testing.assert_close(
                _packed_linear_add(x_XI, residual_XO, packed, bias_O), expected + residual_XO, atol=tolerance, rtol=0.02
            )
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as error:
        reason = str(error).strip().splitlines()
        _log.warning(
            "packed %s linear layers are off, F.linear is used: %s", dtype, reason[0] if reason else "no reason"
        )
        return False
    return True


@functools.cache
def half_head_works() -> bool:
    """Whether float32 activations times packed float16 weights (FBGEMM) exist here and agree with float32."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(96, 64, generator=generator).to(torch.bfloat16).to(torch.float32)
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
        for rows in (1, 5, 40):
            x_XI = torch.randn(rows, 64, generator=generator)
            found = torch.ops.quantized.linear_dynamic_fp16(x_XI, packed)
            torch.testing.assert_close(found, F.linear(x_XI, weight_OI), atol=1e-4, rtol=1e-4)
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as error:
        reason = str(error).strip().splitlines()
        _log.warning("the float16-packed head is off, float32 is used: %s", reason[0] if reason else "no reason")
        return False
    return True


class PackedLinear:
    """``x @ weight.T + bias`` in one dtype; the weight is packed where that is faster."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.load(weight_OI, bias_O)

    def load(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        """Take new values and pack them; the old ones are dropped. Device is that of the weight."""
        weight_OI = weight_OI.detach().to(self._dtype).contiguous()
        self.shape = (weight_OI.shape[0], weight_OI.shape[1])
        self._bias = None if bias_O is None else bias_O.detach().to(self._dtype, copy=True).contiguous()
        packable = weight_OI.device.type == "cpu" and self._dtype in (torch.bfloat16, torch.float32)
        self._is_packed = packable and packing_works(self._dtype)
        # A copy, as packing is: the learner goes on changing its tensors in place.
        self._weight = _pack(weight_OI) if self._is_packed else weight_OI.clone()

    def __call__(self, x_XI: torch.Tensor) -> torch.Tensor:
        """[X, I] -> [X, O]."""
        if self._is_packed:
            return _packed_linear(x_XI, self._weight, self._bias)
        return F.linear(x_XI, self._weight, self._bias)

    def add_to(self, residual_XO: torch.Tensor, x_XI: torch.Tensor) -> torch.Tensor:
        """``residual + self(x)`` as a new tensor; packed bfloat16 layers round once, after the sum."""
        if self._is_packed:
            return _packed_linear_add(x_XI, residual_XO, self._weight, self._bias)
        return F.linear(x_XI, self._weight, self._bias).add_(residual_XO)


class LogitsHead:
    """Hidden states to logits that are not rounded to bfloat16: float32 sums, float32 out (float64 in float64).

    Logits of a language model lie between 16 and 64 and bfloat16 is spaced 0.125 to 0.25 there, which would move
    probabilities in steps of 13 % and more. For bfloat16 on CPU the weights are kept as packed float16: bfloat16 has
    fewer digits than float16, so weights move by at most 3e-8 (those below 6e-5), half the bytes of float32 are read,
    and products and sums are float32. Milliseconds for 576 x 49152 on two cores, by rows:

    ===================================  =====  =====  =====  =====
    rows                                 1      4      32     128
    packed float16, float32 out (used)   1.5    1.6    10.8   40.5
    packed float32                       4.9    4.3    10.1   34.2
    `F.linear` float32                   11.2   17.5   25.6   66.4
    packed bfloat16, bfloat16 out        1.8    1.8    5.4    18.6
    ===================================  =====  =====  =====  =====
    """

    def __init__(self, weight_VI: torch.Tensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.load(weight_VI)

    def load(self, weight_VI: torch.Tensor) -> None:
        """Take new values and pack them."""
        weight_VI = weight_VI.detach()
        self._half: Any = None
        self._wide: PackedLinear | None = None
        self._plain: torch.Tensor | None = None
        on_cpu = weight_VI.device.type == "cpu"
        if on_cpu and self._dtype is torch.bfloat16 and half_head_works() and _fits_float16(weight_VI):
            self._half = torch.ops.quantized.linear_prepack_fp16(weight_VI.to(torch.bfloat16).float(), None)
        elif on_cpu or self._dtype is not torch.bfloat16:
            wide = torch.float64 if self._dtype is torch.float64 else torch.float32
            self._wide = PackedLinear(weight_VI.to(self._dtype), None, wide)
        else:
            self._plain = weight_VI.to(self._dtype, copy=True).contiguous()

    def __call__(self, hidden_XI: torch.Tensor) -> torch.Tensor:
        """[X, I] -> [X, V], f32 (f64 in float64)."""
        if self._half is not None:
            logits_XV: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden_XI.float(), self._half)
            return logits_XV
        if self._wide is not None:
            return self._wide(hidden_XI.to(torch.float64 if self._dtype is torch.float64 else torch.float32))
        assert self._plain is not None
        return torch.mm(hidden_XI, self._plain.t(), out_dtype=torch.float32)


def _fits_float16(weight: torch.Tensor) -> bool:
    return bool(weight.abs().max() <= _FLOAT16_MAX)
