"""Which tensors a policy has, by Hugging Face name, and the check that a set of tensors is exactly those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from leadout.errors import ModelError
from leadout.models.spec import DecoderSpec

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name; the head of a tied model is not listed."""
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied:
        shapes[_HEAD] = (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    return shapes


def check_tensors(spec: DecoderSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse anything but the tensors of the model; a tied head may come along if it equals the embedding.

    Raises:
        ModelError: missing, unknown or misshapen tensors, named.

    """
    expected = expected_shapes(spec)
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.keys() - ({_HEAD} if spec.tied else set()))
    if missing or extra:
        raise ModelError(f"weights do not fit the config: missing {shortened(missing)}; unknown {shortened(extra)}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"expected {name} of shape {shape}, got {tuple(tensors[name].shape)}")
    if spec.tied and _HEAD in tensors and not torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
        raise ModelError(
            "the config says tied embeddings, but lm_head.weight is not the embedding; correct one of them"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity.

    One sum decides almost always, since both survive it; only a sum that overflows is looked at element by element.
    """
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return True
    total = tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _layer_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, by name within the layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, queries, spec.output_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def shortened(names: Sequence[str], limit: int = 5) -> str:
    """Names with commas, the first few only; "none" without any."""
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
