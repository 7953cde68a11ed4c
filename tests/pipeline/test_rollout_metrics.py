import math
from dataclasses import replace

import numpy as np
import pytest

from leadout.pipeline.rollout_metrics import (
    acceptance_by_age,
    acceptance_by_position,
    committed_per_round,
    completion_metrics,
    lag_metrics,
    reward_metrics,
    speculation_metrics,
)
from leadout.records import Finish
from tests.fakes import EOS, make_group, make_rollout


def test_a_round_commits_its_accepted_drafts_and_one_more():
    # prefill 5 | 6 7 + correction 8 | bonus round: 9 10 11 + 2
    rollout = make_rollout(tokens=(5, 6, 7, 8, 9, 10, 11, EOS), drafted=(3, 3), accepted=(2, 3))
    assert committed_per_round(rollout).tolist() == [3, 4]


def test_an_accepted_end_of_sequence_cuts_the_last_round():
    # prefill 5 | accepted 6 and EOS, the third draft lies behind the end, no bonus
    rollout = make_rollout(tokens=(5, 6, EOS), drafted=(3,), accepted=(2,))
    assert committed_per_round(rollout).tolist() == [2]


def test_acceptance_of_a_four_token_answer_is_hand_computed():
    # prefill | 1 accepted + correction | EOS accepted: 3 tokens in 2 drafted rounds
    metrics = speculation_metrics([make_rollout(tokens=(5, 6, 7, EOS), drafted=(3, 3), accepted=(1, 1))])
    assert metrics["spec/acceptance_length"] == 1.5
    assert metrics["spec/accepted_per_draft"] == 2.0
    assert metrics["spec/acceptance_rate"] == pytest.approx(2 / 6)
    assert acceptance_by_position(metrics) == [1.0, 0.0, 0.0]
    assert metrics["spec/num_drafts"] == 2
    assert metrics["spec/num_draft_tokens"] == 6
    assert metrics["spec/num_accepted_tokens"] == 2


def test_plain_rounds_count_as_off_and_not_into_acceptance():
    # prefill | plain | 2 drafted, 1 accepted | plain | plain
    rollout = make_rollout(tokens=(5, 6, 7, 8, 9, EOS), drafted=(0, 2, 0, 0), accepted=(0, 1, 0, 0))
    metrics = speculation_metrics([rollout])
    assert metrics["spec/rounds"] == 4
    assert metrics["spec/off_share"] == 0.75
    assert metrics["spec/k_mean"] == 0.5
    assert metrics["spec/acceptance_length"] == 2.0


def test_acceptance_is_pooled_over_rows_and_not_averaged_per_row():
    long = make_rollout(tokens=(5, 6, 7, 8, EOS), drafted=(1, 1, 1, 1), accepted=(0, 0, 0, 0))
    short = make_rollout(sibling=1, tokens=(5, 6, EOS), drafted=(1,), accepted=(1,))
    # 4 rounds of 1 token and 1 round of 2: 6 / 5, where the mean of the rows would be 1.5
    assert speculation_metrics([long, short])["spec/acceptance_length"] == 1.2


def test_a_position_is_divided_by_the_rounds_that_drafted_that_far():
    # drafts 1, 2, 3 with 1, 2, 1 accepted; tokens 1 + 2 + 3 + 2
    rollout = make_rollout(tokens=(5, 6, 7, 8, 9, 10, 11, EOS), drafted=(1, 2, 3), accepted=(1, 2, 1))
    assert acceptance_by_position(speculation_metrics([rollout])) == [1.0, 0.5, 0.0]


def test_all_plain_has_no_acceptance_at_all():
    metrics = speculation_metrics([make_rollout(tokens=(5, 6, EOS), drafted=(0, 0), accepted=(0, 0))])
    assert metrics == {
        "spec/rounds": 2,
        "spec/off_share": 1.0,
        "spec/k_mean": 0.0,
        "spec/num_drafts": 0,
        "spec/num_draft_tokens": 0,
        "spec/num_accepted_tokens": 0,
        "spec/k_share_0": 1.0,
    }


def test_the_shares_of_draft_lengths_are_a_histogram_of_row_rounds():
    rollout = make_rollout(tokens=(5, 6, 7, 8, 9, EOS), drafted=(0, 3, 1, 0), accepted=(0, 1, 0, 0))
    metrics = speculation_metrics([rollout])
    assert [metrics[f"spec/k_share_{k}"] for k in range(4)] == [0.5, 0.25, 0.0, 0.25]


def test_rollouts_that_end_with_the_prefill_token_have_no_rounds():
    assert speculation_metrics([make_rollout(tokens=(EOS,)), make_rollout(sibling=1, tokens=())]) == {}


def test_rounds_with_more_tokens_than_the_rollout_are_our_mistake():
    with pytest.raises(AssertionError, match="hold more than its tokens"):
        committed_per_round(make_rollout(tokens=(5, EOS), drafted=(3,), accepted=(3,)))


