"""``leadout report``: what happened in a run, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write the report of a run, or a comparison of several, as one HTML file that works offline.

    Example: leadout report runs/demo
    """
    from leadout.report.page import write_report

    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
    path = write_report(runs, out)
    typer.echo(f"{path}\nNext: open it in a browser")
