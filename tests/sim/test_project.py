"""Exact properties of projected steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from leadout.errors import DataError
from leadout.records import Stage
from leadout.sim.project import project
from leadout.sim.ranges import plain_twin
from leadout.sim.runs import read_run, replay_simulated, write_run
from leadout.sim.scenario import load
from leadout.sim.setup import Workbench
from tests.sim.scenarios import asynchronous, small

EAGLE = ("speculation.method=eagle3",)
RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "scenarios").glob("*.yaml"))


def test_no_drafts_equal_plain_bit_for_bit():
    drafted = small(*EAGLE, "speculation.num_speculative_tokens=0")
    off, plain = project(drafted), project(plain_twin(drafted))
    assert off.seconds == plain.seconds
    assert off.memory == plain.memory


def test_drafts_that_are_never_accepted_make_it_slower():
    for k in (1, 3, 7):
        drafted = small(*EAGLE, f"speculation.num_speculative_tokens={k}", "speculation.acceptance.rate=0.0")
        projection = project(drafted)
        assert projection.acceptance_length == pytest.approx(1.0)
        assert projection.rollout_s > project(plain_twin(drafted)).rollout_s


def test_auto_is_never_slower_than_plain_or_any_fixed_length():
    bench = Workbench()
    auto = project(small(*EAGLE, "speculation.num_speculative_tokens=auto"), bench).rollout_s
    fixed = [project(small(*EAGLE, f"speculation.num_speculative_tokens={k}"), bench).rollout_s for k in range(8)]
    assert auto <= min(fixed) * 1.01
    assert auto <= fixed[0]


@pytest.mark.parametrize("constant", ["hbm_bytes_per_s", "bf16_flops", "nvlink_bytes_per_s"])
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_a_faster_chip_is_never_slower_on_the_roofline_path(constant, model):
    base = small(f"model={model}", "tables=none", "generation.tensor_parallel=2", *EAGLE)
    values = {"hbm_bytes_per_s": 3.35e12, "bf16_flops": 989e12, "nvlink_bytes_per_s": 450e9}
    before = None
    for factor in (1.0, 1.3, 2.0, 4.0):
        value = values[constant] * factor
        scenario = base.model_copy(update={"gpu": {"base": "H100", constant: value}})
        step = project(scenario).step_s
        assert before is None or step <= before * (1 + 1e-12)
        before = step


def test_busy_and_idle_gpu_seconds_fill_the_step():
    for scenario in (small(*EAGLE), asynchronous(1), asynchronous(1, method="copy")):
        projection = project(scenario)
        assert projection.busy_gpu_s + projection.idle_gpu_s == pytest.approx(
            scenario.gpus * projection.step_s, rel=1e-9
        )
        assert projection.busy_gpu_s > 0
        assert projection.idle_gpu_s >= 0


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_generators_short_of_rollouts_are_not_busy_for_longer_than_the_step(lag):
    for quick in (False, True):
        projection = project(asynchronous(lag, "training.mfu=1.0", "workload.num_prompts=4"), quick=quick)
        assert projection.idle_gpu_s >= 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_keeps_gpus_busy_for_longer_than_its_step(recipe):
    scenario, bench = load(recipe), Workbench()
    for quick in (False, True):
        for variant in (scenario, plain_twin(scenario)):
            projection = project(variant, bench, quick=quick)
            assert 0 <= projection.idle_gpu_s < scenario.gpus * projection.step_s


def test_idle_time_of_a_synchronous_step_is_the_tail_of_the_replicas():
    projection = project(small())
    others = sum(projection.seconds[stage] for stage in Stage if stage is not Stage.ROLLOUT)
    assert projection.busy_gpu_s < 8 * projection.step_s
    assert projection.idle_gpu_s == pytest.approx(
        8 * (projection.rollout_s + others) - projection.busy_gpu_s, rel=1e-12
    )


@pytest.mark.parametrize("words", [(), EAGLE, ("workload.num_prompts=48",), ("training.mfu=0.05",)])
def test_more_lag_never_costs_throughput(words):
    steps = [project(asynchronous(lag, *words)).step_s for lag in (0, 1, 2, 4)]
    for less, more in itertools.pairwise(steps):
        assert more <= less * 1.005


def test_without_lag_an_asynchronous_step_is_the_sum_of_both_sides():
    projection = project(asynchronous(0, "draws=3", method="copy"))
    learner = sum(projection.seconds[stage] for stage in (Stage.LOGPROB, Stage.TRAIN, Stage.REFIT))
    assert projection.step_s == pytest.approx(projection.rollout_s + learner, rel=1e-9)


def test_replaying_a_run_on_the_simulated_clock_returns_its_seconds(tmp_path):
    write_run(small(*EAGLE), tmp_path / "run", steps=2)
    recorded = read_run(tmp_path / "run")
    for step, again in zip(recorded, replay_simulated(tmp_path / "run"), strict=True):
        for stage in Stage:
            assert again[stage] == pytest.approx(step.seconds[stage], abs=1e-9)


def test_an_asynchronous_run_is_not_replayed_as_if_its_stages_had_waited_for_each_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds/rollout": 2.0, "exposed/rollout": 1.0}\n')
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "token_ids": [1, 2]}\n')
    with pytest.raises(DataError, match=r"expected a run with pipeline\.mode: sync"):
        read_run(tmp_path)


def test_dynamic_sampling_generates_one_over_the_share_with_signal():
    usual, sampled = project(small()), project(small("workload.share_without_signal=0.5"))
    assert sampled.tokens == pytest.approx(2 * usual.tokens, rel=0.15)
    assert sampled.seconds[Stage.TRAIN] == pytest.approx(usual.seconds[Stage.TRAIN], rel=0.15)
    assert sampled.rollout_s > usual.rollout_s


def test_padded_training_costs_as_much_as_the_longest_sequence():
    packed, padded = project(small()), project(small("training.packed=false"))
    assert padded.seconds[Stage.TRAIN] > 2 * packed.seconds[Stage.TRAIN]


def test_drafter_training_costs_its_share_of_flops():
    frozen = project(small(*EAGLE)).seconds[Stage.TRAIN]
    three = project(small(*EAGLE, "training.draft_passes=3")).seconds[Stage.TRAIN]
    assert 0.08 < three / frozen - 1.0 < 0.16


def test_data_parallel_attention_moves_at_the_slowest_ranks_pace():
    shared = ("model=Qwen3-30B-A3B", "workload.num_prompts=32")
    alone = project(small(*shared, "generation.tensor_parallel=1"))
    lockstep = project(
        small(*shared, "generation.data_parallel=8", "generation.expert_parallel=8", "generation.tensor_parallel=1")
    )
    names = {part.name for part in lockstep.breakdown}
    assert {"all-gather", "reduce-scatter", "experts"} <= names
    assert lockstep.memory.weights_bytes < alone.memory.weights_bytes


def test_live_rows_start_full_and_end_empty():
    times, rows = project(small()).live_rows
    assert rows[0] == 128
    assert rows[-1] <= 1
    assert bool((np.diff(times) > 0).all())


def test_rows_beyond_max_num_seqs_wait_and_take_longer():
    free = project(small())
    queued = project(small("engine.max_num_seqs=4"))
    assert queued.rollout_s > 1.2 * free.rollout_s
    assert queued.tokens == free.tokens


def test_a_sweep_over_draft_lengths_and_rates_builds_one_step_model():
    bench = Workbench()
    count = 0
    for k, rate in itertools.product(range(1, 8), (0.3, 0.5, 0.7, 0.9)):
        words = (*EAGLE, f"speculation.num_speculative_tokens={k}", f"speculation.acceptance.rate={rate}")
        project(small(*words), bench)
        count += 1
    assert len(bench._models) == 1 and count == 28


@pytest.mark.parametrize("method", ["in_flight", "copy"])
@pytest.mark.parametrize("mfu", [0.05, 0.38])
def test_the_bounds_of_an_asynchronous_step_are_close_to_its_event_loop(method, mfu):
    for lag in (0, 1, 2):
        scenario = asynchronous(lag, f"training.mfu={mfu}", "draws=3", method=method)
        quick, full = project(scenario, quick=True).step_s, project(scenario).step_s
        assert quick <= 1.02 * full
        assert quick == pytest.approx(full, rel=0.15)
