from __future__ import annotations

import re

import pytest

from leadout.data.tasks import make_task
from leadout.errors import ConfigError

QUESTION = re.compile(r"What is (\d+) ([+-]) (\d+)\? Answer with the number only\.")


def test_arithmetic_asks_for_one_sum_or_difference_and_knows_it() -> None:
    signs = set()
    for row in make_task("arithmetic", {}).rows(200, seed=1):
        found = QUESTION.fullmatch(str(row["prompt"]))
        assert found is not None
        left, sign, right = int(found[1]), found[2], int(found[3])
        assert row["answer"] == str(left + right if sign == "+" else left - right)
        assert max(left, right) <= 9
        signs.add(sign)
    assert signs == {"+", "-"}


def test_arithmetic_rows_follow_the_seed() -> None:
    task = make_task("arithmetic", {})
    assert task.rows(20, seed=5) == task.rows(20, seed=5)
    assert task.rows(20, seed=5) != task.rows(20, seed=6)


def test_neighbouring_seeds_do_not_share_rows_in_another_place() -> None:
    task = make_task("arithmetic", {"min_digits": 4, "max_digits": 4})
    first = {row["prompt"] for row in task.rows(200, seed=0)}
    second = {row["prompt"] for row in task.rows(200, seed=1)}
    assert len(first & second) <= 2


def test_operands_have_the_digits_asked_for() -> None:
    for row in make_task("arithmetic", {"min_digits": 3, "max_digits": 3, "num_terms": 3}).rows(50, seed=0):
        operands = re.findall(r"\d+", str(row["prompt"]))
        assert [len(operand) for operand in operands] == [3, 3, 3]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("42", 1.0),
        (" 42.\n", 1.0),
        ("12 + 30 = 42", 1.0),
        ("-42", 0.0),
        ("142", 0.0),
        ("42 or 43", 0.0),
        ("forty-two", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_judges_the_last_number_of_a_completion(completion: str, reward: float) -> None:
    assert make_task("arithmetic", {}).reward(completion, {"prompt": "", "answer": "42"}) == reward


def test_a_reasoning_gym_data_set_is_judged_by_its_own_scorer() -> None:
    task = make_task("reasoning_gym:spell_backward", {"min_word_len": 4})
    (row,) = task.rows(1, seed=0)
    assert task.name == "reasoning_gym:spell_backward"
    assert task.reward(f" {row['answer']} ", row) == 1.0
    assert task.reward("", row) == 0.0


def test_every_answer_of_its_own_is_right_for_a_reasoning_gym_data_set() -> None:
    task = make_task("reasoning_gym:basic_arithmetic", {})
    rows = task.rows(20, seed=0)
    assert [task.reward(str(row["answer"]), row) for row in rows] == [1.0] * 20


def test_an_answer_that_the_scorer_cannot_read_earns_nothing() -> None:
    task = make_task("reasoning_gym:countdown", {})
    (row,) = task.rows(1, seed=0)
    assert task.reward("((((", row) <= 0.05


def test_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected task arithmetic or reasoning_gym:NAME, got 'sums'"):
        make_task("sums", {})


def test_an_unknown_reasoning_gym_data_set_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: reasoning_gym:spell_backward"):
        make_task("reasoning_gym:spell_backwards", {})


@pytest.mark.parametrize("args", [{"digits": 3}, {"max_digits": 0}, {"num_terms": 1}])
def test_arguments_that_a_task_does_not_take_are_refused(args: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="task arithmetic"):
        make_task("arithmetic", args)


def test_arguments_that_a_reasoning_gym_data_set_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use task_args"):
        make_task("reasoning_gym:chain_sum", {"colour": "red"})
