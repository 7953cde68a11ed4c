"""Start from what the user has: read a plain run's log, fit the three constants a log can tell, show what is left.

Known logs: our metrics.jsonl, verl (`timing_s/*`, `response_length/*`), TRL (`completions/*`, `profiling/*`), NeMo RL
(`timing/train/*` or its printed "generation: 32.5s" lines). Fitted: host time (to the rollout stage), MFU (train and
logprob), the fixed part of a refit. Everything else stays as the scenario says.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import float_info

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from scipy.optimize import brentq
from scipy.special import ndtr

from leadout.errors import DataError
from leadout.records import Stage
from leadout.sim.inputs import set_value
from leadout.sim.lengths import LengthLaw
from leadout.sim.project import Projection, project
from leadout.sim.ranges import plain_twin
from leadout.sim.resolve import resolve_gpu
from leadout.sim.scenario import Scenario
from leadout.sim.sections import Baseline
from leadout.sim.setup import Workbench
from leadout.sim.shapes import find_model
from leadout.sim.stages import FIXED_S, default_mfu

KEYS: dict[str, tuple[str, ...]] = {
    "data": ("seconds/data", "timing/train/data_processing", "data_processing"),
    "refit": (
        "seconds/refit",
        "timing_s/update_weights",
        "timing_s/reshard",
        "timing/train/prepare_for_generation/total",
        "timing/train/weight_sync",
        "prepare_for_generation",
        "refit",
        "weight_sync",
    ),
    "rollout": (
        "seconds/rollout",
        "timing_s/gen",
        "timing/train/generation",
        "profiling/Time taken: GRPOTrainer.vLLM.generate",
        "profiling/Time taken: GRPOTrainer.transformers.generate",
        "profiling/Time taken: GRPOTrainer._generate",
        "generation",
    ),
    "reward": ("seconds/reward", "timing_s/reward", "timing/train/reward_calculation"),
    "logprob": (
        "seconds/logprob",
        "timing_s/old_log_prob",
        "timing_s/ref",
        "timing/train/policy_and_reference_logprobs",
        "profiling/Time taken: GRPOTrainer._get_per_token_logps_and_entropies",
        "policy_and_reference_logprobs",
        "logprobs",
    ),
    "train": (
        "seconds/train",
        "timing_s/update_actor",
        "timing_s/update_critic",
        "timing/train/policy_training",
        "profiling/Time taken: GRPOTrainer.compute_loss",
        "policy_training",
    ),
}
"""Log keys of each stage; verl's that are present are added up (reference and old log-probabilities)."""
MEAN_LENGTH = ("completions/mean_length", "response_length/mean", "train/mean_gen_tokens_per_sample", "mean_gen_tokens")
MAX_LENGTH = ("completions/max_length", "response_length/max", "max_gen_tokens")
CLIP_RATIO = ("completions/clipped_ratio", "response_length/clip_ratio", "truncation_rate")
HOST_BOUNDS = (0.0, 0.2)
_VERL = re.compile(r"([A-Za-z_][\w./]*):(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?=\s|$)")
_NEMO = re.compile(r"(?:•|\*|-)?\s*([a-z_]+):\s*(\d+(?:\.\d+)?)s\b")


def rows_of(text: str) -> list[dict[str, float]]:
    """Numbers by key, one mapping a step: JSON lines, printed dicts, verl's console lines, NeMo RL's timing block."""
    rows: list[dict[str, float]] = []
    block: dict[str, float] = {}
    for line in text.splitlines():
        row = _mapping(line.strip())
        if row is None:
            pairs = _VERL.findall(line.replace(" - ", "  ")) if "timing_s/" in line else []
            row = {key: float(value) for key, value in pairs}
        if row:
            rows.append(row)
            continue
        found = _NEMO.search(line)
        if found:
            if found[1] in block:
                rows.append(block)
                block = {}
            block[found[1]] = float(found[2])
    if block:
        rows.append(block)
    return rows


