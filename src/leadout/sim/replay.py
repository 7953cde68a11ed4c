"""Held against runs: a finished run's lengths and acceptances through a calibrated profile, beside what it took.

Rows live as many rounds as they really had; their context grows by the run's own tokens a round. The validation gate
works on cells (batch x k x drafter) measured as pairs of [probe, run, probe].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
PAIRS = 5
"""Of a cell, at least."""


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
    prompts, tokens = float(intervals.prefill_rows_N.sum()), float(intervals.prefill_tokens_N.sum())
    return seconds + profile.prefill_seconds(method if any(shares) else "none", prompts, tokens)


def _mean_progress(rounds: Floats, start: Floats) -> Floats:
    """Rounds already done by live rows: with one wave of rows the interval's start, never more than the longest row."""
    return np.minimum(start, float(rounds.max(initial=0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One validated cell: predicted and measured, medians over its pairs."""

    name: str
    stage_errors: Mapping[Stage, float]
    """log(predicted / measured) of the stages that count; the prediction scaled by the probes."""
    speedup_error: float | None
    """Predicted / measured speedup over plain - 1; None for plain itself."""
    repeatability: float
    """Median |log ratio| of one pair's seconds to the next one's, each over its probes."""
    unpaired: Mapping[Stage, float] = field(default_factory=dict)
    """As `stage_errors`, not scaled."""
    speedup_repeatability: float | None = None
    """As `repeatability`, of measured speedups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the gate holds. Errors are factors less one: 0.1 is a tenth too much or as much too little."""

    cells: int
    median: float
    """Of the errors of all stages that count."""
    within: float
    """Share of cells whose worst stage is within 20 %."""
    speedups: float
    """Share of cells whose speedup over plain is within 10 %."""
    repeatability: float
    speedup_repeatability: float
    passed: bool


def counts(seconds: Mapping[Stage, float]) -> list[Stage]:
    """Stages of at least 5 % of the step or half a second."""
    total = sum(seconds.values())
    return [stage for stage, value in seconds.items() if value >= STAGE_SECONDS or value >= STAGE_SHARE * total]


def judge(cells: Sequence[Cell]) -> Verdict:
    """The gate over all cells. Raises DataError where there is nothing to judge."""
    errors = [abs(error) for cell in cells for error in cell.stage_errors.values()]
    worst = [max((abs(e) for e in cell.stage_errors.values()), default=0.0) for cell in cells]
    speedups = [abs(cell.speedup_error) for cell in cells if cell.speedup_error is not None]
    if not errors or not speedups:
        raise DataError("expected cells with a stage that counts and with drafts beside plain, there are none")
    median, within = float(np.expm1(np.median(errors))), float(np.mean([w <= np.log1p(CELL_ERROR) for w in worst]))
    near = float(np.mean([s <= SPEEDUP_ERROR for s in speedups]))
    again = [cell.speedup_repeatability for cell in cells if cell.speedup_repeatability is not None]
    return Verdict(
        cells=len(cells),
        median=median,
        within=within,
        speedups=near,
        repeatability=float(np.expm1(np.median([cell.repeatability for cell in cells]))),
        speedup_repeatability=float(np.expm1(np.median(again))) if again else float("nan"),
        passed=median <= MEDIAN_ERROR and within >= CELL_SHARE and near >= CELL_SHARE,
    )


def read_cells(path: Path, profile: Profile) -> list[Cell]:
    """Cells from a file of measured pairs (`cells.jsonl`, written by the benchmark), predicted with this profile.

    Each row: name, method, k, slots, group, prompts (tokens, by rollout), run and plain (what the log of the cell's
    rollouts and of plain ones says: lengths, rounds, drafted; no plain where k = 0), and pairs of {probe_before,
    probe_after, measured: {stage: s}, plain_measured: s of the plain rollout}. Predictions are scaled by the probes'
    pace against the calibration.
    """
    if not path.is_file():
        raise DataError(f"--validate needs {path}; benchmarks/simulator_own_runs.py writes it")
    cells = [validated(json.loads(line), profile) for line in path.read_text().splitlines() if line.strip()]
    if not cells:
        raise DataError(f"{path} holds no cells")
    return cells


def validated(row: Mapping[str, Any], profile: Profile) -> Cell:
    """A row of cells as measured, beside its prediction."""
    pairs = row["pairs"]
    if len(pairs) < PAIRS:
        raise DataError(f"cell {row['name']}: expected at least {PAIRS} pairs, got {len(pairs)}")
    predicted = _predicted(row, row["run"], str(row["method"]), profile)
    measured = {Stage(stage): np.array([p["measured"][stage] for p in pairs]) for stage in pairs[0]["measured"]}
    pace = np.array([_pace(p, profile) for p in pairs])
    errors, unpaired = {}, {}
    for stage in counts({stage: float(np.median(seconds)) for stage, seconds in measured.items()}):
        with np.errstate(divide="ignore"):  # a stage that counts and is predicted as nothing fails the gate
            logs = np.log(predicted[stage] / measured[stage])
        errors[stage], unpaired[stage] = float(np.median(logs + np.log(pace))), float(np.median(logs))
    rollout = measured[Stage.ROLLOUT]
    speedup_error, speedups_again = None, None
    if "plain" in row:
        plain = _predicted(row, row["plain"], "none", profile)
        speedups = np.array([p["plain_measured"] for p in pairs]) / rollout
        ours = plain[Stage.ROLLOUT] / predicted[Stage.ROLLOUT]
        speedup_error, speedups_again = float(np.median(ours / speedups - 1.0)), _against_next(speedups)
    return Cell(
        name=str(row["name"]),
        stage_errors=errors,
        unpaired=unpaired,
        speedup_error=speedup_error,
        repeatability=_against_next(rollout / pace),
        speedup_repeatability=speedups_again,
    )


def _predicted(row: Mapping[str, Any], log: Mapping[str, Any], method: str, profile: Profile) -> dict[Stage, float]:
    lengths = np.array(log["lengths"], dtype=float)
    recorded = RecordedStep(
        step=1,
        seconds={},
        lengths=lengths,
        prompts=np.array(row["prompts"], dtype=float),
        rounds=np.array(log["rounds"], dtype=float),
        drafted={int(k): float(share) for k, share in log["drafted"].items()},
    )
    return replay_step(recorded, profile, method, slots=int(row["slots"]), group=int(row["group"]))


def _against_next(values: Floats) -> float:
    return float(np.median(np.abs(np.diff(np.log(values)))))


def _pace(pair: Mapping[str, Any], profile: Profile) -> float:
    """How much slower the machine was than while it was calibrated."""
    if not profile.probe_s:
        return 1.0
    return float((pair["probe_before"] + pair["probe_after"]) / 2.0 / profile.probe_s)
