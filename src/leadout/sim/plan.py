"""Which placement, draft length and lag to rent for: a search over scenarios, the winner, the runner-up, the reasons.

Colocated layouts come first (every tensor-parallel size that fits x every draft length); the best of them fixes the
layout with which separate placements and lags are tried. Winner and runner-up are then compared under the same draws of
the uncertain inputs, and when their ratio's range holds 1 the simpler one is recommended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import qmc

from leadout.errors import CapacityError, LayoutError
from leadout.records import Stage
from leadout.sim.inputs import active_inputs, between, set_value
from leadout.sim.profile import load_profile
from leadout.sim.project import Projection, project
from leadout.sim.resolve import resolve_gpu, resolve_tables
from leadout.sim.scenario import Scenario
from leadout.sim.sections import Pipeline, Speculation
from leadout.sim.setup import Workbench, acceptance_law, engine_terms, length_law
from leadout.sim.shapes import draft_shape, find_model

TENSOR_PARALLEL = (1, 2, 4, 8, 16)
DRAFT_LENGTHS: tuple[int | str, ...] = (0, 1, 3, 5, 7, "auto")
SHARES = (0.5, 0.625, 0.75, 0.875)
PAIRED_DRAWS = 10

Refusal = CapacityError | LayoutError
"""Why a layout is no candidate: it does not fit, or does not divide the model. Other errors are of the input."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A scenario that was tried."""

    projection: Projection

    @property
    def scenario(self) -> Scenario:
        """What was projected."""
        return self.projection.scenario

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.projection.step_s

    @property
    def label(self) -> str:
        """Placement, layout, k and lag in words."""
        scenario = self.scenario
        section = scenario.speculation
        k = "plain" if section is None else f"k = {section.num_speculative_tokens}"
        if scenario.separate:
            where = f"{scenario.generation_gpus} GPUs generate, {scenario.training_gpus} train"
        else:
            where = f"{scenario.gpus} GPUs shared"
        lag = f"lag {scenario.pipeline.max_staleness}" if scenario.pipeline.mode == "async" else "synchronous"
        return f"{where}, tensor parallel {scenario.generation.tensor_parallel}, {k}, {lag}"

    @property
    def complexity(self) -> tuple[int, int, int]:
        """What is simpler to run sorts first: lag, placement, drafter."""
        scenario = self.scenario
        return (scenario.pipeline.max_staleness, int(scenario.separate), int(scenario.speculation is not None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What the search recommends."""

    best: Candidate
    runner_up: Candidate
    ratio: tuple[float, float, float]
    """Runner-up over best: middle and 5-95 % under shared draws of the inputs."""
    tried: tuple[Candidate, ...]
    """By step time."""
    refused: int
    """Layouts that do not fit or do not divide the model."""
    reasons: tuple[str, ...]


def plan(scenario: Scenario, max_lag: int = 2) -> Plan:
    """Search; raises what `simulate` would raise on the same input, and CapacityError when nothing fits."""
    check_input(scenario)
    bench, lean = Workbench(), scenario.model_copy(update={"draws": 1})
    tried, refusals = _search(_colocated(lean), bench)
    layouts = sorted(tried, key=lambda item: item.step_s)
    more, others = _search(_separate(lean, layouts, max_lag), bench)
    tried, refusals = [*tried, *more], [*refusals, *others]
    if not tried:
        raise _nothing(scenario, refusals)
    tried.sort(key=lambda item: item.step_s)
    best, runner_up = tried[0], _runner_up(tried)
    low, middle, high = _paired(best.scenario, runner_up.scenario, bench)
    if low <= 1.0 and runner_up.complexity < best.complexity:
        best, runner_up = runner_up, best
        low, middle, high = 1 / high, 1 / middle, 1 / low
    return Plan(
        best=best,
        runner_up=runner_up,
        ratio=(middle, low, high),
        tried=tuple(tried),
        refused=len(refusals),
        reasons=tuple(_reasons(best, tried)),
    )


def check_input(scenario: Scenario) -> None:
    """Resolve once what no layout changes: GPU, model, tables, drafter, laws, ranges; raises as `simulate` does."""
    resolve_gpu(scenario.gpu)
    shape = find_model(scenario.model)
    resolve_tables(scenario.tables)
    section = scenario.speculation or Speculation()
    draft_shape(section.method, shape, section.draft_vocab, section.model)
    engine_terms(scenario)
    length_law(scenario)
    acceptance_law(section)
    if scenario.profile is not None:
        load_profile(scenario.profile)
    active_inputs(scenario.model_copy(update={"speculation": section}))


def _search(variants: Iterable[Scenario], bench: Workbench) -> tuple[list[Candidate], list[Refusal]]:
    """Candidates, and why the other variants are none."""
    found = [_try(variant, bench) for variant in variants]
    return (
        [item for item in found if isinstance(item, Candidate)],
        [item for item in found if not isinstance(item, Candidate)],
    )


def _nothing(scenario: Scenario, refusals: list[Refusal]) -> Refusal:
    """The error when no variant can run: the last one that does not fit, else the first that does not divide."""
    unfit = [item for item in refusals if isinstance(item, CapacityError)]
    if not unfit:
        return refusals[0]
    return CapacityError(f"no layout of {scenario.model} fits {scenario.gpus} GPUs; the last one tried: {unfit[-1]}")


def _draft_lengths(scenario: Scenario) -> tuple[int | str, ...]:
    """Draft lengths to try: of a calibrated machine those that were measured."""
    if scenario.profile is None:
        return DRAFT_LENGTHS
    section = scenario.speculation or Speculation()
    return (*load_profile(scenario.profile).draft_lengths(section.method), "auto")


def _with_k(scenario: Scenario, k: int | str) -> Scenario:
    if k == 0:
        kept = {field: ends for field, ends in scenario.ranges.items() if not field.startswith("speculation.")}
        return scenario.model_copy(update={"speculation": None, "ranges": kept})
    section = scenario.speculation or Speculation()
    return scenario.model_copy(update={"speculation": section.model_copy(update={"num_speculative_tokens": k})})


def _colocated(scenario: Scenario) -> Iterable[Scenario]:
    # A calibrated machine was measured in one layout.
    sizes = TENSOR_PARALLEL if scenario.profile is None else (scenario.generation.tensor_parallel,)
    for tp in sizes:
        if scenario.gpus % tp and scenario.profile is None:
            continue
        generation = scenario.generation.model_copy(update={"gpus": None, "tensor_parallel": tp, "data_parallel": 1})
        shared = scenario.model_copy(
            update={
                "generation": generation,
                "training": scenario.training.model_copy(update={"gpus": None}),
                "pipeline": Pipeline(),
                "refit": scenario.refit.model_copy(update={"method": None}),
            }
        )
        yield from (_with_k(shared, k) for k in _draft_lengths(scenario))


def _separate(scenario: Scenario, layouts: list[Candidate], max_lag: int) -> Iterable[Scenario]:
    if not layouts or scenario.gpus < 2 or scenario.profile is not None:
        return
    tp = layouts[0].scenario.generation.tensor_parallel
    fastest = next((item for item in layouts if item.scenario.speculation is not None), layouts[0])
    k = fastest.scenario.speculation.num_speculative_tokens if fastest.scenario.speculation is not None else 0
    seen = set()
    for share in SHARES:
        gpus = int(scenario.gpus * share) // tp * tp
        if gpus in seen or not 0 < gpus < scenario.gpus:
            continue
        seen.add(gpus)
        generation = scenario.generation.model_copy(update={"gpus": gpus, "tensor_parallel": tp, "data_parallel": 1})
        for lag in range(1, max_lag + 1):
            base = scenario.model_copy(
                update={
                    "generation": generation,
                    "training": scenario.training.model_copy(update={"gpus": None}),
                    "pipeline": Pipeline(mode="async", max_staleness=lag),
                    "refit": scenario.refit.model_copy(update={"method": "in_flight"}),
                }
            )
            for length in dict.fromkeys((k, 0) if lag == 1 else (k,)):
                yield _with_k(base, length)


def _try(scenario: Scenario, bench: Workbench, *, quick: bool = False) -> Candidate | Refusal:
    try:
        return Candidate(projection=project(scenario, bench, quick=quick))
    except (CapacityError, LayoutError) as refusal:
        return refusal


def _runner_up(tried: list[Candidate]) -> Candidate:
    """The best one that differs in placement, lag, or in drafting at all (else the second)."""
    best = tried[0]
    others = [item for item in tried[1:] if item.complexity != best.complexity]
    return others[0] if others else tried[min(1, len(tried) - 1)]


def _paired(one: Scenario, other: Scenario, bench: Workbench) -> tuple[float, float, float]:
    """5 %, middle, 95 % of other's step over one's, both under the same draws of the inputs."""
    inputs = {item.field: item for item in [*active_inputs(one), *active_inputs(other)]}
    fields = list(inputs.values())
    sampler = qmc.LatinHypercube(d=max(len(fields), 1), rng=np.random.default_rng(one.seed + 29))
    ratios = []
    for unit in sampler.random(PAIRED_DRAWS):
        pair = []
        for scenario in (one, other):
            own = {item.field for item in active_inputs(scenario)}
            for item, u in zip(fields, unit, strict=False):
                if item.field in own:
                    scenario = set_value(scenario, item.field, between(item, float(u), scenario))
            pair.append(_try(scenario, bench, quick=True))
        here, there = pair
        if isinstance(here, Candidate) and isinstance(there, Candidate):
            ratios.append(there.step_s / here.step_s)
    low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95)) if ratios else (1.0, 1.0, 1.0)
    return float(low), float(middle), float(high)


def _reasons(best: Candidate, tried: list[Candidate]) -> list[str]:
    projection = best.projection
    share = projection.exposed[Stage.ROLLOUT] / projection.step_s
    longest = max(projection.exposed.items(), key=lambda pair: pair[1])
    out = [
        f"generation is {share:.0%} of the step, the largest exposed stage is {longest[0].value} "
        f"({longest[1]:.1f} of {best.step_s:.1f} s)"
    ]
    twins = [item for item in tried if _differs_only_in_k(item.scenario, best.scenario) and item is not best]
    for item in sorted(twins, key=lambda item: item.step_s)[:3]:
        section = item.scenario.speculation
        k = "plain" if section is None else f"k = {section.num_speculative_tokens}"
        out.append(f"{k} here: {item.step_s:.1f} s a step")
    shared = [item for item in tried if not item.scenario.separate]
    separate = [item for item in tried if item.scenario.separate]
    if best.scenario.separate and shared:
        out.append(f"best shared placement: {shared[0].step_s:.1f} s ({shared[0].label})")
    elif separate:
        out.append(f"best separate placement: {separate[0].step_s:.1f} s ({separate[0].label})")
    if best.scenario.speculation is not None:
        out.append(
            f"acceptance length {projection.acceptance_length:.2f} at mean k {projection.mean_k:.1f}; a larger "
            "acceptance or a longer tail makes drafting pay more, fuller GPUs make it pay less"
        )
    return out


def _differs_only_in_k(one: Scenario, other: Scenario) -> bool:
    return (
        one.generation == other.generation and one.pipeline == other.pipeline and one.speculation != other.speculation
    )
