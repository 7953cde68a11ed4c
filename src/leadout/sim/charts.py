"""Pictures: stacked stages, draft length against acceptance, live rows in time, step time by GPUs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from leadout.errors import CapacityError, LayoutError
from leadout.sim.present import Outcome, cost_lines, source_note
from leadout.sim.profile import load_profile
from leadout.sim.project import project
from leadout.sim.ranges import STAGE_ORDER, plain_twin, verdict
from leadout.sim.scenario import Scenario
from leadout.sim.sections import Acceptance, Pipeline
from leadout.sim.setup import Workbench

COLOURS = ("#9aa5b1", "#c08a3e", "#2f6f9f", "#7d5a8c", "#4f8f6f", "#a34a4a")
RATES = np.linspace(0.3, 0.95, 10)
DRAFTS = tuple(range(1, 9))


def stacked_stages(outcome: Outcome) -> Figure:
    """Exposed seconds of plain and speculative steps."""
    figure = Figure(figsize=(6.4, 2.4), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(2)
    for stage, colour in zip(STAGE_ORDER, COLOURS, strict=True):
        width = np.array([outcome.plain.exposed[stage], outcome.projection.exposed[stage]])
        axes.barh([1, 0], width, left=left, color=colour, label=stage.value)
        left += width
    axes.set_yticks([1, 0], ["plain", "speculative"])
    axes.set_xlabel("exposed seconds of a step")
    axes.legend(ncols=6, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False)
    return figure


def heat_map(scenario: Scenario, bench: Workbench) -> Figure:
    """Rollout speedup by draft length and acceptance rate, with the line where it is 1."""
    # The rollout stage alone: the same with and without a learner beside it.
    lean = scenario.model_copy(update={"draws": 1, "pipeline": Pipeline()})
    base = project(plain_twin(lean), bench).rollout_s
    drafts = draft_lengths(scenario)
    grid = np.ones((len(RATES), len(drafts)))
    assert lean.speculation is not None
    for j, k in enumerate(drafts):
        for i, rate in enumerate(RATES):
            section = lean.speculation.model_copy(
                update={"num_speculative_tokens": k, "acceptance": Acceptance(rate=float(rate))}
            )
            grid[i, j] = base / project(lean.model_copy(update={"speculation": section}), bench).rollout_s
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    limit = max(abs(np.log2(grid)).max(), 0.1)
    # Columns stand side by side whatever their k: a calibrated machine has few, and not in even steps.
    columns, half = np.arange(len(drafts)), (RATES[1] - RATES[0]) / 2
    edges = np.arange(len(drafts) + 1) - 0.5, np.append(RATES - half, RATES[-1] + half)
    image = axes.pcolormesh(*edges, np.log2(grid), cmap="RdBu", vmin=-limit, vmax=limit)
    if grid.min() < 1.0 < grid.max() and len(drafts) > 1:
        lines = axes.contour(columns, RATES, grid, levels=[1.0], colors="black")
        axes.clabel(lines, fmt="1.0x")
    for i, rate in enumerate(RATES):
        for j in range(len(drafts)):
            axes.text(j, rate, f"{grid[i, j]:.2f}", ha="center", va="center", fontsize=6)
    axes.set_xticks(columns, [str(k) for k in drafts])
    axes.set_xlabel("draft length k")
    axes.set_ylabel("acceptance rate a_1 = a_2 = ...")
    figure.colorbar(image, label="log2 of rollout speedup")
    return figure


def draft_lengths(scenario: Scenario) -> tuple[int, ...]:
    """Draft lengths to draw, ascending: of a calibrated machine those that were measured, else 1 to 8."""
    if scenario.profile is None or scenario.speculation is None:
        return DRAFTS
    return tuple(k for k in load_profile(scenario.profile).draft_lengths(scenario.speculation.method) if k > 0)


def live_rows(outcome: Outcome) -> Figure:
    """Rows at work over the rollout stage."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    for projection, label, colour in (
        (outcome.plain, "plain", COLOURS[0]),
        (outcome.projection, "speculative", COLOURS[2]),
    ):
        times, rows = projection.live_rows
        axes.plot(times, rows, label=label, color=colour)
    axes.set_xlabel("seconds of the rollout stage")
    axes.set_ylabel("live rows, all replicas")
    axes.legend(frameon=False)
    return figure


