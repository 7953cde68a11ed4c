"""Ranges of the headlines, and what they allow to say."""

from __future__ import annotations

import pytest

from leadout.errors import ConfigError
from leadout.sim.inputs import active_inputs, between, get_value, set_value
from leadout.sim.ranges import NO_DIFFERENCE, Range, headline_ranges, verdict
from tests.sim.scenarios import small

EAGLE = ("speculation.method=eagle3", "speculation.num_speculative_tokens=3")


def test_every_headline_lies_in_its_range_and_names_three_inputs():
    found = headline_ranges(small(*EAGLE))
    assert set(found) == {"step_s", "rollout_s", "rollout_speedup", "step_speedup", "round_cost"}
    for item in found.values():
        assert item.low <= item.value <= item.high
        assert len(item.widest) == 3
        assert item.widest[0][1] >= item.widest[1][1] >= item.widest[2][1]


def test_inputs_known_exactly_leave_no_width():
    scenario = small(*EAGLE, "training.mfu=0.3", "refit.fixed_s=1.0", "speculation.draft_vocab=32000")
    exact = {item.field: get_value(scenario, item.field) for item in active_inputs(scenario)}
    known = scenario.model_copy(update={"ranges": {field: (value, value) for field, value in exact.items()}})
    for item in headline_ranges(known).values():
        assert item.high - item.low == pytest.approx(0.0, abs=1e-9)
        assert max(spread for _, spread in item.widest) < 1e-9


def test_a_difference_inside_the_range_is_not_claimed():
    assert verdict(Range(value=1.02, low=0.97, high=1.08, widest=())) == NO_DIFFERENCE
    assert verdict(Range(value=1.2, low=1.1, high=1.3, widest=())) == "faster"
    assert verdict(Range(value=0.8, low=0.7, high=0.9, widest=())) == "slower"


def test_a_range_that_is_upside_down_is_refused():
    with pytest.raises(ConfigError, match="low <= high"):
        active_inputs(small(ranges={"engine.host_s": (2.0, 1.0)}))


def test_dotted_fields_are_read_and_replaced():
    scenario = set_value(small(), "workload.lengths.mean", 700.0)
    assert get_value(scenario, "workload.lengths.mean") == 700.0
    assert get_value(small(), "speculation.acceptance_scale") is None


def test_a_constant_the_scenario_states_ranges_around_its_value():
    found = {item.field: item for item in active_inputs(small(*EAGLE, "engine.draft_host_s=0.003"))}
    assert found["engine.draft_host_s"].low == pytest.approx(0.0027)
    assert found["engine.draft_host_s"].high == pytest.approx(0.00333)
    assert found["engine.attention_per_draft"].low == 0.05


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"training.mfu": (-1.0, 0.5)}, "ranges.training.mfu: training.mfu: Input should be greater than 0, got -1.0"),
        ({"refit.links": (0.0, 1.0)}, "ranges.refit.links: refit.links: Input should be greater than or equal to 1"),
        ({"draws": (0.0, 3.0)}, "ranges.draws: draws: Input should be greater than or equal to 1, got 0"),
        ({"training.packed": (0.0, 1.0)}, "ranges.training.packed: expected the name of a number"),
        (
            {"workload.lengths.mean": (900.0, 9000.0)},
            r"ranges.workload.lengths.mean: lengths.mean must lie in \[1, cap\]",
        ),
        ({"workload.lengths.cv": (0.5, 55.0)}, "ranges.workload.lengths.cv: workload.lengths.cv: Input should be less"),
        ({"speculation.acceptance.rat": (0.5, 0.6)}, "ranges: unknown field speculation.acceptance.rat"),
    ],
)
def test_an_end_that_the_field_does_not_allow_is_one_line(ranges, message):
    for words in ((), EAGLE):
        with pytest.raises(ConfigError, match=message) as caught:
            active_inputs(small(*words, ranges=ranges))
        assert "\n" not in str(caught.value)


def test_a_range_of_drafting_leaves_the_plain_scenario_alone():
    ranges = {"speculation.acceptance_scale": (0.5, 0.9)}
    assert "speculation.acceptance_scale" not in {item.field for item in active_inputs(small(ranges=ranges))}
    found = {item.field: item for item in active_inputs(small(*EAGLE, ranges=ranges))}
    assert (found["speculation.acceptance_scale"].low, found["speculation.acceptance_scale"].high) == (0.5, 0.9)


def test_a_range_of_the_rate_beside_a_mean_length_is_refused():
    words = (*EAGLE, "speculation.acceptance.mean_length=2.5")
    with pytest.raises(ConfigError, match=r"acceptance\.rate: has no effect beside acceptance\.mean_length"):
        active_inputs(small(*words, ranges={"speculation.acceptance.rate": (0.5, 0.6)}))


@pytest.mark.parametrize(
    ("word", "low", "high"),
    [
        ("engine.host_s=0.002", 0.0018, 0.00222),
        ("engine.launch_s=0.04", 0.036, 0.0444),
        ("engine.attention_fallback_factor=5", 4.5, 5.55),
        ("engine.attention_fallback_factor=1.05", 1.0, 1.1655),
        ("training.logprob_mfu=0.3", 0.27, 0.333),
        ("training.mfu=0.95", 0.855, 1.0),
    ],
)
def test_every_stated_constant_ranges_around_its_value(word, low, high):
    field = word.partition("=")[0]
    found = {item.field: item for item in active_inputs(small(word))}[field]
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    if field != "training.mfu":
        assert field not in {item.field for item in active_inputs(small())}


@pytest.mark.parametrize("field", ["engine.draft_host_s", "engine.attention_per_draft", "engine.host_s"])
def test_a_constant_stated_as_nothing_does_not_range(field):
    assert field not in {item.field for item in active_inputs(small(*EAGLE, f"{field}=0"))}


@pytest.mark.parametrize(
    ("words", "low", "high"),
    [
        (("workload.lengths.mean=4096", "workload.lengths.cv=0"), 0.9 * 4096, 4096.0),
        (("workload.lengths.mean=4090",), 0.9 * 4090, 4090.0),
        (("workload.lengths.mean=3900",), 0.9 * 3900, 0.97 * 4096),
        (("workload.lengths.mean=1",), 1.0, 1.1),
    ],
)
def test_the_range_of_the_mean_holds_the_scenarios_own_and_stays_a_law(words, low, high):
    scenario = small(*words)
    item = next(item for item in active_inputs(scenario) if item.field == "workload.lengths.mean")
    assert between(item, 0.0, scenario) == pytest.approx(low)
    assert between(item, 1.0, scenario) == pytest.approx(high)


def test_a_range_of_a_whole_number_is_drawn_as_one():
    scenario = small(ranges={"training.gpus": (2.0, 8.0)})
    item = next(item for item in active_inputs(scenario) if item.field == "training.gpus")
    assert [between(item, u, scenario) for u in (0.0, 0.5, 0.7, 1.0)] == [2, 4, 5, 8]


def test_the_widest_law_still_ranges():
    found = {item.field: item for item in active_inputs(small("workload.lengths.cv=9"))}["workload.lengths.cv"]
    assert (found.low, found.high) == (6.75, 10.0)
