from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.data.prompts import PromptFormat, final_answer, make_prompt, make_prompts
from leadout.data.rows import Row, read_rows
from leadout.errors import ConfigError, DataError
from tests.codecs import byte_codec

REAL_DATA = os.environ.get("LEADOUT_DATA")
TEMPLATED = byte_codec()
PLAIN = byte_codec(template=None)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]


def row(**columns: object) -> Row:
    return Row(id="x/0", where="x.jsonl line 1", columns=columns)


def test_plain_text_goes_through_the_template_where_there_is_one() -> None:
    assert make_prompt(row(prompt="hi", answer="1"), TEMPLATED, PromptFormat()).text == "<|user|>hi\n<|assistant|>"


def test_plain_text_stays_as_it_is_without_a_template() -> None:
    prompt = make_prompt(row(prompt="hi", answer="1"), PLAIN, PromptFormat())
    assert prompt.text == "hi"
    assert PLAIN.decode(prompt.token_ids) == "hi"


def test_plain_text_stays_as_it_is_when_the_template_is_switched_off() -> None:
    form = PromptFormat(apply_chat_template=False, system_prompt="Be brief.")
    assert make_prompt(row(prompt="hi", answer="1"), TEMPLATED, form).text == "Be brief.\n\nhi"


def test_messages_go_through_the_template_and_are_kept() -> None:
    prompt = make_prompt(row(prompt=MESSAGES, answer="1"), TEMPLATED, PromptFormat())
    assert prompt.text == "<|user|>hi\n<|assistant|>yes?\n<|assistant|>"
    assert prompt.messages == tuple(MESSAGES)


def test_messages_are_not_claimed_for_rows_of_plain_text() -> None:
    assert make_prompt(row(prompt="hi", answer="1"), TEMPLATED, PromptFormat()).messages is None


def test_messages_without_a_template_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"set data\.apply_chat_template: false"):
        make_prompt(row(prompt=MESSAGES, answer="1"), PLAIN, PromptFormat())


def test_messages_are_joined_when_the_template_is_switched_off() -> None:
    form = PromptFormat(apply_chat_template=False)
    assert make_prompt(row(prompt=MESSAGES, answer="1"), PLAIN, form).text == "hi\n\nyes?"


def test_a_template_that_is_demanded_but_missing_is_refused_for_plain_text() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        make_prompt(row(prompt="hi", answer="1"), PLAIN, PromptFormat(apply_chat_template=True))


def test_template_arguments_without_a_template_are_refused() -> None:
    form = PromptFormat(chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="chat_template_kwargs has no effect"):
        make_prompt(row(prompt="hi", answer="1"), PLAIN, form)


def test_a_system_prompt_reaches_the_template() -> None:
    form = PromptFormat(system_prompt="Be brief.")
    assert make_prompt(row(prompt="hi", answer="1"), TEMPLATED, form).text.startswith("<|system|>Be brief.\n<|user|>hi")


@pytest.mark.parametrize("value", ["", "  \n", [], None, 3, {"a": 1}])
def test_what_is_no_prompt_is_refused_with_its_line(value: object) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl line 1: expected"):
        make_prompt(row(prompt=value, answer="1"), TEMPLATED, PromptFormat())


@pytest.mark.parametrize("message", ["hi", {"role": "user"}, {"role": "user", "content": 3}])
def test_messages_without_role_and_content_are_refused(message: object) -> None:
    with pytest.raises(DataError, match="expected messages with role and content"):
        make_prompt(row(prompt=[message], answer="1"), TEMPLATED, PromptFormat())


def test_columns_and_answer_follow_the_prompt() -> None:
    prompt = make_prompt(row(question="1+1?", answer=2, level="easy"), PLAIN, PromptFormat(prompt_key="question"))
    assert prompt.answer == "2"
    assert prompt.columns == {"question": "1+1?", "answer": 2, "level": "easy"}
    assert prompt.id == "x/0"


def test_a_nested_answer_is_found_by_its_dotted_key() -> None:
    form = PromptFormat(answer_key="reward_model.ground_truth")
    assert make_prompt(row(prompt="x", reward_model={"ground_truth": "9"}), PLAIN, form).answer == "9"


def test_a_missing_answer_column_names_the_columns_and_the_setting() -> None:
    with pytest.raises(DataError) as caught:
        make_prompt(row(prompt="x", solution="9"), PLAIN, PromptFormat())
    message = "x.jsonl line 1: expected a column 'answer', got columns prompt, solution; "
    assert str(caught.value) == message + "set answer_key (null when there is no ground truth)"


def test_an_answer_of_null_is_refused() -> None:
    with pytest.raises(DataError, match="got null"):
        make_prompt(row(prompt="x", answer=None), PLAIN, PromptFormat())


def test_rows_without_ground_truth_are_fine_when_none_is_named() -> None:
    assert make_prompt(row(prompt="x"), PLAIN, PromptFormat(answer_key=None)).answer is None


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("5 + 6 = 11\n#### 11", "11"),
        ("#### 1,011", "1011"),
        ("a\n#### -3 ", "-3"),
        ("a #### b\nlast line", "a #### b\nlast line"),
        ("42", "42"),
    ],
)
def test_the_final_answer_of_a_worked_solution_is_taken(solution: str, answer: str) -> None:
    assert final_answer(solution) == answer


def test_a_prompt_of_exactly_the_limit_is_kept() -> None:
    made = make_prompts([row(prompt="abcd")], PLAIN, PromptFormat(answer_key=None, max_tokens=4))
    assert len(made.prompts) == 1
    assert made.num_dropped == 0


def test_a_prompt_over_the_limit_is_an_error_with_both_lengths() -> None:
    with pytest.raises(DataError, match=r"line 1: expected a prompt of at most 4 tokens, got 5; raise"):
        make_prompts([row(prompt="abcde")], PLAIN, PromptFormat(answer_key=None, max_tokens=4))


def test_prompts_over_the_limit_are_dropped_and_counted_on_demand() -> None:
    rows = [replace(row(prompt=text), id=text) for text in ("abcde", "ab", "abcdef", "abc")]
    made = make_prompts(rows, PLAIN, PromptFormat(answer_key=None, max_tokens=4, overlong="drop"))
    assert [prompt.text for prompt in made.prompts] == ["ab", "abc"]
    assert made.num_dropped == 2


def test_dropping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="all 1 prompts are longer than 4 tokens"):
        make_prompts([row(prompt="abcde")], PLAIN, PromptFormat(answer_key=None, max_tokens=4, overlong="drop"))


@pytest.mark.skipif(REAL_DATA is None, reason="LEADOUT_DATA is unset: no folder with real data sets")
def test_every_gsm8k_answer_is_a_number() -> None:
    rows = read_rows(Path(str(REAL_DATA)) / "gsm8k_test.jsonl")
    answers = [final_answer(str(row.columns["answer"])) for row in rows]
    assert answers[0] == "18"
    assert all(float(answer) == int(float(answer)) for answer in answers)


@pytest.mark.skipif(REAL_DATA is None, reason="LEADOUT_DATA is unset: no folder with real data sets")
@pytest.mark.parametrize(("name", "key"), [("aime_2025.jsonl", "problem"), ("math_500.jsonl", "problem")])
def test_real_problems_become_prompts_that_contain_them(name: str, key: str) -> None:
    rows = read_rows(Path(str(REAL_DATA)) / name, 20)
    made = make_prompts(rows, TEMPLATED, PromptFormat(prompt_key=key))
    for source, prompt in zip(rows, made.prompts, strict=True):
        assert prompt.text == f"<|user|>{source.columns[key]}\n<|assistant|>"
