"""Rows of metrics.jsonl -> charts, each an SVG inside a data URI.

Figures are made without pyplot, so nothing global is touched and no display is needed. A chart whose quantities appear
in no row is left out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from leadout.metrics import wall_seconds
from leadout.records import Stage

Rows = Sequence[Mapping[str, float]]

# Okabe and Ito's palette: told apart with any colour vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STAGE_COLOURS: Mapping[Stage, str] = {
    Stage.DATA: "#999999",
    Stage.REFIT: "#E69F00",
    Stage.ROLLOUT: "#009E73",
    Stage.REWARD: "#CC79A7",
    Stage.LOGPROB: "#56B4E9",
    Stage.TRAIN: "#0072B2",
}
_DASHES = ("-", "--", ":", "-.")
_SIZE = (6.4, 3.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A line chart over steps."""

    title: str
    unit: str
    """Label of the vertical axis."""
    series: tuple[tuple[str, str], ...]
    """(metric, label) of each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawn chart."""

    title: str
    uri: str
    """`data:image/svg+xml;base64,…`"""


CHARTS = (
    Chart(title="Reward", unit="reward", series=(("reward", "training"), ("eval/pass@1", "evaluation, pass@1"))),
    Chart(
        title="Acceptance length",
        unit="tokens per round",
        series=(
            ("draft/expected_acceptance_length", "expected by the learner"),
            ("spec/acceptance_length", "measured"),
        ),
    ),
    Chart(title="Drafts per round", unit="tokens", series=(("spec/k_mean", "k, rounds off count as 0"),)),
    Chart(title="Generation speed", unit="tokens / s", series=(("rollout/tokens_per_second", "rollout stage"),)),
    Chart(
        title="Completion length",
        unit="tokens",
        series=(
            ("completions/mean_length", "mean"),
            ("completions/min_length", "shortest"),
            ("completions/max_length", "longest"),
        ),
    ),
    Chart(title="Draft loss", unit="nats", series=(("draft/loss", "draft loss"),)),
    Chart(title="Entropy of the policy", unit="nats", series=(("entropy", "entropy"),)),
    Chart(title="Generator against learner", unit="KL, nats", series=(("mismatch_kl", "mismatch"),)),
    Chart(title="Policy loss", unit="loss", series=(("loss", "loss"),)),
)
"""What a report shows over steps, in this order."""


def line_chart(chart: Chart, runs: Mapping[str, Rows]) -> Picture | None:
    """Draw a chart of one run (a colour per line) or several (a colour per run, a dash per line); None without data."""
    figure, axes = figure_of("step", chart.unit)
    drawn = 0
    for run_number, (name, rows) in enumerate(runs.items()):
        for number, (metric, label) in enumerate(chart.series):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if not points:
                continue
            colour = PALETTE[(number if len(runs) == 1 else run_number) % len(PALETTE)]
            dash = "-" if len(runs) == 1 else _DASHES[number % len(_DASHES)]
            steps, values = zip(*points, strict=True)
            text = label if len(runs) == 1 else f"{name}: {label}"
            axes.plot(steps, values, dash, color=colour, label=text, marker="o", markersize=3, linewidth=1.5)
            drawn += 1
    if not drawn:
        return None
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if drawn > len(chart.series):
        _legend_outside(axes)
    elif drawn > 1:
        axes.legend(frameon=False, fontsize=8)
    return picture_of(chart.title, figure)


def stage_chart(rows: Rows) -> Picture | None:
    """Seconds of every step as stacked bars, one colour per stage; None without rows."""
    if not rows:
        return None
    figure, axes = figure_of("step", "seconds")
    steps = [row["step"] for row in rows]
    bottom = [0.0] * len(rows)
    for stage in Stage:
        seconds = [wall_seconds(row, stage) for row in rows]
        axes.bar(steps, seconds, bottom=bottom, color=STAGE_COLOURS[stage], label=str(stage), width=0.85)
        bottom = [low + height for low, height in zip(bottom, seconds, strict=True)]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_outside(axes, reverse=True)
    return picture_of("Seconds per stage", figure)


def draft_length_chart(rows: Rows) -> Picture | None:
    """Share of row-rounds by number of drafts as stacked bars, a colour per k; None where nothing was ever drafted."""
    name = "spec/k_share_"
    lengths = sorted({int(key.removeprefix(name)) for row in rows for key in row if key.startswith(name)})
    if not any(lengths):
        return None
    figure, axes = figure_of("step", "share of row-rounds")
    shown = [row for row in rows if f"{name}0" in row]
    bottom = [0.0] * len(shown)
    for number, k in enumerate(lengths):
        shares = [row.get(f"{name}{k}", 0.0) for row in shown]
        colour = "#d9d9d9" if k == 0 else PALETTE[(number - 1) % len(PALETTE)]
        axes.bar(
            [row["step"] for row in shown], shares, bottom=bottom, color=colour, label="off" if k == 0 else f"k = {k}"
        )
        bottom = [low + height for low, height in zip(bottom, shares, strict=True)]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_outside(axes, reverse=True)
    return picture_of("Draft lengths chosen", figure)


def stage_comparison_chart(means: Mapping[str, Mapping[Stage, float]]) -> Picture:
    """Mean seconds of a step of each run as one stacked bar."""
    figure, axes = figure_of("mean seconds of a step", "")
    names = list(means)
    left = [0.0] * len(names)
    for stage in Stage:
        seconds = [means[name][stage] for name in names]
        axes.barh(names, seconds, left=left, color=STAGE_COLOURS[stage], label=str(stage), height=0.6)
        left = [low + width for low, width in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    _legend_outside(axes)
    return picture_of("Seconds per stage", figure)


def figure_of(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty chart."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend_outside(axes: Axes, reverse: bool = False) -> None:
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=reverse)


def picture_of(title: str, figure: Figure) -> Picture:
    """A figure as it goes into the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    return Picture(title=title, uri="data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode())
