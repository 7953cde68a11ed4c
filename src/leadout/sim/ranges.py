"""How sure: stated ranges of the inputs, carried to every headline.

Inputs are drawn together (Latin hypercube, fixed seed), every draw projects the scenario and its plain twin on the same
lengths, and a headline's range is the 5-95 % of the draws. The three inputs that widen it most are found by moving one
at a time from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import qmc

from leadout.errors import CapacityError
from leadout.records import Stage
from leadout.sim.inputs import Input, active_inputs, between, set_value
from leadout.sim.project import Projection, project
from leadout.sim.scenario import Scenario
from leadout.sim.setup import Workbench

DRAWS = 24
LEVELS = (0.05, 0.95)
NO_DIFFERENCE = "no difference this model can see"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A headline with its 5-95 % range and what widens it."""

    value: float
    low: float
    high: float
    widest: tuple[tuple[str, float], ...]
    """(field, spread of the headline from end to end of the field's range), three of them."""


def plain_twin(scenario: Scenario) -> Scenario:
    """The same scenario without speculation."""
    return scenario.model_copy(update={"speculation": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Headlines of a scenario against its plain twin."""

    values: Mapping[str, float]


def compare(projection: Projection, plain: Projection) -> dict[str, float]:
    """step_s, rollout_s, their speedups, and the cost of a round in plain steps."""
    rollout = plain.rollout_s / projection.rollout_s
    return {
        "step_s": projection.step_s,
        "rollout_s": projection.rollout_s,
        "rollout_speedup": rollout,
        "step_speedup": plain.step_s / projection.step_s,
        "round_cost": projection.acceptance_length / rollout,
    }


def headline(scenario: Scenario, bench: Workbench, *, quick: bool = True) -> dict[str, float]:
    """Headlines of one scenario; `quick` where only their ratios matter."""
    projection = project(scenario, bench, quick=quick)
    plain = project(plain_twin(scenario), bench, quick=quick) if scenario.speculation is not None else projection
    return compare(projection, plain)


def headline_ranges(scenario: Scenario, bench: Workbench | None = None, draws: int | None = None) -> dict[str, Range]:
    """Every headline with its range; draws that do not fit in memory are left out."""
    bench = bench or Workbench()
    lean = scenario.model_copy(update={"draws": 1})
    inputs = active_inputs(scenario)
    sampler = qmc.LatinHypercube(d=max(len(inputs), 1), rng=np.random.default_rng(scenario.seed + 17))
    samples: list[dict[str, float]] = []
    for unit in sampler.random(draws or DRAWS):
        drawn = lean
        for item, u in zip(inputs, unit, strict=False):
            drawn = set_value(drawn, item.field, between(item, float(u), lean))
        found = _try(lambda drawn=drawn: headline(drawn, bench))  # type: ignore[misc]
        if found is not None:
            samples.append(found)
    centre, lean_centre = headline(scenario, bench, quick=False), headline(lean, bench)
    moved = {item.field: _ends(lean, item, bench) for item in inputs}
    return {name: _range(name, value, lean_centre[name], samples, moved) for name, value in centre.items()}


def _range(
    name: str,
    value: float,
    lean: float,
    samples: list[dict[str, float]],
    moved: Mapping[str, tuple[dict[str, float], ...]],
) -> Range:
    drawn = np.array([sample[name] for sample in samples]) * (value / lean)
    low, high = np.quantile(drawn, LEVELS) if len(drawn) else (value, value)
    spreads = {
        field: max(end[name] for end in ends) - min(end[name] for end in ends) for field, ends in moved.items() if ends
    }
    widest = sorted(spreads.items(), key=lambda pair: -pair[1])[:3]
    return Range(value=value, low=min(float(low), value), high=max(float(high), value), widest=tuple(widest))


def _ends(scenario: Scenario, item: Input, bench: Workbench) -> tuple[dict[str, float], ...]:
    out = []
    for u in (0.0, 1.0):
        moved = set_value(scenario, item.field, between(item, u, scenario))
        found = _try(lambda moved=moved: headline(moved, bench))  # type: ignore[misc]
        if found is not None:
            out.append(found)
    return tuple(out)


def _try(make: Callable[[], dict[str, float]]) -> dict[str, float] | None:
    try:
        return make()
    except CapacityError:
        return None


def verdict(ratio: Range) -> str:
    """What a speedup's range allows to say."""
    if ratio.low > 1.0:
        return "faster"
    if ratio.high < 1.0:
        return "slower"
    return NO_DIFFERENCE


STAGE_ORDER = (Stage.DATA, Stage.REFIT, Stage.ROLLOUT, Stage.REWARD, Stage.LOGPROB, Stage.TRAIN)
"""The paper's order."""
