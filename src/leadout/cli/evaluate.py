"""``leadout eval``: how well a model solves a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leadout.cli.options import finite
from leadout.config import Dataset
from leadout.errors import DataError

_FILES = (".jsonl", ".json", ".parquet")


def evaluate(
    model: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder or hub id.")],
    data: Annotated[str, typer.Option(metavar="DATA", help="A .jsonl, .json or .parquet file, a task, or hub:ID.")],
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    answer_key: Annotated[str, typer.Option(help="Column with the ground truth.")] = "answer",
    reward: Annotated[str | None, typer.Option(help="Judge: task, exact, number, math or module:function.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts asked.")] = 64,
    num_generations: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(callback=finite, min=0.0, help="0 is greedy.")] = 0.0,
    max_completion_length: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 256,
) -> None:
    """Measure pass@1 and mean@k of a model on a data set.

    Example: leadout eval --model smollm2-135m --data arithmetic --num-prompts 16
    """
    from leadout import build

    dataset = _dataset(data, prompt_key, answer_key)
    figures = build.evaluate(
        model,
        dataset,
        reward=reward or ("number" if dataset.task is None else "task"),
        num_prompts=num_prompts,
        num_generations=num_generations,
        temperature=temperature,
        max_completion_length=max_completion_length,
    )
    for name, figure in figures.items():
        typer.echo(f"{name:<32} {figure:.4g}")
    typer.echo("\nNext: leadout train RECIPE data.eval=… eval.every=10   (the same figures along a run)")


def _dataset(data: str, prompt_key: str, answer_key: str) -> Dataset:
    if data.startswith("hub:"):
        return Dataset(hub=data.removeprefix("hub:"), split="test", prompt_key=prompt_key, answer_key=answer_key)
    if Path(data).suffix in _FILES or Path(data).exists():
        if not Path(data).is_file():
            raise DataError(f"{data}: no such data file; check --data (relative to where you run)")
        return Dataset(path=Path(data), prompt_key=prompt_key, answer_key=answer_key)
    return Dataset(task=data)
