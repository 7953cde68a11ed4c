from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.draft_length.controller import GoodputLength
from leadout.draft_length.costs import CostProfile
from leadout.draft_length.exploring import worth_exploring

TOKENS_K = np.array([1.0, 1.7])
VERIFIED_K = np.array([1.0, 2.0])


def costs(moments: int, pass_seconds: float = 18.0) -> CostProfile:
    """Eight rows: a plain step takes 10 s; drafts were verified in so many moments, long ago, and came out dear."""
    profile = CostProfile()
    for _ in range(moments):
        for _ in range(10):
            profile.record(8, 0, 0.0, 10.0)
        for _ in range(4):
            profile.record(16, 1, 0.2, pass_seconds, asked=8)
    for number in range(800):
        profile.record(7 if number % 100 == 0 else 8, 0, 0.0, 10.0)
    return profile


def looking(rounds: int = 0) -> GoodputLength:
    """A draft length `rounds` into its second look at resting drafts, which take 18 s for 1.8 tokens."""
    length = GoodputLength(1, costs(moments=8))
    for _ in range(10):
        length.acceptance.record(np.ones(8, np.int64), np.array([1, 1, 1, 1, 1, 1, 1, 0]), 1)
    length._since_look = 2000
    length._probing.rounds_off = 0
    length._decided = (8, 32)
    for _ in range(rounds):
        assert length.choose(8).num_drafts == 1
    return length


@pytest.mark.parametrize("rows", [8, 7])
def test_a_second_look_goes_on_for_its_rounds_though_rows_end(rows):
    length = looking(rounds=1)
    for _ in range(7):
        assert length._before == 0
        assert length.choose(rows).num_drafts == 1
    length.choose(rows)
    assert length._before is None


def test_a_second_look_survives_a_checkpoint():
    length = looking(rounds=3)
    other = GoodputLength(1, costs(moments=8))
    other.load_state_dict(json.loads(json.dumps(length.state_dict())))
    assert [other.choose(8).num_drafts for _ in range(7)] == [1] * 5 + [0] * 2


def explored(profile: CostProfile, since_look: int, current: int = 0, catch_up: float = 3.0) -> tuple[int, int]:
    seconds_K = np.array([profile.round_seconds(8, 0), 1.02 * profile.round_seconds(8, 1)])
    return worth_exploring(profile, 8, current, since_look, TOKENS_K, VERIFIED_K, seconds_K, catch_up)


def test_a_second_look_at_resting_drafts_lasts_eight_rounds():
    assert explored(costs(moments=8), since_look=800) == (1, 8)


def test_a_second_look_at_a_size_of_one_moment_lasts_one_round():
    assert explored(costs(moments=1), since_look=800) == (1, 1)


@pytest.mark.parametrize(("catch_up", "rounds"), [(3.0, 388), (30.0, 1063)])
def test_a_second_look_waits_until_all_it_loses_is_a_small_share_of_the_time(catch_up, rounds):
    profile = costs(moments=8)
    assert explored(profile, rounds - 1, catch_up=catch_up) == (0, 1)
    assert explored(profile, rounds + 1, catch_up=catch_up) == (1, 8)


def test_drafts_that_could_not_pay_however_wrong_their_cost_is_are_left_alone():
    assert explored(costs(moments=8, pass_seconds=40.0), since_look=100_000) == (0, 1)