def scaling(scenario: Scenario, bench: Workbench) -> Figure:
    """Step time by GPUs, everything else kept."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    for twin, label, colour in ((plain_twin(scenario), "plain", COLOURS[0]), (scenario, "speculative", COLOURS[2])):
        points = scaled_steps(twin, bench)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    return figure


def scaled_steps(
    scenario: Scenario, bench: Workbench, factors: Sequence[float] = (0.25, 0.5, 1, 2, 4)
) -> list[tuple[int, float]]:
    """(GPUs, step seconds) with the GPU counts multiplied; sizes that do not fit are left out."""
    out = []
    for factor in factors:
        gpus = scenario.gpus * factor
        generating = scenario.generation.gpus * factor if scenario.generation.gpus is not None else None
        if gpus < 1 or gpus != int(gpus) or (generating is not None and generating != int(generating)):
            continue
        section = scenario.generation.model_copy(update={"gpus": int(generating) if generating is not None else None})
        training = scenario.training.model_copy(update={"gpus": None})
        sized = scenario.model_copy(update={"gpus": int(gpus), "generation": section, "training": training, "draws": 1})
        try:
            out.append((int(gpus), project(sized, bench).step_s))
        except (CapacityError, LayoutError):
            continue
    return out


def as_png(figure: Figure) -> bytes:
    """The picture as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    return buffer.getvalue()


def figures(outcome: Outcome, bench: Workbench) -> dict[str, Figure]:
    """All pictures of an outcome by title."""
    scenario = outcome.projection.scenario
    out = {"Stages": stacked_stages(outcome), "Live rows in time": live_rows(outcome)}
    section = scenario.speculation
    if section is not None and section.method != "ngram" and draft_lengths(scenario):
        out["Rollout speedup by draft length and acceptance"] = heat_map(scenario, bench)
    out["Step time by GPUs"] = scaling(scenario, bench)
    return out


def write_html(outcome: Outcome, path: Path, bench: Workbench) -> None:
    """One file with tables and pictures, for offline use."""
    scenario = outcome.projection.scenario
    parts = [f"<h1>{html.escape(scenario.name)}</h1>", _headlines(outcome)]
    for title, figure in figures(outcome, bench).items():
        data = base64.b64encode(as_png(figure)).decode()
        parts.append(
            f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
        )
    rows = "".join(
        f"<tr><td>{html.escape(part.name)}</td><td>{part.seconds * 1e3:.3f}</td><td>{part.served.value}</td></tr>"
        for part in outcome.projection.breakdown
    )
    parts.append(f"<h2>One round</h2><table><tr><th>operator</th><th>ms</th><th>served by</th></tr>{rows}</table>")
    settings = html.escape(scenario.model_dump_json(indent=2, exclude_defaults=True))
    parts.append(f"<h2>Scenario</h2><pre>{settings}</pre><p>{html.escape(source_note(scenario))}</p>")
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:2px 12px;text-align:left}"
    style += "img{max-width:100%}"
    page = f'<!doctype html><meta charset="utf-8"><title>{html.escape(scenario.name)}</title><style>{style}</style>'
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page + "\n".join(parts))
    temporary.replace(path)


def _headlines(outcome: Outcome) -> str:
    rows = []
    for name, item in outcome.ranges.items():
        widest = ", ".join(field for field, _ in item.widest)
        rows.append(
            f"<tr><td>{name}</td><td>{item.value:.2f}</td><td>{item.low:.2f} - {item.high:.2f}</td>"
            f"<td>{widest}</td></tr>"
        )
    head = "<tr><th>headline</th><th>value</th><th>5-95 %</th><th>widened most by</th></tr>"
    words = [html.escape(line) for line in cost_lines(outcome)]
    if outcome.projection.scenario.speculation is not None:
        words.append(f"whole step against plain: {verdict(outcome.ranges['step_speedup'])}")
    return f"<table>{head}{''.join(rows)}</table><p>{'<br>'.join(words)}</p>"
