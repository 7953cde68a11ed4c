"""``leadout models``: the models that leadout knows by a short name."""

from __future__ import annotations

from typing import Annotated

import typer

models = typer.Typer(name="models", help="Models known by a short name: models fetch smollm2-135m.")


@models.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Models known by a short name."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@models.command()
def fetch(alias: Annotated[str, typer.Argument(metavar="ALIAS", help="A short name, such as smollm2-135m.")]) -> None:
    """Download a model into the cache, check it, and print its folder.

    Example: leadout models fetch smollm2-135m
    """
    from leadout.models import aliases

    folder = aliases.fetch(alias, progress=lambda message: typer.echo(message, err=True))
    typer.echo(folder)
    typer.echo("Next: leadout train recipes/demo.yaml", err=True)
