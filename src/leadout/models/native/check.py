"""Whether the native decoder may be used: it must agree with a plain float32 computation on a small random model.

Axes: N tokens, H hidden, A query heads, D head dimension.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch
import torch.nn.functional as F

from leadout.models.native.decoder import NativeDecoder, fits
from leadout.models.native.library import NativeLibrary, native_library
from leadout.models.rope import RopeSpec
from leadout.models.spec import DecoderSpec
from leadout.models.weights import expected_shapes

_log = logging.getLogger(__name__)

_TOLERANCE = 0.03
_LENGTH = 23


def usable_library() -> NativeLibrary | None:
    """The kernels, if they can be had and agree."""
    library = native_library()
    return library if library is not None and _agrees(library) else None


def native_decoder(spec: DecoderSpec, max_len: int) -> NativeDecoder | None:
    """A native decoder for this model, or None, with a line in the log, where PyTorch's operators must do."""
    library = usable_library()
    if library is None:
        return None
    if not fits(library, spec):
        _log.warning(
            "native kernels are off for this model: hidden and intermediate size must be multiples of 16 and head_dim "
            "one of 16, 32, 48, 64, 80, 96, 112, 128, 256; got %d, %d and %d",
            spec.hidden_size,
            spec.intermediate_size,
            spec.head_dim,
        )
        return None
    return NativeDecoder(library, spec, max_len)


@functools.cache
def _agrees(library: NativeLibrary) -> bool:
    """One small model through both; a difference is logged once."""
    spec = _small_spec()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.5)).to(torch.bfloat16)
        for name, shape in expected_shapes(spec).items()
    }
    tokens_N = torch.randint(0, spec.vocab_size, (_LENGTH,), generator=generator)
    native = NativeDecoder(library, spec, _LENGTH)
    native.load(tensors)
    caches = [
        torch.zeros((1, 2 * spec.num_kv_heads, _LENGTH, spec.head_dim), dtype=torch.bfloat16)
        for _ in range(spec.num_layers)
    ]
    addresses = np.array([cache.data_ptr() for cache in caches], np.int64)
    strides = (caches[0].stride(0), caches[0].stride(1))
    parts, done = [], 0
    for width in (18, 1, _LENGTH - 19):
        lengths, counts = np.array([done], np.int64), np.array([width], np.int64)
        block_1N = tokens_N[None, done : done + width]
        parts.append(
            native.forward(block_1N, addresses, strides, np.zeros(1, np.int64), lengths, counts, (), False)[0][0]
        )
        done += width
    expected_NH = _reference({name: tensor.float() for name, tensor in tensors.items()}, spec, tokens_N)
    found_NH = torch.cat(parts).float()
    gap = float((found_NH - expected_NH).abs().mean() / expected_NH.abs().mean())
    logits_gap = float((native.logits(found_NH) - found_NH @ tensors["lm_head.weight"].float().t()).abs().max())
    if not (gap < _TOLERANCE and logits_gap < 1e-3):
        _log.warning(
            "native kernels are off: they differ from PyTorch by %.3g (states) and %.3g (logits)", gap, logits_gap
        )
        return False
    return True


def _small_spec() -> DecoderSpec:
    """Grouped queries, biases and head norms at once."""
    return DecoderSpec(
        family="qwen3",
        hidden_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=112,
        vocab_size=77,
        rms_norm_eps=1e-6,
        tied=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        max_position_embeddings=64,
        rope=RopeSpec(rope_type="default", theta=10000.0, dim=32),
        eos_token_ids=(),
    )


def _reference(tensors: dict[str, torch.Tensor], spec: DecoderSpec, tokens_N: torch.Tensor) -> torch.Tensor:
    """The model as its paper has it, without cache, in float32: states after the final norm, [N, H]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        normed: torch.Tensor = F.rms_norm(x, (x.shape[-1],), tensors[f"{name}.weight"], spec.rms_norm_eps)
        return normed

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        out: torch.Tensor = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        return out

    cos_PD, sin_PD = spec.rope.tables(len(tokens_N), torch.float32, torch.device("cpu"))

    def heads(x: torch.Tensor, name: str, normed: bool) -> torch.Tensor:
        x_NAD: torch.Tensor = linear(x, f"{name}_proj").unflatten(-1, (-1, spec.head_dim))
        if not normed:
            return x_NAD.transpose(0, 1)
        x_NAD = norm(x_NAD, f"{name}_norm")
        rotated = x_NAD * cos_PD[:, None] + x_NAD.roll(spec.head_dim // 2, -1) * sin_PD[:, None]
        return rotated.transpose(0, 1)

    hidden_NH = tensors["model.embed_tokens.weight"][tokens_N]
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        x = norm(hidden_NH, f"{layer}.input_layernorm")
        query, key = heads(x, f"{layer}.self_attn.q", True), heads(x, f"{layer}.self_attn.k", True)
        value = heads(x, f"{layer}.self_attn.v", False)
        groups = (spec.group_size, 0)
        mixed = F.scaled_dot_product_attention(
            query, key.repeat_interleave(*groups), value.repeat_interleave(*groups), is_causal=True
        )
        hidden_NH = hidden_NH + linear(mixed.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")
        x = norm(hidden_NH, f"{layer}.post_attention_layernorm")
        active = F.silu(linear(x, f"{layer}.mlp.gate_proj")) * linear(x, f"{layer}.mlp.up_proj")
        hidden_NH = hidden_NH + linear(active, f"{layer}.mlp.down_proj")
    return norm(hidden_NH, "model.norm")
