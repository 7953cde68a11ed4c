from __future__ import annotations

import json

import pytest

from leadout.draft_length.costs import CostProfile
from leadout.draft_length.curves import Curve, MeasuredCurve
from leadout.draft_length.pace import Levels
from leadout.errors import ConfigError


def test_between_points_the_forecast_is_linear():
    curve = Curve({1: 10.0, 5: 14.0})
    assert [curve.at(n) for n in (1, 2, 4, 5)] == pytest.approx([10.0, 11.0, 13.0, 14.0])


def test_below_the_first_point_it_is_flat_and_beyond_the_last_it_keeps_the_mean_slope():
    curve = Curve({4: 10.0, 8: 12.0})
    assert (curve.at(1), curve.at(10)) == (10.0, pytest.approx(13.0))


def test_the_slope_of_points_close_together_is_not_believed():
    assert Curve({32: 10.0, 38: 16.0}).at(76) == 32.0


def test_the_least_a_larger_pass_costs_is_the_largest_measured():
    curve = Curve({4: 10.0, 8: 12.0})
    assert [curve.least(n) for n in (6, 8, 100)] == [11.0, 12.0, 12.0]
    assert [curve.reaches(n) for n in (2, 8, 9)] == [True, True, False]


def test_one_point_alone_grows_in_proportion():
    assert Curve({4: 10.0}).at(8) == 20.0


def test_a_forecast_never_falls_with_more_tokens():
    curve = Curve({1: 10.0, 2: 30.0, 4: 12.0})
    assert [curve.at(n) for n in (1, 2, 3, 4)] == pytest.approx([10.0, 21.0, 21.0, 21.0])


def test_large_counts_about_equal_share_a_point():
    curve = MeasuredCurve(Levels(), "forward")
    assert curve.is_empty
    for count, seconds in ((64, 10.0), (66, 10.0), (65, 10.0), (90, 20.0)):
        curve.record(count, seconds)
    assert curve.points() == pytest.approx({64.28: 10.0, 90.0: 20.0})
    assert curve.knows(63) and not curve.knows(75)


def test_a_measurement_of_no_time_says_nothing():
    curve = MeasuredCurve(Levels(), "forward", {4: 10.0})
    curve.record(8, 0.0)
    assert curve.points() == pytest.approx({4.0: 10.0})


def test_a_round_costs_its_forward_pass_and_its_drafts():
    costs = CostProfile({1: 10.0, 64: 73.0}, {1: 2.0, 16: 17.0})
    assert costs.round_seconds(4, 0) == pytest.approx(13.0)
    assert costs.round_seconds(4, 3) == pytest.approx(25.0 + 3 * 5.0)


def test_unmeasured_drafts_count_as_a_tenth_of_a_plain_step():
    assert CostProfile({1: 10.0, 64: 73.0}).round_seconds(4, 2) == pytest.approx(21.0 + 2 * 1.3)


def test_rounds_are_recorded_by_tokens_and_drafts_by_rows():
    costs = CostProfile()
    costs.record(16, 3, 6.0, 20.0, asked=4)
    costs.record(4, 0, 0.0, 10.0)
    assert costs.forward.points() == pytest.approx({4: 10.0})
    assert costs.verify.points() == pytest.approx({16: 20.0})
    assert costs.draft.points() == pytest.approx({4: 2.0})


def test_catching_up_is_learnt_apart_from_drafting():
    costs = CostProfile({1: 1.0, 100: 2.0}, {4: 2.0})
    costs.record(16, 3, 16.0, 1.5, asked=4, backlog=50)
    assert costs.draft.points() == pytest.approx({4: 2.0})
    assert costs.catch_up_seconds(50) == pytest.approx(10.0)
    assert costs.catch_up_seconds(0) == 0.0


def test_a_frozen_profile_ignores_what_is_measured():
    costs = CostProfile({1: 10.0}, {1: 2.0}, frozen=True)
    costs.record(3, 2, 100.0, 100.0, asked=1)
    assert (costs.is_frozen, costs.forward.points(), costs.draft.points()) == (True, {1: 10.0}, {1: 2.0})


