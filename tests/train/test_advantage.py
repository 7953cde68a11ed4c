from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from leadout.train.advantage import advantages, zero_std_share
from tests.train.learner_fakes import make_group


def groups_of(*rewards, masked=None):
    return [
        make_group(draw, [1], [[2]] * len(row), row, masked=None if masked is None else masked[draw])
        for draw, row in enumerate(rewards)
    ]


def test_group_advantages_follow_each_prompts_own_rewards():
    first, second = advantages(groups_of([1.0, 0.0], [1.0, 0.0]), "group")
    expected = 0.5 / (np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(first, [expected, -expected])
    np.testing.assert_allclose(second, [expected, -expected])


def test_without_scaling_advantages_are_centred_rewards():
    (got,) = advantages(groups_of([3.0, 0.0, 0.0]), "none")
    np.testing.assert_allclose(got, [2.0, -1.0, -1.0])


def test_batch_scaling_divides_by_the_deviation_of_all_rewards():
    first, second = advantages(groups_of([1.0, 0.0], [5.0, 1.0]), "batch")
    deviation = np.std([1.0, 0.0, 5.0, 1.0], ddof=1) + 1e-4
    np.testing.assert_allclose(first, np.array([0.5, -0.5]) / deviation)
    np.testing.assert_allclose(second, np.array([2.0, -2.0]) / deviation)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [1.0, 0.1, -0.3])
def test_advantages_are_exactly_zero_when_rewards_are_equal(scale, reward):
    (got,) = advantages(groups_of([reward] * 3), scale)
    assert got.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_single_rollout_has_no_advantage(scale):
    (got,) = advantages(groups_of([0.7]), scale)
    assert got.tolist() == [0.0]


def test_masked_rollouts_have_no_advantage_but_count_in_the_mean():
    (got,) = advantages(groups_of([1.0, 0.0, 0.0], masked=[[False, True, False]]), "none")
    np.testing.assert_allclose(got, [2 / 3, 0.0, -1 / 3])


def test_the_share_of_groups_without_signal_is_counted():
    assert zero_std_share(groups_of([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.2, 0.2])) == 0.75


def test_no_groups_have_no_share_and_no_advantages():
    assert zero_std_share([]) == 0.0
    assert advantages([], "batch") == []


def test_rollouts_that_no_function_judged_do_not_count_in_the_mean():
    group = groups_of([1.0, 0.0, 1.0, 0.0])[0]
    scores = tuple(
        score if score.reward else dataclasses.replace(score, parts={}, masked=True) for score in group.scores
    )
    (got,) = advantages([dataclasses.replace(group, scores=scores)], "group")
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert zero_std_share([dataclasses.replace(group, scores=scores)]) == 1.0
