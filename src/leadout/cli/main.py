"""The typer app: the commands, the options common to all, and the entry point `run`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import typer.main

import leadout
from leadout.cli.audit import audit
from leadout.cli.bench import bench
from leadout.cli.draft import draft
from leadout.cli.evaluate import evaluate
from leadout.cli.failures import run_guarded, show_internal_error
from leadout.cli.models import models
from leadout.cli.report import report
from leadout.cli.simulate import plan, simulate
from leadout.cli.train import train

_HELP = """Train language models with reinforcement learning (GRPO); rollouts by lossless speculative decoding.

A small drafter proposes tokens, the policy verifies them in one pass and keeps its own distribution exactly.
"""

_EXAMPLE = "Example: leadout train recipes/demo.yaml pipeline.max_steps=5"

app = typer.Typer(name="leadout", help=_HELP, epilog=_EXAMPLE, add_completion=False, rich_markup_mode="rich")

app.command(rich_help_panel="Train")(train)
app.command(rich_help_panel="Trust")(audit)
app.command(name="eval", rich_help_panel="Look")(evaluate)
app.command(rich_help_panel="Look")(report)
app.command(rich_help_panel="Look")(bench)
app.command(rich_help_panel="Plan")(simulate)
app.command(rich_help_panel="Plan")(plan)
app.add_typer(draft, rich_help_panel="Models")
app.add_typer(models, rich_help_panel="Models")


@app.callback(invoke_without_command=True, help=_HELP, epilog=_EXAMPLE)
def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options common to all commands."""
    if version:
        typer.echo(f"leadout {leadout.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Entry point of the `leadout` program."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    # The option belongs to the program, but is welcome after a command too.
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not debug:
        sys.excepthook = show_internal_error
    sys.exit(run_guarded(lambda: _invoke(arguments), debug))


def _invoke(arguments: list[str]) -> None:
    """Parse and run; exceptions reach the caller as they are (typer would swallow what Ctrl-C has to say)."""
    command = typer.main.get_command(app)
    with command.make_context("leadout", arguments) as context:
        command.invoke(context)
