"""``leadout train``: a run, from a recipe or from where an earlier one stopped."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from leadout.errors import CheckpointError, ConfigError
from leadout.recipe import dump, load_recipe


def train(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A YAML file; left out, --resume takes that of the run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Settings that win over the recipe's.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Check the recipe, print it in full, do nothing.")
    ] = False,
) -> None:
    """Train a policy and its drafter as a recipe says.

    Writes runs/NAME with the full recipe, metrics.jsonl (a row per step), rollouts.jsonl, checkpoints and a report.
    A recipe without a name gives its own and the time.

    Example: leadout train recipes/demo.yaml rollout.num_prompts=8
    """
    settings = list(overrides or [])
    if recipe is not None and resume is not None and "=" in recipe.name and not recipe.is_file():
        settings.insert(0, str(recipe))
        recipe = None
    path = _recipe_path(recipe, resume)
    config = load_recipe(path, settings)
    if dry_run:
        typer.echo(dump(config), nl=False)
        return
    if config.name is None:
        config = config.model_copy(update={"name": f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"})
    from leadout import build

    folder = build.train(config, resume=resume)
    typer.echo(f"\nNext: leadout report {folder}   (one HTML file with curves, stage times and samples)")


def _recipe_path(recipe: Path | None, resume: Path | None) -> Path:
    if resume is not None and not (resume / "config.yaml").is_file():
        raise CheckpointError(f"cannot resume {resume}: expected the folder of a run with config.yaml, found none")
    if recipe is not None:
        return recipe
    if resume is None:
        raise ConfigError("expected a recipe, got none; try: leadout train recipes/demo.yaml")
    return resume / "config.yaml"
