"""Prints the closing table of a run: seconds per stage first, then speculative against plain generation."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from leadout.pipeline.closing import Closing, Comparison


def print_closing(console: Console, closing: Closing) -> None:
    """Print both tables."""
    console.print(stage_table(closing))
    if closing.comparisons:
        console.print(comparison_table(closing))


def stage_table(closing: Closing) -> Table:
    """Mean seconds and share of each stage."""
    table = Table(title=f"seconds per stage, mean of {closing.steps} steps", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    total = sum(closing.stage_seconds.values())
    for stage, seconds in closing.stage_seconds.items():
        table.add_row(str(stage), f"{seconds:.3f}", f"{seconds / total:.1%}" if total else "-")
    if closing.drafter_seconds:
        share = f"{closing.drafter_seconds / total:.1%}" if total else "-"
        table.add_row("of it for the drafter", f"{closing.drafter_seconds:.3f}", share)
    table.add_section()
    table.add_row("step", f"{total:.3f}", "100.0%" if total else "-")
    return table


def comparison_table(closing: Closing) -> Table:
    """One line per comparison; a ratio below 1 means that speculation was slower."""
    table = Table(
        title="the last step's prompts again, same weights: speculative against plain, medians", title_justify="left"
    )
    table.add_column("generation of")
    names = ("plain\ntok/s", "spec.\ntok/s", "speedup", "accept\nlength", "accepted at\n1, 2, …", "rounds\noff")
    for name in (*names, "round\ncost", "whole\nstep"):
        table.add_column(name, justify="right")
    for each in closing.comparisons:
        table.add_row(*_cells(each))
    return table


def _cells(each: Comparison) -> tuple[str, ...]:
    return (
        each.name,
        f"{each.plain_tokens_per_second:.1f}",
        f"{each.tokens_per_second:.1f}",
        f"{each.speedup:.2f}x",
        "off" if each.acceptance_length is None else f"{each.acceptance_length:.2f}",
        " ".join(f"{rate:.2f}" for rate in each.acceptance_rate_by_position) or "-",
        f"{each.off_share:.0%}",
        "-" if each.round_cost is None else f"{each.round_cost:.2f}",
        f"{each.step_speedup:.2f}x",
    )
