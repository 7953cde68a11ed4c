"""``leadout models``: the models that leadout knows by a short name."""

from __future__ import annotations

from typing import Annotated

import typer

models = typer.Typer(name="models", help="Models known by a short name.", no_args_is_help=False)


@models.callback()
def group() -> None:
    """Models known by a short name."""


@models.command()
def fetch(alias: Annotated[str, typer.Argument(metavar="ALIAS", help="A short name, such as smollm2-135m.")]) -> None:
    """Download a model into the cache, check it, and print its folder.

    Example: leadout models fetch smollm2-135m
    """
    from leadout.models import aliases

    folder = aliases.fetch(alias, progress=lambda message: typer.echo(message, err=True))
    typer.echo(folder)
    typer.echo("Next: leadout train recipes/demo.yaml", err=True)
