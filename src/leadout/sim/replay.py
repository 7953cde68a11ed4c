"""Held against runs: a finished run's lengths and acceptances through a calibrated profile, beside what it took.

Rows live as many rounds as they really had; their context grows by the run's own tokens a round. The validation gate
works on cells (batch x k x drafter) measured as pairs of [probe, run, probe].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from leadout.errors import DataError
from leadout.records import Stage
from leadout.sim.drain import Slots, order_events
from leadout.sim.kernel_tables import Floats
from leadout.sim.profile import Profile
from leadout.sim.runs import RecordedStep

STAGE_SHARE, STAGE_SECONDS = 0.05, 0.5
MEDIAN_ERROR, CELL_ERROR, CELL_SHARE, SPEEDUP_ERROR = 0.10, 0.20, 0.90, 0.10


def replay_step(
    recorded: RecordedStep, profile: Profile, method: str, *, slots: int, group: int, prompt: float | None = None
) -> dict[Stage, float]:
    """Predicted stage seconds of a recorded step."""
    known = recorded.prompts[np.isfinite(recorded.prompts)]
    prompt_length = prompt if prompt is not None else float(known.mean()) if known.size else 0.0
    samples, tokens = float(len(recorded.lengths)), float(recorded.lengths.sum())
    every = tokens + samples * prompt_length
    return {
        Stage.DATA: profile.data.of(0.0, samples),
        Stage.REFIT: profile.refit.of(0.0, 0.0),
        Stage.ROLLOUT: rollout_seconds(recorded, profile, method, slots=slots, group=group, prompt=prompt_length),
        Stage.REWARD: profile.reward.of(tokens, samples),
        Stage.LOGPROB: profile.logprob.of(every, samples),
        Stage.TRAIN: profile.train.of(every, samples),
    }


def rollout_seconds(
    recorded: RecordedStep, profile: Profile, method: str, *, slots: int, group: int, prompt: float
) -> float:
    """The rollout stage: rounds as recorded (one a token where the log has none), prefill once a group."""
    plain = np.maximum(recorded.lengths - 1.0, 0.0)
    rounds = np.where(np.isfinite(recorded.rounds), recorded.rounds, plain)
    growth = float(plain.sum() / rounds.sum()) if rounds.sum() > 0 else 1.0
    intervals = order_events(rounds + 1.0, prompt, Slots(rows=slots), group)
    extra = (growth - 1.0) * _mean_progress(rounds, intervals.start_N)
    intervals = replace(intervals, context_N=intervals.context_N + intervals.rows_N * extra)
    batch = np.minimum(intervals.rows_N, slots)
    context = intervals.context_N / intervals.rows_N
    shares = recorded.drafted or {0: 1.0}
    seconds = 0.0
    for k, share in shares.items():
        table = profile.table(method, k, slots)
        seconds += share * float(table.integrate(batch, context, growth, intervals.span_N).sum())
    return seconds + profile.prefill.of(float(intervals.prefill_tokens_N.sum()), 0.0)


def _mean_progress(rounds: Floats, start: Floats) -> Floats:
    """Rounds already done by live rows: with one wave of rows the interval's start, never more than the longest row."""
    return np.minimum(start, float(rounds.max(initial=0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One validated cell: predicted and measured, medians over its pairs."""

    name: str
    stage_errors: Mapping[Stage, float]
    """log(predicted / measured) of the stages that count."""
    speedup_error: float | None
    repeatability: float
    """Median |log ratio| of the measurement against itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the gate holds."""

    median: float
    within: float
    """Share of cells whose worst stage is within 20 %."""
    speedups: float
    """Share of cells whose speedup over plain is within 10 %."""
    repeatability: float
    passed: bool


def counts(seconds: Mapping[Stage, float]) -> list[Stage]:
    """Stages of at least 5 % of the step or half a second."""
    total = sum(seconds.values())
    return [stage for stage, value in seconds.items() if value >= STAGE_SECONDS or value >= STAGE_SHARE * total]


def judge(cells: Sequence[Cell]) -> Verdict:
    """The gate over all cells."""
    errors = [abs(error) for cell in cells for error in cell.stage_errors.values()]
    worst = [max((abs(e) for e in cell.stage_errors.values()), default=0.0) for cell in cells]
    speedups = [abs(cell.speedup_error) for cell in cells if cell.speedup_error is not None]
    if not errors:
        raise DataError("no cell has a stage that counts")
    median, within = float(np.median(errors)), float(np.mean([w <= np.log1p(CELL_ERROR) for w in worst]))
    near = float(np.mean([s <= SPEEDUP_ERROR for s in speedups])) if speedups else 1.0
    passed = median <= MEDIAN_ERROR and within >= CELL_SHARE and near >= CELL_SHARE
    return Verdict(
        median=median,
        within=within,
        speedups=near,
        repeatability=float(np.median([cell.repeatability for cell in cells])),
        passed=passed,
    )


def read_cells(path: Path, profile: Profile) -> list[Cell]:
    """Cells from a file of measured pairs (`cells.jsonl`, written by the benchmark).

    Each row: name, pairs of {probe_before, probe_after, measured: {stage: s}, predicted: {stage: s}, plain_measured,
    plain_predicted (rollout seconds, optional)}. Predictions are scaled by the probes' pace against the calibration.
    """
    if not path.is_file():
        raise DataError(f"--validate needs {path}; benchmarks/simulator_own_runs.py writes it")
    cells = [_cell(json.loads(line), profile) for line in path.read_text().splitlines() if line.strip()]
    if not cells:
        raise DataError(f"{path} holds no cells")
    return cells


def _cell(row: Mapping[str, Any], profile: Profile) -> Cell:
    pairs = row["pairs"]
    if len(pairs) < 5:
        raise DataError(f"cell {row['name']}: expected at least 5 pairs, got {len(pairs)}")
    stages = counts({Stage(k): float(np.median([p["measured"][k] for p in pairs])) for k in pairs[0]["measured"]})
    errors: dict[Stage, float] = {}
    speedups = []
    for stage in stages:
        logs = [
            np.log(p["predicted"][stage.value] * _pace(p, profile) / p["measured"][stage.value])
            for p in pairs
            if p["measured"][stage.value] > 0 and p["predicted"].get(stage.value, 0) > 0
        ]
        if logs:
            errors[stage] = float(np.median(logs))
    for p in pairs:
        if "plain_measured" in p:
            measured = p["plain_measured"] / p["measured"]["rollout"]
            speedups.append(p["plain_predicted"] / p["predicted"]["rollout"] / measured - 1.0)
    rollouts = np.array([p["measured"]["rollout"] / _pace(p, profile) for p in pairs])
    spread = float(np.median(np.abs(np.log(rollouts / np.median(rollouts)))))
    return Cell(
        name=str(row["name"]),
        stage_errors=errors,
        speedup_error=float(np.median(speedups)) if speedups else None,
        repeatability=spread,
    )


def _pace(pair: Mapping[str, Any], profile: Profile) -> float:
    """How much slower the machine was than while it was calibrated."""
    if not profile.probe_s:
        return 1.0
    return float((pair["probe_before"] + pair["probe_after"]) / 2.0 / profile.probe_s)
