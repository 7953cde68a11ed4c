"""A decoder layer of the train stage in native code: one call forward, one back, under autograd.

`leadout.logprob.native_body` runs a policy through it. Matrix products take bfloat16 operands and sum in float32, as
under autocast; residual stream, norms, rotation, attention and weight gradients stay in float32.

Axes: T tokens of a pack, S its segments, H hidden, Q width of query, key and value together, A query heads, D head
dimension, I inner width.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadout.models.native.decoder import fits
from leadout.models.native.library import NativeLibrary
from leadout.models.spec import DecoderSpec

WEIGHTS = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    *(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
)
"""Parameters of a layer by transformers' names, in the order of `TrainWeights` in train_layer.hpp."""

_pointer, _int = ctypes.c_void_p, ctypes.c_int32


class _SpecFields(ctypes.Structure):
    """`TrainSpec` in train_layer.hpp."""

    _fields_ = [*((name, _int) for name in ("hidden", "heads", "kv_heads", "dim", "inner")), ("eps", ctypes.c_float)]


class _PackFields(ctypes.Structure):
    """`Pack` in pack_attention.hpp."""

    _fields_ = [
        *((name, _int) for name in ("tokens", "segments", "families", "longest")),
        *((name, _pointer) for name in ("start", "length", "prompt_start", "prompt_length", "first")),
        *((name, _pointer) for name in ("cosine", "sine")),
    ]