def _mapping(line: str) -> dict[str, float] | None:
    if not line.startswith("{"):
        return None
    try:
        data = json.loads(line)
    except json.JSONDecodeError:
        try:
            data = ast.literal_eval(line)
        except (ValueError, SyntaxError):
            return None
    if not isinstance(data, dict):
        return None
    return {str(k): float(v) for k, v in data.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _first(row: Mapping[str, float], keys: Iterable[str]) -> float | None:
    return next((row[key] for key in keys if key in row), None)


def read_baseline(path: Path) -> Baseline:
    """Means over the steps of a log, the first one left out when there are more than two."""
    if not path.is_file():
        raise DataError(f"--baseline: no such file {path}")
    rows = [row for row in rows_of(path.read_text()) if _stage_seconds(row)]
    if not rows:
        raise DataError(
            f"--baseline: {path} holds no stage times; expected leadout metrics.jsonl, verl timing_s/*, "
            "TRL profiling/* or NeMo RL timing lines"
        )
    if any("exposed/rollout" in row for row in rows):
        raise DataError(
            f"--baseline: {path} is of an asynchronous run, whose stages ran beside each other; expected one with "
            "pipeline.mode: sync"
        )
    rows = rows[1:] if len(rows) > 2 else rows
    for row in rows:
        _check_row(row, path)
    seconds: dict[str, float] = {}
    for stage in KEYS:
        values = [found[stage] for found in map(_stage_seconds, rows) if stage in found]
        if values:
            seconds[stage] = float(np.mean(values))
    means = {}
    for name, keys in (("mean_length", MEAN_LENGTH), ("max_length", MAX_LENGTH), ("clip_ratio", CLIP_RATIO)):
        values = [value for row in rows if (value := _first(row, keys)) is not None]
        if values:
            means[name] = float(np.mean(values))
    return Baseline.model_validate({"seconds": seconds, **means})


def _check_row(row: Mapping[str, float], path: Path) -> None:
    """Raise DataError on a number of a log that cannot be one: negative seconds, a share above 1, no number at all."""
    for key, value in row.items():
        share = key in CLIP_RATIO
        known = share or key in (*MEAN_LENGTH, *MAX_LENGTH) or any(key in keys for keys in KEYS.values())
        if known and not 0.0 <= value <= (1.0 if share else float_info.max):
            expected = "a share in [0, 1]" if share else "a number >= 0"
            raise DataError(f"--baseline: {path}: {key} must be {expected}, got {value:g}")


def _stage_seconds(row: Mapping[str, float]) -> dict[str, float]:
    out: dict[str, float] = {}
    for stage, keys in KEYS.items():
        present = [row[key] for key in keys if key in row]
        if present:
            additive = any(key.startswith("timing_s/") and key in row for key in keys)
            out[stage] = sum(present) if additive else present[0]
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A scenario fitted to a baseline, with what is left over."""

    scenario: Scenario
    """With the fitted constants, speculation as the user wrote it."""
    plain: Projection
    measured: Mapping[Stage, float]
    constants: Mapping[str, float]
    """What was fitted."""

    def residual(self, stage: Stage) -> float:
        """Predicted minus measured seconds."""
        return self.plain.seconds[stage] - self.measured[stage]


def fit_baseline(scenario: Scenario, baseline: Baseline, bench: Workbench | None = None) -> Fitted:
    """Fit host time, MFU and refit of the plain twin to the measured stages."""
    bench = bench or Workbench()
    measured = {Stage(name): value for name, value in baseline.seconds.items()}
    constants: dict[str, float] = {}
    scenario = _with_lengths(scenario, baseline)
    if Stage.DATA in measured:
        scenario = scenario.model_copy(update={"data_s": measured[Stage.DATA]})
    plain, start = project(plain_twin(scenario), bench), scenario.training
    default = default_mfu(resolve_gpu(scenario.gpu), find_model(scenario.model))
    for stage, field in ((Stage.TRAIN, "mfu"), (Stage.LOGPROB, "logprob_mfu")):
        if measured.get(stage) and plain.seconds[stage] > 0:
            now = getattr(start, field) or start.mfu or default
            fixed = scenario.training.extra_s if stage is Stage.TRAIN else 0.0
            work = (plain.seconds[stage] - fixed) * now
            value = float(np.clip(work / max(measured[stage] - fixed, 1e-9), 1e-3, 1.0))
            scenario = set_value(scenario, f"training.{field}", value)
            constants[f"training.{field}"] = value
        elif stage is Stage.LOGPROB and "training.mfu" in constants and scenario.training.logprob_mfu is None:
            scenario = set_value(scenario, "training.logprob_mfu", constants["training.mfu"])
    if Stage.REFIT in measured:
        moving = plain.seconds[Stage.REFIT] - _fixed(scenario)
        value = max(measured[Stage.REFIT] - moving, 0.0)
        scenario = set_value(scenario, "refit.fixed_s", value)
        constants["refit.fixed_s"] = value
    if measured.get(Stage.ROLLOUT):
        value = _fit_host(scenario, measured[Stage.ROLLOUT], bench)
        scenario = set_value(scenario, "engine.host_s", value)
        constants["engine.host_s"] = value
    return Fitted(scenario=scenario, plain=project(plain_twin(scenario), bench), measured=measured, constants=constants)


def _fixed(scenario: Scenario) -> float:
    method = scenario.refit.method or ("broadcast" if scenario.separate else "copy")
    return scenario.refit.fixed_s if scenario.refit.fixed_s is not None else FIXED_S[method]


def _fit_host(scenario: Scenario, target: float, bench: Workbench) -> float:
    """Host seconds a step at which the rollout stage takes `target`; a bound when none does."""

    def gap(host: float) -> float:
        return project(plain_twin(set_value(scenario, "engine.host_s", host)), bench).rollout_s - target

    low, high = HOST_BOUNDS
    if gap(low) >= 0:
        return low
    if gap(high) <= 0:
        return high
    return float(brentq(gap, low, high, xtol=1e-7))


def _with_lengths(scenario: Scenario, baseline: Baseline) -> Scenario:
    section = scenario.workload.lengths
    cap = section.cap
    if baseline.max_length is not None and baseline.clip_ratio:
        cap = int(baseline.max_length)
    mean = baseline.mean_length if baseline.mean_length is not None else section.mean
    if mean > cap:
        raise DataError(f"baseline: mean length {mean:.0f} is above the cap {cap} (workload.lengths.cap)")
    lengths = section.model_copy(update={"mean": mean, "cap": cap})
    if baseline.clip_ratio is not None and 0 < baseline.clip_ratio < 0.9:
        lengths = lengths.model_copy(update={"cv": _cv_for(mean, cap, baseline.clip_ratio)})
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"lengths": lengths})})


def _cv_for(mean: float, cap: float, clipped: float) -> float:
    """The CV whose law, cut at the cap, has this mean and this share at the cap."""

    def gap(cv: float) -> float:
        law = LengthLaw(mean=mean, cv=cv, cap=int(cap))
        return float(ndtr((law.mu - np.log(cap)) / law.sigma)) - clipped

    low, high = 0.02, 6.0
    if gap(low) * gap(high) > 0:
        return low if abs(gap(low)) < abs(gap(high)) else high
    return float(brentq(gap, low, high, xtol=1e-6))


def render_fit(fitted: Fitted) -> Group:
    """Measured stages beside the fitted ones, residuals, and the constants."""
    table = Table(title="baseline: plain steps", title_justify="left")
    for name in ("stage", "measured s", "fitted s", "residual s"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in Stage:
        if stage in fitted.measured:
            measured = fitted.measured[stage]
            ours = fitted.plain.seconds[stage]
            table.add_row(stage.value, f"{measured:.2f}", f"{ours:.2f}", f"{fitted.residual(stage):+.2f}")
    values = ", ".join(f"{name} = {value:.4g}" for name, value in fitted.constants.items()) or "nothing"
    lines = [f"fitted: {values}"]
    host = fitted.constants.get("engine.host_s")
    if host is not None and host in HOST_BOUNDS:
        lines.append("host time is at its bound: kernels, lengths or rows explain the rest of the rollout stage")
    return Group(table, *(Text(line) for line in lines))
