"""Built-in reward functions that need nothing but the completion: task, exact, number, length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from leadout.errors import DataError
from leadout.interfaces import Task
from leadout.reward.completion import Completion
from leadout.text import last_number


def exact(completions: Sequence[Completion]) -> list[float | None]:
    """1 where the completion is the ground truth, surrounding white space aside, else 0."""
    return [float(each.text.strip() == each.require_answer("exact").strip()) for each in completions]


def number(completions: Sequence[Completion]) -> list[float | None]:
    """1 where the last number of the completion equals the ground truth, else 0.

    Raises:
        DataError: a ground truth is no number.

    """
    return [float(last_number(each.text) == _numeric_answer(each)) for each in completions]


@dataclass(frozen=True, slots=True)
class TaskReward:
    """The judgement of the procedural task that made the prompts."""

    task: Task
    """Judges a completion given its row."""

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        """The task's own reward in [0, 1]."""
        return [
            self.task.reward(each.text, {**each.prompt.columns, "answer": each.prompt.answer}) for each in completions
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong:
    """Soft punishment of long completions (DAPO, arXiv 2503.14476, equation 13).

    With length L, longest length M and a buffer of B tokens: 0 up to M - B, then falling in a straight line to -1 at
    M. The paper has M = 20,480 and B = 4,096; B is a fifth of M here too.
    """

    max_length: int
    """M, tokens: `rollout.max_completion_length`."""

    @property
    def buffer(self) -> int:
        """B, tokens."""
        return max(1, self.max_length // 5)

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        """In [-1, 0] per completion."""
        start = self.max_length - self.buffer
        return [-min(1.0, max(0.0, (each.length - start) / self.buffer)) for each in completions]


def _numeric_answer(completion: Completion) -> Decimal:
    answer = completion.require_answer("number")
    plain = re.sub(r"(?<=\d)[ \u00a0\u2009\u202f](?=\d{3})", "", answer.strip().replace("\u2212", "-"))
    try:
        value = Decimal(plain.replace(",", "").removeprefix("$"))
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise DataError(
            f"reward function number needs a number as ground truth, {completion.prompt.id} has {answer!r:.60}; "
            "use the function math or exact"
        )
    return value
