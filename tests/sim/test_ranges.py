"""Ranges of the headlines, and what they allow to say."""

from __future__ import annotations

import pytest

from leadout.errors import ConfigError
from leadout.sim.ranges import NO_DIFFERENCE, Range, active_inputs, get_value, headline_ranges, set_value, verdict
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
