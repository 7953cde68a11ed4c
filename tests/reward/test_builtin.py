from __future__ import annotations

import numpy as np
import pytest

from leadout.data.tasks import make_task
from leadout.errors import DataError
from leadout.reward.builtin import SoftOverlong, TaskReward, exact, number
from leadout.reward.completion import Completion
from tests.reward.rollouts import make_completion, make_prompt


def test_exact_wants_the_answer_and_nothing_else() -> None:
    texts = ["42", " 42\n", "42.", "The answer is 42", ""]
    assert exact([make_completion(text) for text in texts]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "12 + 30 = 42.", 1.0),
        ("42", "42 apples, then 43", 0.0),
        ("42", "42.0", 1.0),
        ("-4", "5 - 9 = -4", 1.0),
        ("-4", "5 - 9 = 4", 0.0),
        ("1,234", "$1,234", 1.0),
        ("$5", "costs 5 dollars", 1.0),
        ("42", "no idea", 0.0),
        ("\u22124", "5 - 9 = \u22124", 1.0),
        ("1 000", "it is 1 000", 1.0),
        ("0.5", ".5", 1.0),
    ],
)
def test_number_compares_the_last_number_by_value(answer: str, text: str, reward: float) -> None:
    assert number([make_completion(text, make_prompt(answer))]) == [reward]


def test_number_refuses_a_ground_truth_that_is_none() -> None:
    for answer in ("\\frac{1}{2}", "nan", "Infinity"):
        with pytest.raises(DataError, match="needs a number as ground truth"):
            number([make_completion("1", make_prompt(answer))])


@pytest.mark.parametrize("function", [exact, number])
def test_functions_that_compare_need_a_ground_truth(function: object) -> None:
    assert callable(function)
    with pytest.raises(DataError, match=r"needs a ground truth, x/0 has none; set data\.train\.answer_key"):
        function([make_completion("1", make_prompt(None))])


def test_the_tasks_own_judgement_is_asked() -> None:
    rewards = TaskReward(make_task("arithmetic", {}))([make_completion("is 42"), make_completion("41")])
    assert rewards == [1.0, 0.0]


def of_length(length: int) -> Completion:
    return Completion(prompt=make_prompt(), text="", token_ids=np.zeros(length, np.int32), version=0)


@pytest.mark.parametrize(("length", "reward"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)])
def test_long_completions_are_punished_along_a_straight_line(length: int, reward: float) -> None:
    assert SoftOverlong(max_length=100)([of_length(length)]) == [pytest.approx(reward)]


def test_the_punishment_is_defined_for_the_shortest_possible_limit() -> None:
    assert SoftOverlong(max_length=1)([of_length(0), of_length(1)]) == [0.0, -1.0]
