"""Small random policies that the native kernels take, one of every family, and both decoders of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from leadout.models.decoder import FusedDecoder
from leadout.models.native.check import usable_library
from leadout.models.spec import DecoderSpec

needs_kernels = pytest.mark.skipif(usable_library() is None, reason="no native kernels on this machine")

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 613,
    "max_position_embeddings": 256,
    "head_dim": 16,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**{**_SIZES, "head_dim": 32}),
    "llama_biases_tied": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_one_kv_head_each": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 6, "head_dim": 48}),
    "llama_group_of_six": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 1, "head_dim": 64}),
    "mistral": lambda: MistralConfig(**{**_SIZES, "head_dim": 128}, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{**_SIZES, "hidden_size": 96}),
    "qwen3": lambda: Qwen3Config(**{**_SIZES, "head_dim": 80}),
}


def policy(name: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 transformers model whose parameters are random and representable in bfloat16."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def decoder(model: Any, *, native: bool | None, max_len: int = 96) -> FusedDecoder:
    """The fused decoder of the same weights in bfloat16."""
    spec = DecoderSpec.from_config(model.config.to_dict())
    fused = FusedDecoder(spec, dtype=torch.bfloat16, max_len=max_len, native=native)
    fused.load(dict(model.named_parameters()))
    return fused


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean gap in units of the mean size."""
    return float((found.double() - expected.double()).abs().mean() / expected.double().abs().mean())
