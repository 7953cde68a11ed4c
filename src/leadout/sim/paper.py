"""The reference paper's measured 8B runs against the model: what is assumed, fitted, predicted.

Source: arXiv 2604.26779, Tables 1-5. Setup: Qwen3-8B, 32 GB200, colocated, bf16, EAGLE-3. Not published: prompts a
step, lengths, layout. Assumed here: 2,048 rollouts of at most 8,192 tokens, one GPU a replica (64 rows each), which is
what 31.4 s of training at 33 % MFU on padded sequences implies; thinking lengths with CV .55 and
base-model lengths with CV 1.0 (see `LAWS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from leadout.sim.acceptance import from_mean_length
from leadout.sim.drain import Intervals
from leadout.sim.generate import generate, make_tables
from leadout.sim.kernel_tables import Floats
from leadout.sim.rollout_phase import draw_lengths, run_rollouts
from leadout.sim.scenario import Scenario, parse
from leadout.sim.setup import Setup, engine_terms, prepare
from leadout.sim.step_model import StepModel

WORKLOADS = ("Think", "Zero")
PLAIN_S = {"Think": 133.6, "Zero": 100.0}
"""Generation seconds without speculation."""
SPEEDUP = {
    ("Think", 3): 1.53,
    ("Think", 5): 0.84,
    ("Think", 7): 0.71,
    ("Zero", 3): 1.77,
    ("Zero", 5): 1.44,
    ("Zero", 7): 1.21,
}
"""Generation speedup of EAGLE-3 by workload and k."""
LENGTH = {
    ("Think", 3): 2.77,
    ("Think", 5): 3.23,
    ("Think", 7): 3.48,
    ("Zero", 3): 3.32,
    ("Zero", 5): 4.35,
    ("Zero", 7): 5.06,
}
"""Acceptance lengths (inputs)."""
LAWS = {"Think": {"mean": 5000.0, "cv": 0.55}, "Zero": {"mean": 1300.0, "cv": 1.0}}
"""Assumed lengths. The CVs are the defaults for thinking and base models; the two means were chosen among some 30
combinations after seeing the targets (docs/simulator.md prints what others give)."""
STAGES = {
    "Think": {"data": 0.3, "refit": 2.1, "rollout": 133.6, "logprob": 17.9, "train": 31.4},
    "Zero": {"data": 0.2, "refit": 1.9, "rollout": 100.0, "logprob": 17.8, "train": 31.3},
}
STAGES_SPEC = {
    "Think": {"data": 0.2, "refit": 1.6, "rollout": 87.0, "logprob": 18.1, "train": 30.5},
    "Zero": {"data": 0.2, "refit": 2.1, "rollout": 56.6, "logprob": 18.1, "train": 30.5},
}
VARIANTS = (
    ("DAPO offline", 3.32, 1.77, 2.77, 1.53),
    ("UltraChat offline", 2.88, 1.51, 2.40, 1.19),
    ("UltraChat online", 3.04, 1.63, 2.55, 1.26),
    ("DAPO online", 3.29, 1.78, 2.74, 1.52),
)
"""(draft at k=3, Zero length, Zero speedup, Think length, Think speedup)."""
NGRAM = {"Zero": (2.47, 0.71), "Think": (2.05, 0.51)}
FREE = {
    "host_s": (1e-4, 2e-2),
    "host_per_row_s": (1e-6, 3e-4),
    "draft_host_s": (5e-5, 1e-2),
    "attention_per_draft": (0.02, 1.0),
}
"""Engine constants that are fitted, with bounds; each preset adds its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A hypothesis of what the engine did."""

    name: str
    says: str
    engine: Mapping[str, float]
    """Fixed settings of the engine section."""
    free: Mapping[str, tuple[float, float]]
    """Constants fitted to the measured numbers, with bounds."""


PRESETS = {
    "roofline": Preset(
        name="pure roofline",
        says="kernels from the hardware's peak rates; no host time, no graphs, no draft overhead",
        engine={
            "host_s": 0.0,
            "host_per_layer_s": 0.0,
            "host_per_row_s": 0.0,
            "draft_host_s": 0.0,
            "launch_per_layer_s": 0.0,
            "attention_per_draft": 0.0,
            "max_num_seqs": 128,
        },
        free={},
    ),
    "h3": Preset(
        name="H3: CUDA-graph ceiling",
        says="steps of more than 256 tokens run outside the CUDA graph (max_num_seqs 128)",
        engine={"max_num_seqs": 128, "host_per_layer_s": 0.0},
        free={**FREE, "launch_s": (5e-3, 9e-2)},
    ),
    "h5": Preset(
        name="H5: attention fallback",
        says="attention falls to the prefill kernel above 4 queries a row; graphs cover every step",
        engine={"max_num_seqs": 256, "host_per_layer_s": 0.0, "attention_fallback_above": 4},
        free={**FREE, "attention_fallback_factor": (1.5, 12.0)},
    ),
}
SEPARATES = (
    "What would tell H3 from H5: capture graphs up to rows x (1 + k) tokens (H3 recovers, H5 does not); sweep rows at "
    "fixed k (H3 steps at ceiling / (k + 1), H5 is smooth); k = 4 (H5 pays its fallback, H3 only above 51 rows)."
)


def scenario(
    workload: str,
    engine: Mapping[str, float],
    *,
    roofline: bool = False,
    k: int = 0,
    laws: Mapping[str, Mapping[str, float]] = LAWS,
) -> Scenario:
    """One of the paper's synchronous runs."""
    speculation = None
    if k:
        speculation = {
            "method": "eagle3",
            "num_speculative_tokens": k,
            "acceptance": {"mean_length": LENGTH[workload, k], "at_k": k},
        }
    return parse(
        {
            "name": f"RL-{workload}, k={k}",
            "model": "Qwen3-8B",
            "gpu": "GB200",
            "gpus": 32,
            "tables": "none" if roofline else "shipped",
            "workload": {
                "num_prompts": 64,
                "num_generations": 32,
                "prompt_length": 150,
                "lengths": {**laws[workload], "cap": 8192},
            },
            "engine": dict(engine),
            "speculation": speculation,
            "training": {"packed": False, "mfu": 0.33, "recompute_activations": False},
            "draws": 1,
        }
    )


