"""The figures of cells as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from leadout.bench.results import Cell, Line
from leadout.bench.statistics import Ratio, Spread
from leadout.bench.targets import Check

_GIB = 1 << 30


def render_cell(cell: Cell) -> Table:
    """One row per contender."""
    noun = "row" if cell.rows == 1 else "rows"
    title = f"{cell.name}: {cell.rows} {noun}, prompts of {cell.context}, {cell.tokens:,} new tokens"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for column in (
        "tokens/s (quartiles)",
        "/ plain (95 %)",
        "acceptance",
        "by position",
        "k",
        "off",
        "round cost",
        "peak GiB",
    ):
        table.add_column(column, justify="right")
    for line in cell.lines:
        table.add_row(line.name, *_figures(line))
    if cell.auto_against_best is not None:
        best = cell.auto_against_best
        table.caption = f"auto / best fixed ({best.best}, chosen on the first half): {ratio(best.ratio)}"
        table.caption_justify = "left"
    return table


def _figures(line: Line) -> tuple[str, ...]:
    return (
        spread(line.tokens_per_second),
        "" if line.against_plain is None else ratio(line.against_plain),
        "" if line.acceptance_length is None else f"{line.acceptance_length:.2f}",
        " ".join(f"{rate:.2f}" for rate in line.acceptance_by_position),
        "" if line.k_mean is None else f"{line.k_mean:.1f}",
        "" if line.off_share is None else f"{line.off_share:.0%}",
        "" if line.round_cost is None else ratio(line.round_cost),
        f"{line.peak_bytes / _GIB:.2f}",
    )


def spread(value: Spread) -> str:
    """Median (lower-upper quartile)."""
    return f"{value.median:.1f} ({value.low:.1f}-{value.high:.1f})"


def ratio(value: Ratio) -> str:
    """Value (interval)."""
    if value.low is None or value.high is None:
        return f"{value.value:.2f}"
    return f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def render_checks(checks: Sequence[Check]) -> Table:
    """Measured beside target, one row per check."""
    table = Table(title="targets", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("measured (95 %)", justify="right")
    table.add_column("median of pairs", justify="right")
    table.add_column("target")
    table.add_column("")
    for check in checks:
        interval = "" if check.low is None or check.high is None else f" ({check.low:.2f}-{check.high:.2f})"
        verdict = Text("") if check.met is None else Text("met", "green") if check.met else Text("missed", "bold red")
        of_pairs = "" if check.of_pairs is None else f"{check.of_pairs:.3f}"
        table.add_row(check.name, f"{check.measured:.3f}{interval}", of_pairs, check.target, verdict)
    return table
