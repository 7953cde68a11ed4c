"""Tiny random policies of every family, with the transformers model beside its spec."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from leadout.models.decoder import FusedDecoder
from leadout.models.spec import DecoderSpec

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama_tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama_head_dim": lambda: LlamaConfig(**_SIZES, head_dim=20),
    "llama_one_kv_head_each": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 6}),
    "llama_linear": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(ROPES["linear"])),
    "llama_llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(ROPES["llama3"])),
    "llama_yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(ROPES["yarn"])),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "mistral_wide_window": lambda: MistralConfig(**_SIZES, sliding_window=200),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2_tied": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "qwen3_biases_tied": lambda: Qwen3Config(**_SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


def policy(name: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A transformers model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def decoder(model: Any, max_len: int = 64) -> FusedDecoder:
    """The fused decoder of the same weights and dtype."""
    spec = DecoderSpec.from_config(model.config.to_dict())
    fused = FusedDecoder(spec, dtype=model.dtype, max_len=max_len)
    fused.load(dict(model.named_parameters()))
    return fused
