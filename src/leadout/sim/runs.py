"""Run folders: written by a projection on its simulated clock, and read back, ours or simulated.

A folder holds `metrics.jsonl` (a row per step with `seconds/*`) and `rollouts.jsonl` (a row per rollout: step, group,
length, prompt length, and per round the drafts made and accepted where known). A simulated one adds `scenario.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from leadout.clock import SimulatedClock
from leadout.errors import ConfigError, DataError
from leadout.records import Stage
from leadout.sim.kernel_tables import Floats
from leadout.sim.project import stage_seconds
from leadout.sim.rollout_phase import draw_lengths, run_rollouts
from leadout.sim.scenario import Scenario, load
from leadout.sim.setup import Workbench, prepare

LENGTH_KEYS = ("length", "completion_length", "num_tokens", "tokens")
PROMPT_KEYS = ("prompt_length", "prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """One step of a finished run."""

    step: int
    seconds: Mapping[Stage, float]
    """Measured (or simulated) seconds."""
    lengths: Floats
    """Completion lengths, groups one after another."""
    prompts: Floats
    """Prompt length of each rollout; NaN where unknown."""
    rounds: Floats
    """Rounds of each rollout; NaN where unknown."""
    drafted: Mapping[int, float]
    """Share of row-rounds by drafts made; empty where unknown."""


def check_can_be_saved(scenario: Scenario) -> None:
    """Raise ConfigError when a scenario cannot be written as a run folder."""
    if scenario.pipeline.mode == "async":
        raise ConfigError(
            "--save-run writes stages one after another; pipeline.mode must be sync for it, got async (--json holds "
            "the projected step)"
        )


def write_run(scenario: Scenario, folder: Path, steps: int = 1) -> None:
    """Run a synchronous scenario on its simulated clock and leave a folder like a real run's; else ConfigError."""
    check_can_be_saved(scenario)
    folder.mkdir(parents=True, exist_ok=True)
    setup = prepare(scenario)
    clock = SimulatedClock()
    metrics, rollouts = [], []
    for step in range(1, steps + 1):
        phase = run_rollouts(setup, draw_lengths(setup, step - 1))
        for stage, duration in stage_seconds(setup, phase).items():
            with clock.stage(stage):
                clock.advance(duration)
        seconds = clock.finish_step()
        row: dict[str, float] = {"step": step, "version": step - 1}
        row |= {f"seconds/{stage.value}": value for stage, value in seconds.items()}
        row["seconds/total"] = sum(seconds.values())
        row["completions/mean_length"] = float(phase.lengths.mean())
        row["completions/max_length"] = float(phase.lengths.max())
        metrics.append(row)
        rollouts += [
            {"step": step, "group": group, "length": int(length), "prompt_length": scenario.workload.prompt_length}
            for group, siblings in enumerate(phase.lengths)
            for length in siblings
        ]
    _write(folder / "scenario.yaml", yaml.safe_dump(scenario.model_dump(mode="json", exclude_defaults=True)))
    _write(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in metrics))
    _write(folder / "rollouts.jsonl", "".join(json.dumps(row) + "\n" for row in rollouts))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def read_run(folder: Path) -> list[RecordedStep]:
    """The steps of a run folder that have both metrics and rollouts."""
    metrics = {int(row["step"]): row for row in _rows(folder / "metrics.jsonl") if "step" in row}
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in _rows(folder / "rollouts.jsonl"):
        by_step.setdefault(int(row.get("step", 0)), []).append(row)
    steps = sorted(set(metrics) & set(by_step))
    if not steps:
        raise DataError(f"{folder}: no step has both metrics and rollouts")
    if any("exposed/rollout" in metrics[step] for step in steps):
        raise DataError(
            f"{folder}: expected a run with pipeline.mode: sync, got an asynchronous one, whose stages ran beside each "
            "other and slowed each other down"
        )
    return [_step(step, metrics[step], by_step[step], folder) for step in steps]


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"expected {path} (a finished run with log.rollouts: true), it is not there")
    out = []
    for line in path.read_text().splitlines():
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a torn last line of a run that was stopped
    return out


def _step(step: int, metrics: Mapping[str, Any], rows: list[Mapping[str, Any]], folder: Path) -> RecordedStep:
    lengths, prompts, rounds = [], [], []
    drafted: dict[int, float] = {}
    for row in rows:
        length = next((float(row[key]) for key in LENGTH_KEYS if isinstance(row.get(key), (int, float))), None)
        if length is None and isinstance(row.get("token_ids"), list):
            length = float(len(row["token_ids"]))
        if length is None:
            raise DataError(f"{folder}/rollouts.jsonl: a row of step {step} has none of {', '.join(LENGTH_KEYS)}")
        lengths.append(length)
        prompts.append(next((float(row[key]) for key in PROMPT_KEYS if key in row), np.nan))
        drafts = row.get("drafted")
        if isinstance(drafts, list):
            rounds.append(float(len(drafts)))
            for k in drafts:
                drafted[int(k)] = drafted.get(int(k), 0.0) + 1.0
        else:
            rounds.append(np.nan)
    total = sum(drafted.values())
    groups = len({row["draw"] for row in rows if "draw" in row})
    if groups and "tokens/prompt" in metrics:  # our logs count the prompt of a group once
        prompts = [float(metrics["tokens/prompt"]) / groups] * len(rows)
    return RecordedStep(
        step=step,
        seconds={
            stage: float(metrics[f"seconds/{stage.value}"]) for stage in Stage if f"seconds/{stage.value}" in metrics
        },
        lengths=np.array(lengths),
        prompts=np.array(prompts),
        rounds=np.array(rounds),
        drafted={k: share / total for k, share in sorted(drafted.items())},
    )


def replay_simulated(folder: Path) -> list[dict[Stage, float]]:
    """Stage seconds of every step of a simulated run, from its scenario and its recorded lengths."""
    scenario = load(folder / "scenario.yaml")
    bench = Workbench()
    setup = prepare(scenario, bench)
    out = []
    for recorded in read_run(folder):
        lengths = recorded.lengths.reshape(-1, scenario.workload.num_generations)
        out.append(stage_seconds(setup, run_rollouts(setup, lengths)))
    return out
