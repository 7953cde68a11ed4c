from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from leadout.errors import LeadoutError
from leadout.reward.math_judge import MathReward
from leadout.reward.math_worker import judge
from tests.reward.rollouts import make_completion, make_prompt

REAL_DATA = os.environ.get("LEADOUT_DATA")


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    reward = MathReward()
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("\\frac{1}{2}", "so the result is $0.5$", 1.0),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", 1.0),
        ("204", "The final answer is $\\boxed{204}$.", 1.0),
        ("204", "The final answer is $\\boxed{205}$.", 0.0),
        ("204", "", 0.0),
        ("x^2 + 1", "$1 + x^2$", 1.0),
    ],
)
def test_mathematically_equal_answers_are_right(answer: str, text: str, reward: float) -> None:
    assert judge(answer, text) == reward


def test_completions_are_judged_in_a_child_process(math: MathReward) -> None:
    prompt = make_prompt("\\frac{1}{2}")
    assert math([make_completion("$0.5$", prompt), make_completion("$0.25$", prompt)]) == [1.0, 0.0]


def test_worker_threads_may_judge(math: MathReward) -> None:
    def score(text: str) -> list[float | None]:
        assert threading.current_thread() is not threading.main_thread()
        return math([make_completion(text, make_prompt("7"))])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(score, ["$7$", "$8$"] * 4)) == [[1.0], [0.0]] * 4


CHILD = """import json, sys, time
for line in sys.stdin:
    answer, text = json.loads(line)
    {body}
    print(1.0)
"""


def child(body: str) -> list[str]:
    return [sys.executable, "-u", "-c", CHILD.format(body=body)]


def test_a_completion_that_takes_too_long_earns_nothing_and_the_next_is_judged() -> None:
    reward = MathReward(seconds=1.0, command=child("text == 'slow' and time.sleep(1000)"))
    assert reward([make_completion(text) for text in ("quick", "slow", "quick")]) == [1.0, 0.0, 1.0]
    reward.close()


def test_a_child_that_dies_is_reported() -> None:
    reward = MathReward(command=child("text == 'bad' and sys.exit(3)"))
    with pytest.raises(LeadoutError, match="died on 'bad'"):
        reward([make_completion("bad")])
    reward.close()


@pytest.mark.skipif(REAL_DATA is None, reason="LEADOUT_DATA is unset: no folder with real data sets")
def test_reference_solutions_of_real_problems_are_right(math: MathReward) -> None:
    lines = (Path(str(REAL_DATA)) / "math_500.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    rows = [json.loads(line) for line in lines]
    rewards = math([make_completion(row["solution"], make_prompt(row["answer"])) for row in rows])
    assert sum(reward or 0.0 for reward in rewards) >= 38
