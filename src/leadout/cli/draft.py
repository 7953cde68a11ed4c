"""``leadout draft``: make, train and check drafters outside a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from leadout.cli.options import finite
from leadout.config import Dataset, Draft
from leadout.errors import ConfigError, DataError

if TYPE_CHECKING:
    from leadout.build.draft_plan import DraftPlan

draft = typer.Typer(name="draft", help="Drafters: cut one from the policy, train one offline, check one.")

_FILES = (".jsonl", ".json", ".parquet")


@draft.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Drafters: cut one from the policy, train one offline, check one."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@draft.command()
def init(
    model: Annotated[str, typer.Option(metavar="MODEL", help="The policy: alias, folder or hub id.")],
    layers: Annotated[str, typer.Option(metavar="I,J,…", help="Layers to keep, in order, such as 0,1,29.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder of the small model.")],
) -> None:
    """Cut a small draft model from some of the policy's own layers.

    Example: leadout draft init --model smollm2-135m --layers 0,1,29 --out drafts/three-layers
    """
    from leadout.models.cut_layers import write_cut_model
    from leadout.models.loading import resolve

    spec = write_cut_model(resolve(model), _layers(layers, "--layers", "0,1,29"), out)
    typer.echo(f"{out}: {spec.num_layers} layers of {spec.hidden_size}, vocabulary {spec.vocab_size}")
    typer.echo(
        "\nNext: leadout train RECIPE rollout.speculative_config.method=small_model "
        f"rollout.speculative_config.model={out}",
        err=True,
    )


@draft.command()
def info(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a draft head or small model.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The policy that it should fit.")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Also measure a head's acceptance on rollouts of these prompts.")
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts to measure on.")] = 16,
    max_completion_length: Annotated[int, typer.Option(min=2, help="Tokens per rollout.")] = 64,
    temperature: Annotated[float, typer.Option(callback=finite, min=0.01, help="Sampling temperature.")] = 1.0,
) -> None:
    """Say what a drafter folder holds, or what is wrong with it.

    Example: leadout draft info drafts/mine --model smollm2-135m
    """
    from leadout.build.draft_info import draft_info

    for name, figure in draft_info(folder, model).items():
        typer.echo(f"{name:<14} {figure}")
    if data is None:
        return
    if model is None:
        raise ConfigError("--data needs --model, the policy whose rollouts are measured on")
    from leadout.build.draft_measure import measure_head

    name, dataset = _dataset(data)
    figures = measure_head(
        folder,
        model,
        name,
        dataset,
        num_rollouts=rollouts,
        max_completion_length=max_completion_length,
        temperature=temperature,
    )
    for name, figure in figures.items():
        typer.echo(f"{name:<14} {figure}")


_Sources = Annotated[
    list[str],
    typer.Option(metavar="DATA", help="FILE, FILE@PROMPT_KEY, TASK, TASK@ROWS or hub:ID; repeat to mix."),
]
_Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder of the drafter; an interrupted training goes on there.")
]
_Method = Annotated[Literal["eagle3", "parallel", "mtp", "small_model"], typer.Option(help="What is trained.")]
_VocabSize = Annotated[int | None, typer.Option(min=1, help="Draft vocabulary of a new head; the policy's by default.")]
_LayerIds = Annotated[
    str | None, typer.Option(metavar="I,J,K", help="Layers whose input a new head reads; by default 2, L/2, L-3.")
]
_LearningRate = Annotated[
    float | None, typer.Option(callback=finite, help="1e-3, or 1e-4 for a head to go on from, unless named here.")
]
_DecayFrom = Annotated[
    float, typer.Option(callback=finite, min=0.0, max=1.0, help="Share of updates after which the learning rate falls.")
]
_Start = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A drafter to go on from; a small model must be named.")
]
_Form = Annotated[Literal["hf", "speculators"], typer.Option("--format", help="Form of the folder (eagle3, parallel).")]


@draft.command()
def train(
    model: Annotated[str, typer.Option(metavar="MODEL", help="The policy: alias, folder or hub id.")],
    data: _Sources,
    out: _Out,
    method: _Method = "eagle3",
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts to generate.")] = 2048,
    num_generations: Annotated[int, typer.Option(min=1, help="Rollouts of each prompt, which share its prefill.")] = 4,
    passes: Annotated[int, typer.Option(min=1, help="Times that each is learnt from.")] = 2,
    max_completion_length: Annotated[int, typer.Option(min=2, help="Tokens per rollout.")] = 96,
    temperature: Annotated[
        float, typer.Option(callback=finite, min=0.01, help="Sampling temperature of the later run.")
    ] = 1.0,
    vocab_size: _VocabSize = None,
    layer_ids: _LayerIds = None,
    loss_fn: Annotated[str, typer.Option(help="ce, kl, tv, lk or a sum such as ce+tv.")] = "lk",
    ttt_steps: Annotated[int, typer.Option(min=1, max=8, help="Unrolled steps.")] = 3,
    ttt_decay: Annotated[float, typer.Option(callback=finite, help="Weight of a step against the one before.")] = 0.8,
    learning_rate: _LearningRate = None,
    lr_decay_from: _DecayFrom = 0.5,
    drafts: Annotated[int, typer.Option(min=1, max=8, help="Drafts of a round that are measured.")] = 3,
    held_out: Annotated[int, typer.Option(min=1, help="Most held-out prompts of each data set.")] = 48,
    measure_every: Annotated[int, typer.Option(min=1, help="Batches between measurements.")] = 4,
    start: _Start = None,
    form: _Form = "hf",
    seed: Annotated[int, typer.Option(help="Of prompts, rollouts and the drafter's start.")] = 0,
) -> None:
    """Train a drafter on the policy's own rollouts; keeps the best by held-out acceptance.

    Example: leadout draft train --model smollm2-135m --data arithmetic --out drafts/mine --vocab-size 8192
    """
    from leadout.build.draft_plan import DraftPlan

    plan = DraftPlan(
        model=model,
        data=_datasets(data),
        num_rollouts=rollouts,
        num_generations=num_generations,
        passes=passes,
        held_out=held_out,
        measure_every=measure_every,
        max_completion_length=max_completion_length,
        temperature=temperature,
        num_drafts=drafts,
        method=method,
        draft=_section(
            vocab_size=vocab_size,
            layer_ids=None if layer_ids is None else _three(layer_ids),
            loss_fn=loss_fn,
            ttt_steps=ttt_steps,
            ttt_decay=ttt_decay,
            learning_rate=learning_rate,
        ),
        init=start,
        format=form,
        lr_decay_from=lr_decay_from,
        seed=seed,
    )
    _carry_out(plan, out)


def _layers(text: str, option: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option}: expected numbers with commas, such as {example}, got {text!r}") from error


def _three(text: str) -> tuple[int, ...]:
    layers = _layers(text, "--layer-ids", "2,15,27")
    if len(layers) != 3:
        raise ConfigError(f"--layer-ids: expected three layers, such as 2,15,27, got {text!r}")
    return layers


def _section(**options: Any) -> Draft:
    from leadout.recipe.problems import first_problem

    try:
        return Draft(**options)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error


def _carry_out(plan: DraftPlan, out: Path) -> None:
    from leadout.build.draft_training import LENGTH, train_draft
    from leadout.build.run import make_console

    best = train_draft(plan, out, make_console())
    typer.echo(f"best: acceptance length {best[LENGTH]:.3f} after {best['rollouts']:.0f} rollouts, in {out}")
    typer.echo(
        f"\nNext: leadout train RECIPE rollout.speculative_config.method={plan.method} "
        f"rollout.speculative_config.model={out}",
        err=True,
    )


def _datasets(texts: list[str]) -> dict[str, Dataset]:
    """Data sets by their names in reports, which files of one name in different folders do not share."""
    found: dict[str, Dataset] = {}
    for text in texts:
        name, dataset = _dataset(text)
        if dataset in found.values():
            raise ConfigError(f"--data {text}: expected every data set once, got this one twice; leave one out")
        unique, number = name, 2
        while unique in found:
            unique, number = f"{name}-{number}", number + 1
        found[unique] = dataset
    return found


def _dataset(text: str) -> tuple[str, Dataset]:
    """A data set and its name in reports."""
    if text.startswith("hub:"):
        name, _, key = text.removeprefix("hub:").partition("@")
        return name.replace("/", "_"), Dataset(hub=name, prompt_key=key or "prompt", answer_key=None)
    name, _, key = text.rpartition("@") if "@" in text else (text, "", "")
    if Path(name).suffix in _FILES or Path(name).exists():
        if not Path(name).is_file():
            raise DataError(f"{name}: no such data file; check --data (relative to where you run)")
        return Path(name).stem, Dataset(path=Path(name), prompt_key=key or "prompt", answer_key=None)
    if key and not (key.isdecimal() and int(key)):
        raise DataError(f"--data {text}: expected TASK or TASK@ROWS, such as {name}@5000, got {key!r} rows")
    return name.replace("/", "_"), Dataset(task=name, num_rows=int(key) if key else None)
