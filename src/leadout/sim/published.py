"""`leadout simulate --published`: every gate against published measurements, printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from leadout.sim.nemo import Row, project_rows
from leadout.sim.project import Projection
from leadout.sim.validation import Errors, Point, inter_token_points, kernel_gates


def errors_table(rows: Iterable[Errors]) -> Table:
    """Median, p90, worst and n."""
    table = Table(title="kernels, one left out", title_justify="left")
    for name in ("rows", "median", "p90", "worst", "n"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    for row in rows:
        table.add_row(row.name, f"{row.median:.1%}", f"{row.p90:.1%}", f"{row.worst:.0%}", f"{row.n:,}")
    return table


def points_table(points: Sequence[Point]) -> Table:
    """Inter-token milliseconds: measured, ours, kernels alone."""
    table = Table(title="inter-token time on one H100, ms", title_justify="left")
    for name in ("point", "measured", "ours", "error", "kernels alone"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for point in points:
        kernels = "" if point.kernels is None else f"{point.kernels:.2f}"
        table.add_row(point.name, f"{point.measured:.1f}", f"{point.predicted:.2f}", f"{point.error:+.1%}", kernels)
    return table


def nemo_table(rows: Sequence[tuple[Row, Projection]]) -> Table:
    """Step seconds of every row, gated ones marked."""
    table = Table(title="NeMo RL v0.6, seconds a step", title_justify="left")
    for name in ("row", "measured", "ours", "error", "rollout", "train side", "note"):
        table.add_column(name, justify="left" if name in ("row", "note") else "right")
    for row, projection in rows:
        seconds = {stage.value: value for stage, value in projection.seconds.items()}
        table.add_row(
            row.name + (" *" if row.gated else ""),
            f"{row.step_s:.1f}",
            f"{projection.step_s:.1f}",
            f"{projection.step_s / row.step_s - 1:+.0%}",
            f"{seconds['rollout']:.1f}",
            f"{seconds['train'] + seconds['logprob']:.1f}",
            row.note,
        )
    return table


def published_report() -> tuple[Group, dict[str, object]]:
    """All of it, for the terminal and as JSON."""
    kernels, points, rows = kernel_gates(), inter_token_points(), project_rows()
    mean = float(np.mean([point.error for point in points]))
    lines = (
        f"nine points: mean error {mean:+.1%}; host 1.0 ms + 0.01 ms a row was read off these points",
        "NeMo RL: * gated; nothing fitted; MFU, host time, refit and lengths (CV .55) are the defaults",
    )
    shown = Group(errors_table(kernels), points_table(points), nemo_table(rows), *(Text(line) for line in lines))
    data: dict[str, object] = {
        "kernels": [{"name": e.name, "median": e.median, "p90": e.p90, "worst": e.worst, "n": e.n} for e in kernels],
        "inter_token": [
            {"name": p.name, "measured_ms": p.measured, "ours_ms": p.predicted, "kernels_ms": p.kernels} for p in points
        ],
        "nemo": [{"name": r.name, "measured_s": r.step_s, "ours_s": p.step_s, "note": r.note} for r, p in rows],
    }
    return shown, data