def test_a_file_gives_a_frozen_profile(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": {"1": 0.01, "16": 0.02}, "draft": {"1": 0.001}}))
    costs = CostProfile.read(path, "eagle3")
    assert costs.is_frozen
    assert costs.forward.points() == {1: 0.01, 16: 0.02}
    assert costs.draft.points() == {1: 0.001}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected {"),
        ("[]", "expected {"),
        ('{"forward": {"1": 0.1}}', "'draft'"),
        ('{"forward": {"1": 0.1}, "draft": 3}', "expected {"),
        ('{"forward": {"one": 0.1}, "draft": {"1": 0.1}}', "'one'"),
        ('{"forward": {"1": "slow"}, "draft": {"1": 0.1}}', "'slow'"),
        ('{"forward": {"1": null}, "draft": {"1": 0.1}}', "NoneType"),
        ('{"forward": {}, "draft": {"1": 0.1}}', "no points"),
        ('{"forward": {"0": 0.1}, "draft": {"1": 0.1}}', "positive"),
        ('{"forward": {"1": -0.1}, "draft": {"1": 0.1}}', "positive"),
        ('{"forward": {"1": NaN}, "draft": {"1": 0.1}}', "positive"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        CostProfile.read(path, "eagle3")
    assert message in str(refused.value)
    assert "cost_profile" in str(refused.value) and str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_profile_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cost_profile: no file .*gone\.json"):
        CostProfile.read(tmp_path / "gone.json", "eagle3")


def test_a_smaller_pass_with_drafts_than_any_measured_is_as_much_dearer_than_a_plain_one():
    costs = CostProfile({4: 10.0, 16: 20.0})
    costs.record(16, 3, 0.3, 24.0, asked=4)
    assert costs.round_seconds(1, 3, 4.0) == pytest.approx(1.2 * 10.0 + 3 * 0.1)


def test_plain_steps_are_not_forecast_from_passes_with_drafts():
    costs = CostProfile({32: 10.0})
    costs.record(32, 1, 0.1, 15.0, asked=16)
    assert costs.round_seconds(32, 0) == pytest.approx(10.0)


def write_drafters(path):
    drafters = {
        "ngram": {"draft": {"1": 0.001, "8": 0.001}, "verify": {"2": 0.02, "8": 0.05}, "prompt": {"fixed_s": 0.0}},
        "eagle3": {"draft": {"1": 0.004}, "verify": {"2": 0.03, "8": 0.06}},
    }
    path.write_text(json.dumps({"forward": {"1": 0.01, "2": 0.012}, "draft": {}, "drafters": drafters}))
    return path


def test_passes_with_drafts_have_a_curve_of_their_own_by_method(tmp_path):
    path = write_drafters(tmp_path / "costs.json")
    costs = CostProfile.read(path, "ngram")
    assert costs.round_seconds(2, 0) == pytest.approx(0.012)
    assert costs.round_seconds(2, 3) == pytest.approx(0.05 + 3 * 0.001)
    assert CostProfile.read(path, "eagle3").round_seconds(1, 1) == pytest.approx(0.03 + 0.004)
    assert CostProfile.read(path, "history+eagle3").draft.points() == {1: 0.004}


def test_a_drafter_that_was_not_calibrated_is_named(tmp_path):
    path = write_drafters(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match=r"drafter history\+mtp in .*, it has ngram, eagle3; .* --method mtp"):
        CostProfile.read(path, "history+mtp")


def test_a_file_by_hand_may_keep_passes_with_drafts_apart(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": {"1": 0.01}, "draft": {"1": 0.001}, "verify": {"2": 0.03}}))
    assert CostProfile.read(path, "mtp").round_seconds(1, 1) == pytest.approx(0.031)


def test_the_fixed_share_of_a_step_is_what_one_row_costs_beyond_its_own_part():
    costs = CostProfile({1: 10.0, 4: 11.5}, {1: 1.0})
    assert costs.fixed_share(4) == pytest.approx(9.5 / 11.5)


def test_a_pass_with_few_drafts_stands_for_few_rows():
    costs = CostProfile({8: 17.0}, {1: 1.0}, {2: 11.0})
    assert costs.fixed_share(8) == pytest.approx(9.0 / 17.0)


def test_where_few_rows_were_never_measured_half_of_a_step_is_taken_as_fixed():
    assert CostProfile({8: 17.0}, {1: 1.0}).fixed_share(8) == 0.5


def test_a_pass_with_drafts_is_never_forecast_to_be_quicker_than_a_plain_step():
    costs = CostProfile({1: 0.010, 8: 0.020}, {1: 0.001}, {2: 0.007})
    assert costs.round_seconds(1, 1) == pytest.approx(0.011)
