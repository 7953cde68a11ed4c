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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("training.gpus=64",), "training.gpus must be <= gpus = 8, got 64"),
        (("training.mfu=.inf",), "training.mfu: Input should be a finite number, got inf"),
        (("workload.prompt_length=.nan",), "workload.prompt_length: Input should be a finite number, got nan"),
        (("gpu.hbm_bytes=.nan",), "gpu: hbm_bytes must be a finite number, got nan"),
        (("gpu.hbm_bytes=[1]",), r"gpu: hbm_bytes must be a number, got \[1\]"),
        (("gpu=[1]",), r"gpu: expected a name or a mapping of constants, got \[1\]"),
        (("name=[1",), r"override name: expected a YAML value, got '\[1'"),
        (("seed=2020-99-99",), "override seed: expected a YAML value, got '2020-99-99'"),
        (("workload.num_prompts=1000001",), "workload.num_prompts: Input should be less than or equal to 1000000"),
        (("workload.num_prompts=200000",), "must be <= 1,000,000 rollouts a step, got 1,600,000"),
        (("draws=1000001",), "draws: Input should be less than or equal to 1000000"),
        (("gpus=1000001",), "gpus: Input should be less than or equal to 1000000"),
        (("workload.share_without_signal=0.99",), "workload.share_without_signal: Input should be less than 0.99"),
        (("workload.lengths.cv=55",), "workload.lengths.cv: Input should be less than or equal to 10, got 55"),
        (("workload.lengths.cv=1.0e+200",), "workload.lengths.cv: Input should be less than or equal to 10"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused_in_one_line(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        small(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpu.hbm_bytes=abc",), "gpu.hbm_bytes must be a number, got 'abc'"),
        (("gpu.hbm_bytes=nan",), "gpu.hbm_bytes must be a finite number, got nan"),
        (("gpu.nvlink_domain=0.5",), "gpu.nvlink_domain must be a whole number of GPUs, got 0.5"),
        (("gpu.attention_fraction=1.2",), "gpu.attention_fraction is a share of the peak and must be <= 1, got 1.2"),
        (("generation.data_parallel=2",), "generation.data_parallel must be 1 for Qwen3-8B, got 2: it is dense"),
        (
            ("model=Qwen3-30B-A3B", "gpus=5", "generation.data_parallel=5"),
            "tensor_parallel x data_parallel must divide the experts' width 768 of Qwen3-30B-A3B, got 5",
        ),
        (("workload.lengths.mean=4096",), "lengths.mean is taken after the cut and must be < cap = 4096 where cv > 0"),
    ],
)
def test_a_machine_or_law_that_cannot_be_is_refused_in_one_line(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        project(small(*words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff\xfe", "is not a UTF-8 text file"),
        (b"name: [1", "is not YAML: while parsing a flow sequence"),
        (b"- 1\n- 2\n", "must hold a mapping, got list"),
    ],
)
def test_a_scenario_file_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "scenario.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"scenario\.yaml {message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_experts_are_split_over_ranks_that_divide_them():
    shared = ("model=Qwen3-30B-A3B", "gpus=4", "generation.data_parallel=4")
    assert project(small(*shared, "training.offload=true", "gpu=B200")).step_s > 0
