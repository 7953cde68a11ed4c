"""The search for placement, draft length and lag."""

from __future__ import annotations

import re

import pytest

from leadout.errors import CapacityError, LayoutError, LeadoutError
from leadout.sim.plan import plan
from leadout.sim.plan_report import conclusion, plan_json
from leadout.sim.ranges import NO_DIFFERENCE
from leadout.sim.simulate import simulate
from tests.sim.machines import calibrated
from tests.sim.scenarios import small


def test_the_recommendation_comes_with_a_runner_up_and_reasons():
    found = plan(small(), max_lag=1)
    assert found.best.step_s <= 1.3 * found.tried[0].step_s
    assert found.runner_up.label != found.best.label
    assert len(found.reasons) >= 3
    low, high = found.ratio[1], found.ratio[2]
    assert (NO_DIFFERENCE in conclusion(found)) == (low <= 1.0 <= high)
    assert plan_json(found)["recommended"]


def test_a_difference_the_model_cannot_see_goes_to_the_simpler_choice():
    found = plan(small(), max_lag=1)
    if NO_DIFFERENCE in conclusion(found):
        assert found.best.complexity <= found.runner_up.complexity


def test_nothing_that_fits_is_an_error_that_says_what_was_in_the_way():
    with pytest.raises(CapacityError, match=r"no layout of Qwen3-235B-A22B fits 8 GPUs.*: training.gpus: weights"):
        plan(small("model=Qwen3-235B-A22B"))
    with pytest.raises(CapacityError, match=r"no layout of Qwen3-8B .*: workload.lengths.cap: the cache holds"):
        plan(small("workload.lengths.cap=4000000"))


@pytest.mark.parametrize(
    "words",
    [
        ("gpu=H300",),
        ("gpu.hbm_bytes=-1",),
        ("gpu.hbm_bandwidth=1",),
        ("model=GPT-2",),
        ("profile=no-such-profile.json",),
        ("workload.lengths.mean=5000",),
        ("workload.lengths.file=no-such-file.jsonl",),
        ("speculation.method=small_model", "speculation.num_speculative_tokens=3"),
        ("speculation.method=eagle3", "speculation.model=no-such-folder"),
        ("speculation.method=eagle3", "speculation.acceptance.cumulative=[0.5,0.6]"),
        ("speculation.method=eagle3", "speculation.acceptance.mean_length=9"),
    ],
)
def test_bad_input_is_the_error_that_simulate_gives(words):
    scenario = small(*words)
    with pytest.raises(LeadoutError) as told:
        simulate(scenario)
    with pytest.raises(type(told.value), match=f"^{re.escape(str(told.value))}$"):
        plan(scenario)


def test_ranges_of_unknown_fields_are_refused_before_the_search():
    with pytest.raises(LeadoutError, match=r"unknown field engine.host_ms"):
        plan(small(ranges={"engine.host_ms": (1.0, 2.0)}))


def test_a_setting_that_no_layout_divides_is_named():
    with pytest.raises(LayoutError, match="expert_parallel needs a model with experts, Qwen3-8B is dense"):
        plan(small("generation.expert_parallel=2"))


def test_ranges_of_the_drafter_do_not_bind_plain_layouts():
    found = plan(small("gpus=1", "gpu=B200", ranges={"speculation.acceptance_scale": (0.9, 1.1)}), max_lag=0)
    assert found.runner_up.scenario.speculation is None or found.best.scenario.speculation is None
    assert found.ratio[1] < found.ratio[2]


def test_a_calibrated_machine_is_searched_over_the_draft_lengths_it_measured(tmp_path):
    found = plan(calibrated(tmp_path))
    tried = {
        0 if item.scenario.speculation is None else item.scenario.speculation.num_speculative_tokens
        for item in found.tried
    }
    assert tried == {0, 1, 3, 5, "auto"}
    assert found.refused == 0
