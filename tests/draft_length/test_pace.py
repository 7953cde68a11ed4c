from __future__ import annotations

import numpy as np
import pytest

from leadout.draft_length.pace import Levels


def seconds(levels: Levels, kind: str, size: int) -> float:
    return float(levels.seconds(kind, [size])[0][0])


def test_a_first_measurement_is_taken_as_it_is():
    levels = Levels()
    levels.record("forward", 4, 0.25)
    assert (seconds(levels, "forward", 4), levels.pace) == (pytest.approx(0.25), 1.0)


def test_a_machine_that_slows_down_changes_the_pace_and_not_the_costs():
    levels = Levels()
    for slower in [1.0] * 20 + [1.8] * 30:
        levels.next_round()
        levels.record("forward", 4, 0.1 * slower)
    assert seconds(levels, "forward", 4) * levels.pace == pytest.approx(0.18, rel=0.01)
    assert seconds(levels, "forward", 4) == pytest.approx(0.1, rel=0.1)


def test_rounds_that_go_by_unasked_count_when_the_next_one_is_measured():
    asked, unasked = Levels(), Levels()
    for number in range(200):
        for levels in (asked, unasked):
            levels.next_round()
            if number < 20 or number > 190:
                levels.record("forward", 4, 0.1 if number < 20 else 0.15)
        asked.seconds("forward", [4])
    assert unasked.pace == pytest.approx(asked.pace, rel=1e-12)
    weights = (levels.seconds("forward", [4])[1][0] for levels in (asked, unasked))
    assert next(weights) == pytest.approx(next(weights), rel=1e-9)
    assert unasked.pace > 1.3


def test_sizes_measured_at_different_paces_keep_their_ratio():
    levels = Levels()
    for slower in [1.0] * 30 + [2.0] * 30:
        levels.next_round()
        levels.record("forward", 4, 0.1 * slower)
    levels.next_round()
    levels.record("verify", 16, 2.0 * 0.15)
    assert seconds(levels, "verify", 16) / seconds(levels, "forward", 4) == pytest.approx(1.5, rel=0.02)


def test_a_size_that_rests_keeps_its_ratio_while_the_machine_slows_down():
    levels = Levels()
    for slower in np.repeat([1.0, 1.3, 1.7, 2.2], 25):
        levels.next_round()
        levels.record("forward", 4, 0.1 * slower)
        if slower == 1.0:
            levels.record("verify", 16, 0.15)
    assert seconds(levels, "verify", 16) / seconds(levels, "forward", 4) == pytest.approx(1.5, rel=0.12)


def test_one_late_round_moves_a_cost_by_little():
    levels = Levels()
    for late in [1.0] * 20 + [50.0]:
        levels.next_round()
        levels.record("forward", 4, 0.1 * late)
    assert seconds(levels, "forward", 4) == pytest.approx(0.1, rel=0.02)


def test_a_first_round_that_pays_for_setting_up_is_forgotten():
    levels = Levels()
    for setting_up in [10.0] + [1.0] * 40:
        levels.next_round()
        levels.record("forward", 4, 0.1 * setting_up)
    levels.record("verify", 16, 0.15)
    assert seconds(levels, "verify", 16) / seconds(levels, "forward", 4) == pytest.approx(1.5, rel=0.05)


def test_a_size_that_was_slow_at_first_beside_known_ones_is_put_right_by_its_second_measurement():
    levels = Levels()
    for _ in range(30):
        levels.next_round()
        levels.record("forward", 4, 0.1)
    for slow in (10.0, 1.0, 1.0):
        levels.next_round()
        levels.record("verify", 16, 0.15 * slow)
    assert seconds(levels, "verify", 16) / seconds(levels, "forward", 4) == pytest.approx(1.5, rel=0.15)


def test_a_size_measured_often_weighs_more_than_one_measured_once():
    levels = Levels()
    for _ in range(1000):
        levels.next_round()
        levels.record("forward", 64, 0.1)
    levels.record("forward", 57, 0.3)
    often, once = levels.seconds("forward", [64, 57])[1]
    assert often > 20 * once


def test_a_cost_that_has_changed_for_good_is_learnt_beside_one_that_has_not():
    levels = Levels()
    for dearer in [1.0] * 50 + [1.2] * 600:
        levels.next_round()
        levels.record("forward", 4, 0.1)
        levels.next_round()
        levels.record("verify", 16, 0.15 * dearer)
    assert seconds(levels, "verify", 16) / seconds(levels, "forward", 4) == pytest.approx(1.8, rel=0.02)


@pytest.mark.parametrize(("moments", "believed"), [(1, False), (8, True)])
def test_what_a_size_cost_in_one_moment_only_is_in_doubt_however_often_it_was_measured(moments, believed):
    levels = Levels()
    rounds = {8 * (1 + 2 * moment) + i for moment in range(moments) for i in range(8 // moments)}
    for now in range(max(rounds) + 40):
        levels.next_round()
        levels.record(*(("verify", 16, 0.15) if now in rounds else ("forward", 4, 0.1)))
    ratio = levels.least([("verify", 16)], ("forward", 4), 2.0) / seconds(levels, "forward", 4)
    assert (ratio > 1.5 * 0.7) == believed


def test_a_pass_costs_no_less_than_a_smaller_one_that_is_well_known():
    levels = Levels()
    for _ in range(100):
        levels.next_round()
        levels.record("verify", 8, 0.1)
    levels.record("verify", 16, 0.4)
    assert levels.least([("verify", 8), ("verify", 16)], ("verify", 8), 2.0) == pytest.approx(0.1, rel=0.01)
