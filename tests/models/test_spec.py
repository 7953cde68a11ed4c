from __future__ import annotations

from typing import Any

import pytest

from leadout.errors import CapacityError, ModelError
from leadout.models.spec import DecoderSpec
from tests.models.tiny import CONFIGS


def config(name: str = "llama", **changes: Any) -> dict[str, Any]:
    return CONFIGS[name]().to_dict() | changes


def test_fields_of_each_family_are_read() -> None:
    llama = DecoderSpec.from_config(config("llama_biases"))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm, llama.tied) == (
        True,
        True,
        True,
        False,
        False,
    )
    qwen2 = DecoderSpec.from_config(config("qwen2_tied"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm, qwen2.tied) == (
        True,
        False,
        False,
        False,
        True,
    )
    qwen3 = DecoderSpec.from_config(config("qwen3"))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.group_size, qwen3.qkv_size) == (
        False,
        True,
        16,
        3,
        160,
    )


def test_head_dim_falls_back_to_the_width_of_a_head() -> None:
    assert DecoderSpec.from_config(config(head_dim=None)).head_dim == 8


def test_one_or_several_end_tokens_are_read() -> None:
    assert DecoderSpec.from_config(config(eos_token_id=7)).eos_token_ids == (7,)
    assert DecoderSpec.from_config(config(eos_token_id=[7, 9])).eos_token_ids == (7, 9)
    assert DecoderSpec.from_config(config(eos_token_id=None)).eos_token_ids == ()


def test_other_architectures_are_sent_to_vllm() -> None:
    with pytest.raises(ModelError, match=r"'gemma2'.*only be generated through vLLM"):
        DecoderSpec.from_config({"model_type": "gemma2"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act silu, got 'gelu'"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1, got 0.5"),
        ({"pretraining_tp": 2}, "pretraining_tp 1, got 2"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"hidden_size": None}, "positive integer for hidden_size"),
    ],
)
def test_fields_that_change_the_forward_pass_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecoderSpec.from_config(config(**change))


def test_a_sliding_window_shorter_than_the_rows_is_refused() -> None:
    spec = DecoderSpec.from_config(config("mistral", sliding_window=32))
    spec.check_length(32)
    with pytest.raises(ModelError, match=r"at most 32 tokens of context \(sliding_window\), got 33"):
        spec.check_length(33)


def test_a_mistral_config_that_says_nothing_has_a_window_of_4096() -> None:
    given = config("mistral")
    del given["sliding_window"]
    assert DecoderSpec.from_config(given).sliding_window == 4096


def test_qwen_windows_count_only_where_a_layer_uses_them() -> None:
    off = config("qwen2", use_sliding_window=False, sliding_window=32)
    unused = config("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=3, layer_types=None)
    used = config("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=2, layer_types=None)
    by_type = config("qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention"] * 3)
    windows = [DecoderSpec.from_config(given).sliding_window for given in (off, unused, used, by_type)]
    assert windows == [None, None, 32, 32]


def test_rows_longer_than_the_models_context_are_refused() -> None:
    with pytest.raises(CapacityError, match="at most 256 tokens"):
        DecoderSpec.from_config(config()).check_length(257)