_WeightFields = _pointer * len(WEIGHTS)
_NUM_KEPT = 7
_KeptFields = _pointer * _NUM_KEPT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackSegments:
    """Where prompts and completions lie in a pack: a completion sees its prompt and itself."""

    start_S: npt.NDArray[np.int32]
    """First token of each segment, in the order of the pack."""
    length_S: npt.NDArray[np.int32]
    """Number of tokens."""
    prompt_start_S: npt.NDArray[np.int32]
    """First token of its prompt; 0 for prompts."""
    prompt_length_S: npt.NDArray[np.int32]
    """Number of its prompt's tokens; 0 for prompts."""
    first_F: npt.NDArray[np.int32]
    """First segment of each family (a prompt and the completions after it), and S."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, bool]]) -> Self:
        """`parts`: (first token, number of tokens, whether a prompt) in order; completions follow their prompt."""
        start_S, length_S = (np.array([part[side] for part in parts], np.int32) for side in (0, 1))
        prompts = [number for number, part in enumerate(parts) if part[2]]
        owner_S = np.array(prompts)[np.cumsum([part[2] for part in parts]) - 1]
        own_S = owner_S == np.arange(len(parts))
        return cls(
            start_S=start_S,
            length_S=length_S,
            prompt_start_S=np.where(own_S, 0, start_S[owner_S]).astype(np.int32),
            prompt_length_S=np.where(own_S, 0, length_S[owner_S]).astype(np.int32),
            first_F=np.array([*prompts, len(parts)], np.int32),
        )

    def fields(self, cosine_TD: Tensor, sine_TD: Tensor) -> _PackFields:
        """As the kernels want it; the arrays must live until they return."""
        return _PackFields(
            tokens=cosine_TD.shape[0],
            segments=len(self.start_S),
            families=len(self.first_F) - 1,
            longest=int((self.length_S + self.prompt_length_S).max()),
            start=self.start_S.ctypes.data,
            length=self.length_S.ctypes.data,
            prompt_start=self.prompt_start_S.ctypes.data,
            prompt_length=self.prompt_length_S.ctypes.data,
            first=self.first_F.ctypes.data,
            cosine=cosine_TD.data_ptr(),
            sine=sine_TD.data_ptr(),
        )


class NativeLayer:
    """The kernels for layers of one shape; any number of layers share them, one after the other."""

    def __init__(self, library: NativeLibrary, spec: DecoderSpec) -> None:
        """Raises ValueError for sizes that `fits` refuses."""
        if not fits(library, spec):
            raise ValueError("no kernels for these sizes")
        self._library, self._spec = library, spec
        fields = _SpecFields(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            inner=spec.intermediate_size,
            eps=spec.rms_norm_eps,
        )
        self._handle = library.functions.lo_train_layer_new(ctypes.byref(fields))
        weakref.finalize(self, library.functions.lo_train_layer_free, self._handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: nothing is kept from call to call."""
        return self

    def __call__(
        self, segments: PackSegments, angles: tuple[Tensor, Tensor], x_TH: Tensor, weights: Sequence[Tensor | None]
    ) -> Tensor:
        """The residual stream after the layer, f32[T, H].

        Args:
            segments: Of the pack.
            angles: Cosines and sines, f32[T, D], both halves alike.
            x_TH: The residual stream before it, f32.
            weights: In the order of `WEIGHTS`, f32; None for those the model has not.

        """
        # C++ trusts its caller.
        assert all(part.shape == (x_TH.shape[0], self._spec.head_dim) and part.is_contiguous() for part in angles)
        assert all(each is None or (each.dtype is torch.float32 and each.is_contiguous()) for each in (x_TH, *weights))
        assert int(segments.start_S[-1] + segments.length_S[-1]) == x_TH.shape[0]
        out_TH: Tensor = _Layer.apply(self, segments, angles, x_TH, *weights)  # type: ignore[no-untyped-call]
        return out_TH

    def forward(
        self, pack: _PackFields, x_TH: Tensor, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output and what `backward` needs."""
        spec, tokens = self._spec, x_TH.shape[0]
        low, mixed = torch.bfloat16, spec.num_heads * spec.head_dim
        kept = (
            torch.empty_like(x_TH),
            x_TH.new_empty(tokens),
            x_TH.new_empty(tokens),
            x_TH.new_empty(spec.num_heads, tokens),
            x_TH.new_empty(tokens, spec.qkv_size, dtype=low),
            x_TH.new_empty(tokens, _padded(mixed), dtype=low),
            x_TH.new_empty(tokens, 2 * spec.intermediate_size, dtype=low),
        )
        out_TH = torch.empty_like(x_TH)
        self._library.follow_threads()
        self._library.functions.lo_train_layer_forward(
            self._handle,
            ctypes.byref(pack),
            ctypes.byref(_WeightFields(*map(_address, weights))),
            x_TH.data_ptr(),
            ctypes.byref(_KeptFields(*map(_address, kept))),
            out_TH.data_ptr(),
        )
        return out_TH, kept

    def backward(
        self,
        pack: _PackFields,
        x_TH: Tensor,
        weights: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        dout_TH: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the input and of the wanted weights."""
        # The kernels know all weights or none, since projections share their products.
        grads = [torch.empty_like(weight) if any(wanted) and weight is not None else None for weight in weights]
        dx_TH = torch.empty_like(x_TH)
        self._library.follow_threads()
        self._library.functions.lo_train_layer_backward(
            self._handle,
            ctypes.byref(pack),
            ctypes.byref(_WeightFields(*map(_address, weights))),
            x_TH.data_ptr(),
            ctypes.byref(_KeptFields(*map(_address, kept))),
            dout_TH.data_ptr(),
            dx_TH.data_ptr(),
            ctypes.byref(_WeightFields(*map(_address, grads))),
        )
        return dx_TH, [grad if want else None for grad, want in zip(grads, wanted)]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: NativeLayer,
        segments: PackSegments,
        angles: tuple[Tensor, Tensor],
        x_TH: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.segments = layer, segments
        out_TH, kept = layer.forward(segments.fields(*angles), x_TH, weights)
        ctx.save_for_backward(*angles, x_TH, *kept, *weights)
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cosine_TD, sine_TD, x_TH, *rest = ctx.saved_tensors
        kept, weights = rest[:_NUM_KEPT], rest[_NUM_KEPT:]
        pack = ctx.segments.fields(cosine_TD, sine_TD)
        wanted = ctx.needs_input_grad[4:]
        dx_TH, dweights = ctx.layer.backward(pack, x_TH, weights, kept, grads[0].contiguous(), wanted)
        return None, None, None, dx_TH, *dweights


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _padded(inputs: int) -> int:
    """`padded` in gemm.hpp."""
    return -(-inputs // 32) * 32 + 32
