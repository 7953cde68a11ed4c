from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from leadout.errors import ConfigError, DataError
from leadout.reward.user import load_user_function
from tests.reward.rollouts import make_completion, make_prompt

HERE = "tests.reward.test_user"
MESSAGES = ({"role": "user", "content": "hi"},)


def trl_length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def trl_everything(
    prompts: list[object],
    completions: list[object],
    completion_ids: list[list[int]],
    trainer_state: object,
    level: list[str],
) -> list[float | None]:
    seen = (prompts, completions, completion_ids, trainer_state.global_step, level)  # type: ignore[attr-defined]
    assert seen == (["q", "q"], ["ab", "c"], [[64, 65], [66]], 7, ["easy", "hard"]), seen
    return [1.0, None]


def trl_messages(prompts: list[object], completions: list[list[dict[str, str]]]) -> list[float]:
    assert prompts == [[{"role": "user", "content": "hi"}]]
    return [float(completions[0] == [{"role": "assistant", "content": "ok"}])]


async def trl_async(completions: list[str], **columns: object) -> list[float]:
    return [0.5 for _ in completions]


def trl_short(completions: list[str]) -> list[float]:
    return [1.0]


def trl_missing_column(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def trl_nan(completions: list[str]) -> list[float]:
    return [float("nan") for _ in completions]


def trl_text(completions: list[str]) -> list[str]:
    return ["good" for _ in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return float(solution_str == ground_truth)


def verl_dict(solution_str: str, ground_truth: str, **kwargs: object) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "acc": 1.0}


def verl_no_score(solution_str: str) -> dict[str, float]:
    return {"acc": 1.0}


def verl_demanding(solution_str: str, tokenizer: object) -> float:
    return 0.0


def neither(text: str) -> float:
    return 0.0


def test_a_function_with_trls_signature_gets_all_completions_at_once() -> None:
    assert load_user_function(f"{HERE}:trl_length")([make_completion("ab"), make_completion("")]) == [2.0, 0.0]


def test_a_trl_function_gets_what_it_names_and_may_pass_on_a_completion() -> None:
    pair = [
        make_completion("ab", make_prompt(columns={"level": "easy"}), version=6),
        make_completion("c", make_prompt(columns={"level": "hard"}), version=7),
    ]
    assert load_user_function(f"{HERE}:trl_everything")(pair) == [1.0, None]


def test_a_trl_function_gets_messages_when_the_prompts_are_messages() -> None:
    assert load_user_function(f"{HERE}:trl_messages")([make_completion("ok", make_prompt(messages=MESSAGES))]) == [1.0]


def test_a_trl_function_may_be_async() -> None:
    assert load_user_function(f"{HERE}:trl_async")([make_completion("ab")]) == [0.5]


def test_a_wrong_number_of_rewards_is_refused() -> None:
    with pytest.raises(DataError, match="expected a list of 2 rewards, got 1"):
        load_user_function(f"{HERE}:trl_short")([make_completion("a"), make_completion("b")])


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match="no column 'solution' in the data"):
        load_user_function(f"{HERE}:trl_missing_column")([make_completion("a")])


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match="expected finite numbers, got nan"):
        load_user_function(f"{HERE}:trl_nan")([make_completion("a")])


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match="expected numbers or None, got 'good'"):
        load_user_function(f"{HERE}:trl_text")([make_completion("a")])


def test_a_function_with_verls_signature_gets_one_completion_at_a_time() -> None:
    prompt = make_prompt("42", {"data_source": "sums", "extra_info": {"split": "train"}})
    function = load_user_function(f"{HERE}:compute_score")
    assert function([make_completion("42", prompt), make_completion("41", prompt)]) == [1.0, 0.0]


def test_a_verl_function_may_return_a_dict_with_a_score() -> None:
    assert load_user_function(f"{HERE}:verl_dict")([make_completion("42")]) == [1.0]


def test_a_verl_dict_without_a_score_is_refused() -> None:
    with pytest.raises(DataError, match="expected a key 'score', got acc"):
        load_user_function(f"{HERE}:verl_no_score")([make_completion("42")])


def test_a_verl_function_that_demands_more_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer is not offered"):
        load_user_function(f"{HERE}:verl_demanding")


def test_a_signature_of_neither_kind_names_both() -> None:
    with pytest.raises(ConfigError, match=r"expected parameters like \(prompts, completions.*got \(text\)"):
        load_user_function(f"{HERE}:neither")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", "expected task, exact, number, math, length or package.module:function"),
        ("no_such_module:f", "no module no_such_module here"),
        (f"{HERE}:gone", "has no function gone"),
        (f"{HERE}:MESSAGES", "has no function MESSAGES"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_user_function(name)


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_of_a_test.py").write_text("def one(completions):\n    return [1.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert load_user_function("own_rewards_of_a_test:one")([make_completion("a")]) == [1.0]


def test_a_module_that_needs_a_missing_package_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_rewards_of_a_test.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with pytest.raises(ConfigError, match="its module needs a_package_nobody_has, which is not installed"):
        load_user_function("needy_rewards_of_a_test:one")


def trl_raising(completions: list[str]) -> list[float]:
    return [1 / 0 for _ in completions]


def trl_exiting(completions: list[str]) -> list[float]:
    raise SystemExit(0)


def trl_plain_text(completions: list[str]) -> str:
    return "ok"


def trl_array(completions: list[str]) -> object:
    return np.ones(len(completions))


def trl_inner_arrays(completions: list[str]) -> list[object]:
    return [np.ones(3) for _ in completions]


def trl_numerals(completions: list[str]) -> list[str]:
    return ["1.0" for _ in completions]


def verl_infinite(solution_str: str) -> float:
    return float("-inf")


def verl_raising(solution_str: str) -> float:
    raise KeyError("truth\nmore")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "trl_raising",
            r"raised ZeroDivisionError: division by zero \(.*test_user\.py line \d+\); expected a list of 2",
        ),
        ("trl_exiting", r"raised SystemExit: 0 \(.*test_user\.py line \d+\); expected a list of 2 numbers or None"),
        ("trl_plain_text", "expected a list of 2 rewards, got str; return one number"),
        ("trl_array", "expected a list of 2 rewards, got ndarray; return one number"),
        ("trl_inner_arrays", r"expected numbers or None, got array\(\[1\., 1\., 1\.\]\); return a number"),
        ("trl_numerals", "expected numbers or None, got '1.0'; return a number"),
        ("verl_infinite", "expected finite numbers, got -inf; return None to pass"),
        ("verl_raising", r"raised KeyError: .*truth.*; expected a number, or a dict with a number under 'score'"),
    ],
)
def test_what_a_function_does_wrong_is_told_in_one_line(function: str, message: str) -> None:
    with pytest.raises(DataError, match=f"reward function {HERE}:{function}.*{message}") as caught:
        load_user_function(f"{HERE}:{function}")([make_completion("a"), make_completion("b")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("syntax", "def one(:\n", r"raised SyntaxError: .*broken_syntax\.py line 1\); mend the module"),
        ("names", "from math import nothing\n", r"raised ImportError: .*broken_names\.py line 1\); mend the module"),
        ("raising", "\nraise OSError('no file')\n", r"raised OSError: no file \(.*broken_raising\.py line 2\); mend"),
        ("exiting", "import sys\nsys.exit(0)\n", r"raised SystemExit: 0 \(.*broken_exiting\.py line 2\); mend"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, message: str
) -> None:
    (tmp_path / f"broken_{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with pytest.raises(ConfigError, match=f"importing broken_{name} {message}") as caught:
        load_user_function(f"broken_{name}:one")
    assert "\n" not in str(caught.value)
