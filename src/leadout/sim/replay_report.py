"""`leadout simulate --run RUN`: predicted against measured seconds per stage, and the validation gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group
from rich.table import Table
from rich.text import Text

from leadout.errors import DataError
from leadout.records import Stage
from leadout.sim.profile import load_profile
from leadout.sim.replay import Cell, judge, read_cells, replay_step
from leadout.sim.runs import RecordedStep, read_run, replay_simulated


def replay_report(folder: Path, profile: Path | None) -> tuple[Group, dict[str, Any]]:
    """Every step of a run: predicted and measured seconds of each stage."""
    recorded = read_run(folder)
    if (folder / "scenario.yaml").is_file():
        predicted = replay_simulated(folder)
    else:
        predicted = _by_profile(folder, recorded, profile)
    table = Table(title=f"{folder}: seconds, predicted / measured", title_justify="left")
    for name in ("step", *(stage.value for stage in Stage), "total"):
        table.add_column(name, justify="right")
    rows = []
    for step, ours in zip(recorded, predicted, strict=True):
        known = [stage for stage in Stage if stage in step.seconds]
        total = (sum(ours[stage] for stage in known), sum(step.seconds[stage] for stage in known))
        cells = [f"{ours[s]:.2f} / {step.seconds[s]:.2f}" if s in step.seconds else "-" for s in Stage]
        table.add_row(str(step.step), *cells, f"{total[0]:.2f} / {total[1]:.2f}")
        rows.append(_row(step, ours))
    note = Text("unpaired: the machine's pace then and at calibration differ; --validate judges paired cells")
    return Group(table, note), {"steps": rows}


def _by_profile(folder: Path, recorded: list[RecordedStep], path: Path | None) -> list[dict[Stage, float]]:
    if path is None:
        raise DataError(
            "--run needs --profile FILE (from `leadout bench --calibrate FILE`) for a run on a real machine"
        )
    profile, config = load_profile(path), _config(folder)
    rollout = config.get("rollout", {})
    section = rollout.get("speculative_config") or {}
    method = str(section.get("method", "none"))
    group = int(rollout.get("num_generations", 1))
    predicted = []
    for step in recorded:
        slots = int(rollout.get("max_num_seqs") or len(step.lengths))
        predicted.append(replay_step(step, profile, method, slots=slots, group=group))
    return predicted


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        raise DataError(f"expected {path} (the run's resolved recipe), it is not there")
    data = yaml.safe_load(path.read_text())
    return data if isinstance(data, dict) else {}


def _row(step: RecordedStep, ours: Mapping[Stage, float]) -> dict[str, Any]:
    return {
        "step": step.step,
        "predicted": {stage.value: ours[stage] for stage in Stage},
        "measured": {stage.value: value for stage, value in step.seconds.items()},
    }


def validate_report(folder: Path, profile: Path | None) -> tuple[Group, dict[str, Any]]:
    """The gate over the paired cells of a benchmark."""
    if profile is None:
        raise DataError("--validate needs --profile FILE (from `leadout bench --calibrate FILE`)")
    cells = read_cells(folder / "cells.jsonl", load_profile(profile))
    verdict = judge(cells)
    table = Table(title="paired cells, log(predicted / measured)", title_justify="left")
    for name in ("cell", "stages", "against itself", "speedup, error", "against itself", "unpaired"):
        table.add_column(name)
    for cell in cells:
        table.add_row(
            cell.name,
            _errors(cell.stage_errors),
            f"{cell.repeatability:.3f}",
            "" if cell.speedup_error is None else f"{cell.speedup_error:+.1%}",
            "" if cell.speedup_repeatability is None else f"{cell.speedup_repeatability:.3f}",
            _errors(cell.unpaired),
        )
    line = (
        f"{verdict.cells} cells: median {verdict.median:.1%} (gate 10 %), within 20 %: {verdict.within:.0%} (90 %), "
        f"the machine against itself {verdict.repeatability:.1%}; speedups within 10 %: {verdict.speedups:.0%} (90 %), "
        f"against themselves {verdict.speedup_repeatability:.1%}: " + ("passed" if verdict.passed else "failed")
    )
    data = {**asdict(verdict), "by_cell": [_cell_row(cell) for cell in cells]}
    return Group(table, Text(line), Text("unpaired: without the probes' pace, not judged")), data


def _errors(errors: Mapping[Stage, float]) -> str:
    return ", ".join(f"{stage.value} {error:+.3f}" for stage, error in errors.items())


def _cell_row(cell: Cell) -> dict[str, Any]:
    return {
        "name": cell.name,
        "stages": {stage.value: error for stage, error in cell.stage_errors.items()},
        "unpaired": {stage.value: error for stage, error in cell.unpaired.items()},
        "speedup": cell.speedup_error,
        "repeatability": cell.repeatability,
        "speedup_repeatability": cell.speedup_repeatability,
    }