class PaperRuns:
    """The paper's runs with lengths drawn once, to be re-timed under many engine constants."""

    def __init__(self, *, roofline: bool = False, laws: Mapping[str, Mapping[str, float]] = LAWS) -> None:
        self._setups: dict[tuple[str, int], Setup] = {}
        self._intervals: dict[str, tuple[Intervals, Floats]] = {}
        for workload in WORKLOADS:
            for k in (0, 3, 5, 7):
                self._setups[workload, k] = prepare(
                    scenario(workload, {"max_num_seqs": 256}, roofline=roofline, k=k, laws=laws)
                )
            plain = self._setups[workload, 0]
            phase = run_rollouts(plain, draw_lengths(plain, 0))
            self._intervals[workload] = (phase.generation.intervals, phase.replica_N)

    def seconds(self, workload: str, k: int, engine: Mapping[str, float], length: float | None = None) -> float:
        """Generation seconds of a run under these engine constants; `length` replaces the acceptance length."""
        setup = self._setups[workload, k]
        section = setup.scenario.engine.model_validate(dict(engine))
        terms = engine_terms(setup.scenario.model_copy(update={"engine": section}))
        assert isinstance(setup.model, StepModel)
        model = replace(setup.model, engine=terms)
        law = from_mean_length(length if length is not None else LENGTH[workload, k], k) if k else None
        intervals, owner = self._intervals[workload]
        run = generate(intervals, make_tables(model, 64), law, k)
        return float(np.bincount(owner.astype(int), weights=run.decode_s_N + run.prefill_s_N).max())

    def speedup(self, workload: str, k: int, engine: Mapping[str, float]) -> float:
        """Plain over speculative seconds."""
        return self.seconds(workload, 0, engine) / self.seconds(workload, k, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A preset with its constants fitted."""

    preset: Preset
    engine: dict[str, float]
    constants: dict[str, float]
    """The fitted ones."""
    targets: int
    """Numbers they were fitted to."""
    plain: dict[str, float]
    speedup: dict[tuple[str, int], float]

    def worst_speedup(self) -> float:
        """Largest relative error of the six speedups."""
        return max(abs(self.speedup[cell] / SPEEDUP[cell] - 1) for cell in SPEEDUP)

    def worst_plain(self) -> float:
        """Largest relative error of the two plain times."""
        return max(abs(self.plain[name] / PLAIN_S[name] - 1) for name in WORKLOADS)


def evaluate(preset: Preset, runs: PaperRuns, constants: Mapping[str, float], targets: int) -> Fit:
    """Every number of the paper under these constants."""
    engine = {**preset.engine, **constants}
    plain = {name: runs.seconds(name, 0, engine) for name in WORKLOADS}
    speedup = {(name, k): plain[name] / runs.seconds(name, k, engine) for name, k in SPEEDUP}
    return Fit(preset=preset, engine=engine, constants=dict(constants), targets=targets, plain=plain, speedup=speedup)


def fit(preset: Preset, runs: PaperRuns, cells: Sequence[tuple[str, int]] = tuple(SPEEDUP)) -> Fit:
    """Fit the preset's free constants to both plain times and these speedups (least squares of log ratios)."""
    names = list(preset.free)
    if not names:
        return evaluate(preset, runs, {}, 0)
    low, high = (np.log([preset.free[name][side] for name in names]) for side in (0, 1))

    def residuals(x: Floats) -> Floats:
        engine = {**preset.engine, **dict(zip(names, np.exp(x).tolist(), strict=True))}
        plain = {name: runs.seconds(name, 0, engine) for name in WORKLOADS}
        out = [0.7 * np.log(plain[name] / PLAIN_S[name]) for name in WORKLOADS]
        out += [np.log(plain[name] / runs.seconds(name, k, engine) / SPEEDUP[name, k]) for name, k in cells]
        prior = [0.01 * (value - 0.5 * (a + b)) for value, a, b in zip(x, low, high, strict=True)]
        return np.array([*out, *prior])

    best = None
    for start in (0.5,):
        found = least_squares(residuals, low + start * (high - low), bounds=(low, high), diff_step=1e-3, max_nfev=40)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    constants = dict(zip(names, np.exp(best.x).tolist(), strict=True))
    return evaluate(preset, runs, constants, len(cells) + len(WORKLOADS))
