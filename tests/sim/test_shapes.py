"""Shapes of models and drafters, and what they weigh."""

from __future__ import annotations

import json

import pytest

from leadout.errors import ConfigError, ModelError
from leadout.sim.forward import Layout
from leadout.sim.hardware import GPUS
from leadout.sim.memory import weight_bytes
from leadout.sim.resolve import resolve_gpu
from leadout.sim.shapes import MODELS, draft_shape, find_model, from_hf_config


@pytest.mark.parametrize(
    ("name", "billions", "cache_bytes"),
    [
        ("Qwen3-0.6B", 0.60, 114_688),
        ("Qwen3-8B", 8.19, 147_456),
        ("Qwen3-32B", 32.76, 262_144),
        ("Qwen3-30B-A3B", 30.5, 98_304),
        ("Qwen3-235B-A22B", 235.1, 192_512),
        ("Llama-3.1-8B", 8.03, 131_072),
        ("DeepSeek-V3", 671.0, 70_272),
    ],
)
def test_parameters_and_cache_match_the_published_ones(name, billions, cache_bytes):
    shape = MODELS[name]
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.008)
    assert shape.kv_bytes_per_token(1, 2.0) == cache_bytes


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_a_gpu_keeps_at_least_one_key_value_head(tp):
    assert MODELS["Qwen3-235B-A22B"].kv_bytes_per_token(tp, 2.0) == 48_128


@pytest.mark.parametrize(
    ("target", "millions"), [("Qwen3-4B", 218), ("Qwen3-8B", 400), ("Qwen3-32B", 782), ("Qwen3-235B-A22B", 592)]
)
def test_eagle3_drafters_weigh_what_the_recipes_say(target, millions):
    assert draft_shape("eagle3", MODELS[target]).params / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize(("vocab", "passes", "share"), [(32000, 1, 0.05), (32000, 3, 0.16), (151936, 3, 0.35)])
def test_drafter_training_is_the_published_share_of_the_policys(vocab, passes, share):
    drafter, policy = draft_shape("eagle3", MODELS["Qwen3-8B"], vocab), MODELS["Qwen3-8B"]
    assert drafter.trained_params * passes / policy.matmul_params == pytest.approx(share, abs=0.01)


def test_a_hugging_face_config_is_read(tmp_path):
    config = {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert find_model(str(path)).params == MODELS["Qwen3-8B"].params
    assert find_model("Qwen/Qwen3-8B-FP8") is MODELS["Qwen3-8B"]
    with pytest.raises(ModelError, match="has no hidden_size"):
        from_hf_config({"num_attention_heads": 4}, "broken")


def test_a_drafters_own_config_gives_its_shape(tmp_path):
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = draft_shape("eagle3", MODELS["Qwen3-8B"], model=str(tmp_path))
    assert own.params == draft_shape("eagle3", MODELS["Qwen3-8B"]).params
    with pytest.raises(ConfigError, match="draft folder"):
        draft_shape("eagle3", MODELS["Qwen3-8B"], model="nowhere")


def test_experts_are_spread_over_the_replica():
    shape = MODELS["Qwen3-30B-A3B"]
    one = weight_bytes(shape, Layout(gpu=GPUS["H100"], tables=None))
    eight = weight_bytes(shape, Layout(gpu=GPUS["H100"], tables=None, data_parallel=8, expert_parallel=8))
    assert one == pytest.approx(61.06e9, rel=0.002)
    assert eight < one / 5


def test_a_gpu_file_may_override_constants(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text("base: H200\nhbm_bytes_per_s: 4.0e+12\n")
    gpu = resolve_gpu(str(path))
    assert (gpu.table, gpu.hbm_bytes_per_s) == ("h200_sxm", 4.0e12)
    with pytest.raises(ConfigError, match="no file"):
        resolve_gpu("missing.yaml")


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "q_lora_rank": 1536}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number >= 1, got 0"),
        ({"hidden_size": "many"}, "hidden_size must be a whole number >= 1, got 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads = 8, got 3"),
        ({"num_experts": 16}, "has no num_experts_per_tok"),
        ({"num_experts": 16, "num_experts_per_tok": 32}, "num_experts_per_tok must be <= 16 experts, got 32"),
        ({**LATENT, "kv_lora_rank": 256}, "kv_lora_rank 512, .* got 256, 64 and 1536"),
        ({**LATENT, "q_lora_rank": None}, "a q_lora_rank only, got 512, 64 and None"),
        ({"sliding_window": 4096}, "only layers with full attention are modelled, got sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "are modelled, got sliding_attention"),
        (
            {"layer_types": ["linear_attention"], "full_attention_interval": 4},
            "got linear_attention, full_attention_int",
        ),
        ({"mamba_d_state": 16}, "are modelled, got mamba_d_state"),
    ],
)
def test_a_model_that_is_not_modelled_is_refused_in_one_line(change, message):
    with pytest.raises(ModelError, match=message) as caught:
        from_hf_config({**SMALL, **change}, "tiny")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 4096},
    ],
)
def test_a_window_that_is_not_used_changes_nothing(change):
    assert from_hf_config({**SMALL, **change}, "tiny") == from_hf_config(SMALL, "tiny")


def test_latent_attention_is_read_as_deepseeks():
    shape = from_hf_config({**SMALL, **LATENT}, "tiny")
    assert (shape.latent, shape.q_lora, shape.head_dim) == (576, 1536, 128)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[1]", "must hold a mapping .* got list"), (b"\xff", "is not a UTF-8 text file")],
)
def test_a_config_that_is_none_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    for read in (find_model, lambda path: draft_shape("eagle3", MODELS["Qwen3-8B"], model=path)):
        with pytest.raises(ConfigError, match=rf"config\.json {message}") as caught:
            read(str(tmp_path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: [H100", r"gpu\.yaml is not YAML"),
        ("- 1\n", r"gpu\.yaml must hold a mapping, got list"),
        ("base: H100\nhbm_bytes: abc\n", r"gpu\.hbm_bytes must be a number, got 'abc'"),
        ("base: H100\nhbm_bytes: [1, 2]\n", r"gpu\.hbm_bytes must be a number, got \[1, 2\]"),
        ("base: H100\nhbm_bytes: .inf\n", r"gpu\.hbm_bytes must be a finite number, got inf"),
    ],
)
def test_a_gpu_file_that_is_wrong_is_one_line(tmp_path, content, message):
    path = tmp_path / "gpu.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_gpu(str(path))
    assert "\n" not in str(caught.value)
