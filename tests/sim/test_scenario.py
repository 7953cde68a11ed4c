"""Bad input gets one line that names the field and what it allows."""

from __future__ import annotations

import pytest

from leadout.errors import CapacityError, ConfigError
from leadout.sim.project import project
from leadout.sim.scenario import apply_overrides, load, parse
from tests.sim.scenarios import small


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpu=H300",), "gpu must be one of A100, H100, H200, B200, GB200"),
        (("model=GPT-2",), "model must be one of Qwen3-0.6B"),
        (("generation.tensor_parallel=3",), "tensor_parallel must divide 32 query heads"),
        (("generation.tensor_parallel=4", "gpus=6"), "do not divide into replicas"),
        (("generation.expert_parallel=2",), "expert_parallel needs a model with experts"),
        (("gpu.hbm_bandwidth=1",), "gpu.hbm_bandwidth is not a constant"),
        (("gpu.hbm_bytes=-1",), "gpu.hbm_bytes must be > 0"),
        (("workload.lengths.mean=5000",), r"lengths.mean must lie in \[1, cap\] = \[1, 4096\]"),
        (("speculation.method=eagle3", "speculation.acceptance.cumulative=[0.5,0.6]"), "must not increase"),
        (("speculation.method=small_model",), "speculation.model is needed"),
        (("ranges.engine.host_ms=[1,2]",), "ranges"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        project(small(*words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("engine.max_num_seq=3",), "unknown field; known here: max_num_seqs"),
        (("gpus=0",), "gpus: Input should be greater than or equal to 1, got 0"),
        (("pipeline.max_staleness=1",), "max_staleness must be 0 with mode sync"),
        (("pipeline.mode=async",), "set generation.gpus below gpus"),
        (("generation.gpus=9",), "generation.gpus must be <= gpus = 8, got 9"),
        (("speculation.acceptance.rate=0.5", "speculation.acceptance.mean_length=2"), "expected one of"),
        (("speculation.method=medusa",), "speculation.method: Input should be 'eagle3'"),
    ],
)
def test_an_inconsistent_scenario_is_one_line(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        small(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=Qwen3-235B-A22B", "gpus=8", "generation.tensor_parallel=8"), "training.gpus: weights and Adam"),
        (("model=Qwen3-32B", "gpu=A100", "gpus=16", "training.offload=false"), "do not fit 90% of a A100"),
        (("workload.lengths.cap=4000000", "workload.lengths.mean=900"), "workload.lengths.cap: the cache holds"),
    ],
)
def test_what_does_not_fit_says_so(words, message):
    with pytest.raises(CapacityError, match=message) as caught:
        project(small(*words))
    assert "\n" not in str(caught.value)


def test_overrides_reach_into_absent_sections():
    merged = apply_overrides({"gpu": "H100"}, ["gpu.hbm_bytes=1e11", "speculation.num_speculative_tokens=3"])
    assert merged == {"gpu": {"base": "H100", "hbm_bytes": "1e11"}, "speculation": {"num_speculative_tokens": 3}}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no scenario file"):
        load(tmp_path / "none.yaml")


def test_a_gpu_given_whole_runs_on_the_roofline():
    constants = {
        "name": "toy",
        "bf16_flops": 1e14,
        "fp8_flops": 2e14,
        "hbm_bytes": 64e9,
        "hbm_bytes_per_s": 1e12,
        "l2_bytes": 4e7,
        "nvlink_bytes_per_s": 1e11,
        "nvlink_domain": 8,
        "network_bytes_per_s": 1e10,
        "host_bytes_per_s": 1e10,
        "gemm_memory_fraction": 0.7,
        "gemm_flops_fraction": 0.7,
        "fp8_memory_fraction": 0.5,
        "fp8_flops_fraction": 0.5,
        "attention_fraction": 0.9,
    }
    scenario = parse({**small().model_dump(), "gpu": constants})
    paths = {part.served.value for part in project(scenario).breakdown}
    assert paths == {"roofline", "assumed"}
