"""Run folders -> one self-contained HTML file: figures of the run, charts, closing table, sample rollouts, recipe.

Reads only what a run wrote; a run that is still going on or was killed is shown as far as it came. Everything that
came out of a model or a data file is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from leadout import __version__
from leadout.errors import DataError
from leadout.metrics import read_rows, wall_seconds
from leadout.pipeline.closing import mean_drafter_seconds, mean_stage_seconds
from leadout.pipeline.draft_health import alarms
from leadout.pipeline.folder import RunFolder, write_text
from leadout.records import Stage
from leadout.report.charts import CHARTS, Picture, draft_length_chart, line_chart, stage_chart, stage_comparison_chart
from leadout.report.health_charts import age_chart, entropy_chart

_SAMPLED_STEPS = 2
_SAMPLES_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run folder says."""

    name: str
    """Folder name, made unique among the runs of a report."""
    config: str
    rows: list[dict[str, Any]]
    """metrics.jsonl."""
    stage_seconds: Mapping[Stage, float]
    """Mean over steps."""
    drafter_seconds: float
    """Of the learner's stages, mean over steps; 0 where no drafter learns."""
    closing: dict[str, Any] | None
    """closing.json, if the run came that far."""
    samples: list[dict[str, Any]]
    """A few rollouts of the first and the last step."""
    highlights: list[tuple[str, str]]
    """(what, figure) lines of the summary."""


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the report of one run, or the comparison of several, to `out` and return it.

    Raises:
        CheckpointError: a folder is not that of a run.
        DataError: no run was named, or a file of a run is damaged.
        CapacityError: the disk is full.

    """
    if not runs:
        raise DataError("report: expected at least one run folder, got none")
    names = _names(runs)
    data = [_read_run(name, RunFolder.open(path)) for name, path in zip(names, runs, strict=True)]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("template.html")
    text = page.render(runs=data, pictures=_pictures(data), stages=list(Stage), version=__version__)
    write_text(out, text)
    return out


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where two folders share one."""
    names = [path.resolve().name for path in runs]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, runs, strict=True)]


def _read_run(name: str, folder: RunFolder) -> RunData:
    rows = _read_lines(folder.metrics)
    return RunData(
        name=name,
        config=folder.config.read_text(encoding="utf-8"),
        rows=rows,
        stage_seconds=mean_stage_seconds(rows),
        drafter_seconds=mean_drafter_seconds(rows),
        closing=_read_json(folder.closing),
        samples=pick_samples(_read_lines(folder.rollouts)),
        highlights=highlights(rows),
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_rows(path) if path.exists() else []
    except ValueError as error:
        raise DataError(f"{path}: expected one JSON object per line, got something else ({error})") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: expected a JSON object, got something else ({error}); remove it") from error


def highlights(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The summary of a run: mean of the first and of the last quarter of its steps, and what a step took."""
    if not rows:
        return []
    quarter = max(1, len(rows) // 4)
    lines = [("steps", str(len(rows)))]
    shown = (
        ("reward", "reward", ".3f"),
        ("draft/expected_acceptance_length", "expected acceptance length", ".2f"),
        ("spec/acceptance_length", "measured acceptance length", ".2f"),
        ("completions/mean_length", "completion length", ".1f"),
        ("rollout/tokens_per_second", "generated tokens / s", ".0f"),
    )
    for metric, label, shape in shown:
        first, last = ([row[metric] for row in part if metric in row] for part in (rows[:quarter], rows[-quarter:]))
        if first and last:
            lines.append((f"{label}, first to last quarter", f"{np.mean(first):{shape}} → {np.mean(last):{shape}}"))
    for first_step, last_step, text in alarms(rows):
        lines.append((f"drafter, steps {first_step} to {last_step}", text))
    totals = [row["seconds/total"] for row in rows if "seconds/total" in row]
    if totals and sum(totals) > 0.0:
        share = sum(wall_seconds(row, Stage.ROLLOUT) for row in rows) / sum(totals)
        lines.append(("seconds per step", f"{np.mean(totals):.2f}, of which rollout {share:.0%}"))
    return lines


def pick_samples(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rollouts to show: of the first and the last step, the best, the median and the worst by reward."""
    steps = sorted({line["step"] for line in lines})
    samples = []
    for step in steps[:1] + steps[1:][-(_SAMPLED_STEPS - 1) :]:
        ranked = sorted((line for line in lines if line["step"] == step), key=lambda line: -line["reward"])
        places = np.unique(np.linspace(0, len(ranked) - 1, _SAMPLES_PER_STEP).round().astype(int))
        samples += [ranked[place] for place in places.tolist()]
    return samples


def _pictures(data: Sequence[RunData]) -> list[Picture]:
    runs = {run.name: run.rows for run in data}
    drawn = [line_chart(chart, runs) for chart in CHARTS]
    lengths = None
    if len(data) == 1:
        stages, lengths = stage_chart(data[0].rows), draft_length_chart(data[0].rows)
    else:
        stages = stage_comparison_chart({run.name: run.stage_seconds for run in data})
    pictures = [*drawn[:2], stages, lengths, *drawn[2:], age_chart(runs), entropy_chart(runs)]
    return [picture for picture in pictures if picture is not None]
