"""Procedural tasks: rows without a file, judged without a model. Made by the reasoning-gym package.

``arithmetic`` asks for a sum or difference and judges the last number of the completion, exactly;
``reasoning_gym:NAME`` is any data set of that package, judged by its own scorer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from leadout.errors import ConfigError
from leadout.interfaces import Task
from leadout.text import last_number

_PREFIX = "reasoning_gym:"

_UNPARSABLE = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, AttributeError, RecursionError)
"""What scorers of the package raise on an answer that they cannot read."""


class Arithmetic:
    """Sums and differences of whole numbers: ``What is 7 - 9? Answer with the number only.``"""

    name = "arithmetic"

    def __init__(self, *, min_digits: int = 1, max_digits: int = 1, num_terms: int = 2) -> None:
        """Operands have `min_digits` to `max_digits` digits (all operands of one question the same number).

        One digit is about what a model of 135 million parameters can learn in minutes: SmolLM2-135M-Instruct answers a
        sixth of these questions at temperature 1, and hardly any with two digits.
        """
        if num_terms < 2:
            raise ConfigError(f"task arithmetic: num_terms must be >= 2, got {num_terms}")
        self._args = {
            "min_digits": min_digits,
            "max_digits": max_digits,
            "min_terms": num_terms,
            "max_terms": num_terms,
        }
        _create("chain_sum", self.name, self._args, size=1, seed=0)

    def rows(self, num_rows: int, seed: int) -> list[dict[str, object]]:
        """`num_rows` rows with `prompt` and `answer`; the same for the same seed."""
        made = _create("chain_sum", self.name, self._args, size=num_rows, seed=seed)
        return [
            {
                "prompt": f"What is {made[index]['metadata']['expression']}? Answer with the number only.",
                "answer": str(made[index]["answer"]),
            }
            for index in range(num_rows)
        ]

    def reward(self, completion: str, row: Mapping[str, object]) -> float:
        """1 if the last number of the completion is the answer, else 0."""
        return float(last_number(completion) == Decimal(str(row["answer"])))


class ReasoningGym:
    """One data set of the reasoning-gym package, under its own name, questions and scorer."""

    def __init__(self, dataset: str, args: Mapping[str, int | float | str | bool]) -> None:
        self.name = f"{_PREFIX}{dataset}"
        self._dataset = dataset
        self._args = dict(args)
        self._judge = _create(dataset, self.name, self._args, size=1, seed=0)

    def rows(self, num_rows: int, seed: int) -> list[dict[str, object]]:
        """`num_rows` rows with `prompt`, `answer` and the data set's `metadata`."""
        made = _create(self._dataset, self.name, self._args, size=num_rows, seed=seed)
        entries = [made[index] for index in range(num_rows)]
        return [
            {
                "prompt": entry["question"],
                "answer": "" if entry["answer"] is None else str(entry["answer"]),
                "metadata": entry["metadata"],
            }
            for entry in entries
        ]

    def reward(self, completion: str, row: Mapping[str, object]) -> float:
        """What the data set's own scorer says; 0 where it cannot read the answer."""
        entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
        try:
            return float(self._judge.score_answer(completion.strip(), entry))
        except _UNPARSABLE:
            return 0.0


def make_task(name: str, args: Mapping[str, int | float | str | bool]) -> Task:
    """The task of ``data.train: {task: NAME, task_args: …}``.

    Raises:
        ConfigError: no such task, or arguments that it does not take.

    """
    if name == Arithmetic.name:
        try:
            return Arithmetic(**args)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(
                f"task arithmetic takes min_digits, max_digits, num_terms; got {', '.join(args)}"
            ) from error
    if name.startswith(_PREFIX):
        return ReasoningGym(name.removeprefix(_PREFIX), args)
    raise ConfigError(f"expected task arithmetic or {_PREFIX}NAME, got {name!r}")


def _create(dataset: str, task: str, args: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """A data set of the package. Seeds are spread, since row i of seed s is row i-1 of seed s+1 there."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"; nearest: {_PREFIX}{near[0]}" if near else ""
        raise ConfigError(f"reasoning-gym has no data set {dataset!r}{hint}")
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    try:
        return create_dataset(dataset, size=size, seed=spread, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task {task}: cannot use task_args {dict(args)}: {error}") from error
