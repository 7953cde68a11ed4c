"""Stage data, second half: rows -> `Prompt`, rendered and encoded once, before the first step.

Chat messages go through the tokenizer's template. Plain strings go through it too where it exists (`auto`), as one
user message; with ``apply_chat_template: false`` text is taken as it is, and messages are joined by blank lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leadout.data.rows import Row
from leadout.errors import ConfigError, DataError
from leadout.records import IntArray, Prompt
from leadout.text import TextCodec

Messages = tuple[Mapping[str, str], ...]

_FINAL_ANSWER = re.compile(r"####\s*(\S.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How rows become prompts. Example: ``PromptFormat(prompt_key="question", max_tokens=512)``."""

    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    answer_key: str | None = "answer"
    """Column with the ground truth; None when there is none."""
    apply_chat_template: bool | Literal["auto"] = "auto"
    """Always, never, or for messages and wherever the tokenizer has a template."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further arguments of the template (``enable_thinking``)."""
    system_prompt: str | None = None
    """Put in front of every prompt that has no system message."""
    max_tokens: int | None = None
    """Longest prompt allowed, in tokens; None for no limit."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a longer one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSet:
    """The prompts of a data set."""

    prompts: tuple[Prompt, ...]
    """In the order of the rows."""
    num_dropped: int
    """Rows left out because their prompt was too long."""


def make_prompts(rows: Sequence[Row], codec: TextCodec, form: PromptFormat) -> PromptSet:
    """Render and encode every row.

    Raises:
        DataError: a column is missing or of a wrong type, a prompt is empty or too long, or all were dropped.
        ConfigError: a chat template is needed and the tokenizer has none.

    """
    prompts: list[Prompt] = []
    for row in rows:
        prompt = make_prompt(row, codec, form)
        length = prompt.token_ids.shape[0]
        if form.max_tokens is None or length <= form.max_tokens:
            prompts.append(prompt)
        elif form.overlong == "error":
            raise DataError(
                f"{row.where}: expected a prompt of at most {form.max_tokens} tokens, got {length}; "
                "raise data.max_prompt_length or the context, or set data.overlong: drop"
            )
    if not prompts:
        raise DataError(
            f"all {len(rows)} prompts are longer than {form.max_tokens} tokens; "
            "raise data.max_prompt_length or the context"
        )
    return PromptSet(prompts=tuple(prompts), num_dropped=len(rows) - len(prompts))


def make_prompt(row: Row, codec: TextCodec, form: PromptFormat) -> Prompt:
    """One row as a prompt; `Prompt.messages` is set only where the row itself holds messages."""
    content = _content(row, form.prompt_key)
    text, token_ids = _render(content, codec, form)
    if token_ids.shape[0] == 0:
        raise DataError(f"{row.where}: expected a prompt in {form.prompt_key!r}, got an empty one")
    return Prompt(
        id=row.id,
        token_ids=token_ids,
        text=text,
        messages=None if isinstance(content, str) else content,
        answer=None if form.answer_key is None else _answer(row, form.answer_key),
        columns=dict(row.columns),
    )


def final_answer(answer: str) -> str:
    r"""The part after the last ``####`` of a worked solution, thousands separators removed; other answers as they are.

    Example: ``final_answer("5 + 6 = 11\n#### 1,011") == "1011"``
    """
    found = _FINAL_ANSWER.search(answer.rsplit("\n", 1)[-1])
    return answer if found is None else found.group(1).replace(",", "")


def _content(row: Row, key: str) -> str | Messages:
    value = row.value(key)
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{row.where}: expected a prompt in {key!r}, got an empty text")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{row.where}: expected text or a list of chat messages in {key!r}, got {value!r:.60}")
    for message in value:
        named = isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        if not named:
            raise DataError(f"{row.where}: expected messages with role and content in {key!r}, got {message!r:.60}")
    return tuple(value)


def _answer(row: Row, key: str) -> str:
    try:
        value = row.value(key)
    except DataError as error:
        raise DataError(f"{error}; set answer_key (null when there is no ground truth)") from None
    if value is None:
        raise DataError(
            f"{row.where}: expected a ground truth in {key!r}, got null; set answer_key: null if there is none"
        )
    return final_answer(value) if isinstance(value, str) else str(value)


def _render(content: str | Messages, codec: TextCodec, form: PromptFormat) -> tuple[str, IntArray]:
    wants_template = form.apply_chat_template
    if wants_template == "auto":
        wants_template = codec.has_chat_template or not isinstance(content, str)
    if wants_template:
        messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
        return codec.render(messages, form.system_prompt, form.chat_template_kwargs)
    if form.chat_template_kwargs:
        raise ConfigError("data.chat_template_kwargs has no effect on plain text; remove it or use a chat template")
    parts = [content] if isinstance(content, str) else [message["content"] for message in content]
    text = "\n\n".join(parts if form.system_prompt is None else [form.system_prompt, *parts])
    return text, codec.encode(text)
