from __future__ import annotations

from collections.abc import Sequence

import pytest

from leadout.data.tasks import make_task
from leadout.errors import ConfigError
from leadout.records import Finish
from leadout.reward.builtin import exact, number
from leadout.reward.completion import Completion, RewardTerm
from leadout.reward.scorer import RewardScorer, make_terms
from tests.reward.rollouts import CODEC, make_rollout

EXACT = RewardTerm(name="exact", function=exact)


def unscorable(completions: Sequence[Completion]) -> list[float | None]:
    return [None for _ in completions]


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"reward function exact: expected a finite weight, got {weight}"):
        make_terms([("exact", weight)], task=None, max_completion_length=10)


def test_text_is_decoded_and_cut_before_the_stop_string() -> None:
    rollout = make_rollout("42\nQ: more", finish=Finish.STOP, stop="\nQ:")
    (score,) = RewardScorer(CODEC, [EXACT]).score([rollout])
    assert score.text == "42"
    assert score.reward == 1.0


def test_text_is_not_cut_when_something_else_ended_the_rollout() -> None:
    (score,) = RewardScorer(CODEC, [EXACT]).score([make_rollout("a\nQ: b", finish=Finish.LENGTH)])
    assert score.text == "a\nQ: b"


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    terms = [
        RewardTerm(name="exact", function=exact, weight=0.5),
        RewardTerm(name="number", function=number, weight=2.0),
    ]
    scores = RewardScorer(CODEC, terms).score([make_rollout("42"), make_rollout("is 42"), make_rollout("no")])
    assert [score.reward for score in scores] == [2.5, 2.0, 0.0]
    assert scores[1].parts == {"exact": 0.0, "number": 1.0}


def test_a_part_that_cannot_be_scored_is_left_out() -> None:
    terms = [EXACT, RewardTerm(name="other", function=unscorable)]
    (score,) = RewardScorer(CODEC, terms).score([make_rollout("42")])
    assert score.parts == {"exact": 1.0}
    assert not score.masked


def test_a_rollout_that_nothing_can_score_is_masked() -> None:
    (score,) = RewardScorer(CODEC, [RewardTerm(name="other", function=unscorable)]).score([make_rollout("42")])
    assert score.masked
    assert score.reward == 0.0


@pytest.mark.parametrize(
    ("finish", "masked"), [(Finish.LENGTH, True), (Finish.CONTEXT, True), (Finish.EOS, False), (Finish.STOP, False)]
)
def test_truncated_completions_are_masked_on_demand(finish: Finish, masked: bool) -> None:
    rollout = make_rollout("42", finish=finish)
    assert RewardScorer(CODEC, [EXACT], mask_truncated_completions=True).score([rollout])[0].masked is masked
    assert RewardScorer(CODEC, [EXACT]).score([rollout])[0].masked is False


def test_empty_completions_are_scored() -> None:
    (score,) = RewardScorer(CODEC, [EXACT]).score([make_rollout("", finish=Finish.CONTEXT)])
    assert (score.reward, score.text) == (0.0, "")


def test_no_rollouts_give_no_scores() -> None:
    assert RewardScorer(CODEC, [EXACT]).score([]) == []


def test_terms_follow_the_recipe() -> None:
    terms = make_terms([("task", 1.0), ("length", 0.1)], task=make_task("arithmetic", {}), max_completion_length=10)
    (score,) = RewardScorer(CODEC, terms).score([make_rollout("is 42 yes!")])
    assert score.parts == {"task": 1.0, "length": -1.0}
    assert score.reward == pytest.approx(0.9)


def test_the_reward_task_without_a_task_names_the_alternatives() -> None:
    with pytest.raises(ConfigError, match="use exact, number or math"):
        make_terms([("task", 1.0)], task=None, max_completion_length=10)


def test_a_function_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="every reward function once"):
        make_terms([("exact", 1.0), ("exact", 2.0)], task=None, max_completion_length=10)


def test_a_recipe_without_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least one reward function"):
        make_terms([], task=None, max_completion_length=10)
