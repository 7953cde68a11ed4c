"""One layer's weights as the PyTorch path of the generating decoder wants them: fused and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from leadout.models.linear import PackedLinear
from leadout.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """Query, key and value in one product, gate and up in one."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


def place(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An own copy: the learner goes on changing its tensors in place."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True).contiguous()


def load_layer(
    spec: DecoderSpec, tensors: Mapping[str, torch.Tensor], index: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """Layer `index` from checked tensors under their Hugging Face names."""
    prefix = f"model.layers.{index}."

    def linear(has_bias: bool, *names: str) -> PackedLinear:
        weight = torch.cat([tensors[f"{prefix}{name}.weight"].to(device) for name in names])
        bias = torch.cat([tensors[f"{prefix}{name}.bias"].to(device) for name in names]) if has_bias else None
        return PackedLinear(weight, bias, dtype)

    def norm(name: str) -> torch.Tensor:
        return place(tensors[f"{prefix}{name}.weight"], dtype, device)

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear(spec.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        key_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        output=linear(spec.output_bias, "self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_up=linear(spec.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(spec.mlp_bias, "mlp.down_proj"),
    )