def test_rewards_are_averaged_over_rollouts_and_spread_within_groups():
    groups = [
        make_group([make_rollout(0, 0), make_rollout(0, 1)], [1.0, 0.0]),
        make_group([make_rollout(1, 0), make_rollout(1, 1)], [1.0, 1.0]),
    ]
    metrics = reward_metrics(groups)
    assert metrics["reward"] == 0.75
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/task/mean"] == 0.75
    assert metrics["rewards/task/std"] == pytest.approx(0.5)


def test_equal_rewards_have_exactly_zero_spread():
    groups = [make_group([make_rollout(0, i) for i in range(3)], [0.1, 0.1, 0.1])]
    metrics = reward_metrics(groups)
    assert (metrics["reward_std"], metrics["frac_reward_zero_std"]) == (0.0, 1.0)


def test_a_group_of_one_has_zero_spread():
    metrics = reward_metrics([make_group([make_rollout()], [0.7])])
    assert (metrics["reward_std"], metrics["rewards/task/std"]) == (0.0, 0.0)


def test_lengths_and_shares_are_hand_computed():
    group = make_group(
        [
            make_rollout(0, 0, tokens=(5, 6, 7, EOS)),
            make_rollout(0, 1, tokens=(5, 6, 7, 8, 9, 10), finish=Finish.LENGTH),
            make_rollout(0, 2, tokens=(), finish=Finish.ERROR),
            make_rollout(0, 3, tokens=(5, 6)),
        ],
        [1.0, 0.0, 0.0, 0.0],
        masked=[False, True, False, False],
    )
    assert completion_metrics([group]) == {
        "completions/mean_length": 3.0,
        "completions/min_length": 0.0,
        "completions/max_length": 6.0,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 0.0,
        "completions/max_terminated_length": 4.0,
        "completions/clipped_ratio": 0.25,
        "completions/empty_ratio": 0.25,
        "completions/masked_ratio": 0.25,
        "completions/failed_ratio": 0.25,
        "tokens/prompt": 3.0,
        "tokens/completion": 12.0,
    }


def test_a_step_whose_rollouts_are_all_clipped_and_masked_has_finite_metrics():
    rollouts = [make_rollout(0, i, tokens=(5, 6), finish=Finish.LENGTH) for i in range(2)]
    metrics = completion_metrics([make_group(rollouts, [0.0, 0.0], masked=[True, True])])
    assert metrics["completions/masked_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_all_completions_empty_is_counted_and_finite():
    group = make_group([make_rollout(0, i, tokens=(), finish=Finish.ERROR) for i in range(2)], [0.0, 0.0])
    assert completion_metrics([group])["completions/empty_ratio"] == 1.0
    assert lag_metrics(group.rollouts, version=3) == {}


def test_lag_is_averaged_over_tokens():
    rollouts = [make_rollout(tokens=(5, 6, EOS), version=4), make_rollout(sibling=1, tokens=(5,), version=2)]
    assert lag_metrics(rollouts, version=5) == {"lag/mean": 1.5, "lag/max": 3.0}


def test_no_groups_give_no_metrics():
    assert (reward_metrics([]), completion_metrics([]), speculation_metrics([])) == ({}, {}, {})


def test_acceptance_by_age_pools_versions_by_powers_of_two():
    rollouts = [
        make_rollout(sibling=i, tokens=(5, 6, 7, EOS), drafted=(2, 2), accepted=(accepted, 0), version=version)
        for i, (version, accepted) in enumerate([(3, 2), (4, 1), (5, 1), (6, 0), (10, 1), (1, 0)])
    ]
    assert acceptance_by_age(rollouts, learnt_version=3) == {
        "spec/acceptance_rate_age_0": 2 / 8,
        "spec/acceptance_rate_age_1": 1 / 4,
        "spec/acceptance_rate_age_2": 1 / 8,
        "spec/acceptance_rate_age_4": 1 / 4,
    }


def test_looked_up_drafts_are_counted_apart_and_have_no_age():
    rollout = make_rollout(tokens=(5, 6, 7, 8, 9, EOS), drafted=(2, 2, 1), accepted=(2, 0, 0), version=4)
    rounds = replace(rollout.rounds, looked_up=np.array([True, False, False]))
    metrics = speculation_metrics([replace(rollout, rounds=rounds)])
    assert (metrics["spec/num_looked_up_tokens"], metrics["spec/num_accepted_looked_up_tokens"]) == (2.0, 2.0)
    assert (metrics["spec/num_draft_tokens"], metrics["spec/num_accepted_tokens"]) == (5.0, 2.0)
    assert acceptance_by_age([replace(rollout, rounds=rounds)], learnt_version=4) == {"spec/acceptance_rate_age_0": 0.0}


def test_rollouts_without_drafts_have_no_age():
    assert acceptance_by_age([make_rollout()], learnt_version=0) == {}
