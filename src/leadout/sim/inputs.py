"""Which inputs of a scenario are uncertain, and between which values.

Defaults come from publications (`INPUTS`); what the scenario states or a baseline fitted ranges 10 % around its value,
and a scenario's `ranges` section replaces either. `ranges` carries them to the headlines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pydantic import BaseModel

from leadout.errors import ConfigError
from leadout.sim.lengths import MAX_CV
from leadout.sim.resolve import resolve_gpu
from leadout.sim.scenario import Scenario, parse
from leadout.sim.sections import Acceptance, Speculation
from leadout.sim.setup import length_law
from leadout.sim.shapes import find_model
from leadout.sim.stages import default_mfu

GIVEN = (0.9, 1.11)
"""Range of a constant that the scenario states or a baseline fitted, in units of its value."""
USER = "given"
"""Source of a range that stands in the scenario."""
FORMS = ("conditional", "cumulative", "mean_length")
"""Forms of acceptance that leave no place for a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An uncertain input: a scenario field, its range, and where the range comes from."""

    field: str
    low: float
    high: float
    relative: bool = False
    """Range in units of the scenario's own value."""
    source: str = ""
    most: float = inf
    """Ends above are cut to it: shares of a peak."""
    least: float = 0.0
    only_stated: bool = False
    """Ranges only where the scenario states it or a baseline fitted it."""
    whole: bool = False
    """Takes whole numbers only."""


INPUTS = (
    Input(field="engine.kernel_scale", low=0.92, high=1.15, source="nine H100 points; engine versions differ by 1.25"),
    Input(field="engine.host_per_layer_s", low=0.6, high=2.5, relative=True, source="24 us a layer; BLIS fits 32"),
    Input(field="engine.host_per_row_s", low=0.7, high=4.0, relative=True, source="0.01-0.03 ms a sequence"),
    Input(field="engine.draft_host_s", low=1.0e-4, high=1.2e-3, source="one graph for the loop to a Python loop"),
    Input(field="engine.attention_per_draft", low=0.05, high=0.25, source="FlashInfer, batch 32: .14 a draft token"),
    Input(field="engine.launch_per_layer_s", low=3.0e-4, high=9.0e-4, source="15-20 operators x 20-45 us"),
    Input(field="workload.lengths.mean", low=0.9, high=1.1, relative=True, source="assumed"),
    Input(
        field="workload.lengths.cv",
        low=0.75,
        high=1.3,
        relative=True,
        source="published laws: .52-.67 thinking",
        most=MAX_CV,
    ),
    Input(field="speculation.acceptance_scale", low=0.96, high=1.04, source="drafts of one model differ by 10 %"),
    Input(field="speculation.draft_vocab", low=32000, high=0, source="some drafters keep the policy's vocabulary"),
    Input(field="training.mfu", low=0.75, high=1.3, relative=True, source="starting points .35-.45, .25-.35", most=1.0),
    Input(field="refit.fixed_s", low=0.5, high=3.0, source="published refits of one model differ by 2"),
    Input(
        field="refit.bandwidth_fraction", low=0.2, high=0.6, source="20-40 % of a link; newer transports more", most=1.0
    ),
    Input(field="training.logprob_mfu", low=GIVEN[0], high=GIVEN[1], relative=True, only_stated=True, most=1.0),
    Input(field="engine.host_s", low=GIVEN[0], high=GIVEN[1], relative=True, only_stated=True),
    Input(field="engine.launch_s", low=GIVEN[0], high=GIVEN[1], relative=True, only_stated=True),
    Input(field="engine.ngram_host_per_row_s", low=GIVEN[0], high=GIVEN[1], relative=True, only_stated=True),
    Input(field="engine.sampler_passes", low=GIVEN[0], high=GIVEN[1], relative=True, only_stated=True),
    Input(
        field="engine.attention_fallback_factor",
        low=GIVEN[0],
        high=GIVEN[1],
        relative=True,
        only_stated=True,
        least=1.0,
    ),
)
"""Default ranges; a scenario's `ranges` section replaces or adds to them, in absolute values."""


def get_value(scenario: Scenario, dotted: str) -> Any:
    """Value of a dotted field; None when a section on the way is absent."""
    node: Any = scenario
    for part in dotted.split(".") if dotted else ():
        if node is None:
            return None
        if not isinstance(node, BaseModel) or part not in type(node).model_fields:
            raise ConfigError(f"ranges: unknown field {dotted}")
        node = getattr(node, part)
    return node


def _is_set(scenario: Scenario, dotted: str) -> bool:
    """Whether the scenario moves this field off its default (by hand or by a fit)."""
    *parents, leaf = dotted.split(".")
    node = get_value(scenario, ".".join(parents))
    return isinstance(node, BaseModel) and getattr(node, leaf) != type(node).model_fields[leaf].default


def set_value(scenario: Scenario, dotted: str, value: object) -> Scenario:
    """Copy of the scenario with one dotted field replaced; whole-number fields take the nearest one."""

    def replaced(node: BaseModel, parts: list[str]) -> BaseModel:
        head, *rest = parts
        present = getattr(node, head)
        new = round(value) if isinstance(present, int) and isinstance(value, float) else value
        inner = new if not rest else replaced(present, rest)
        return node.model_copy(update={head: inner})

    out = replaced(scenario, dotted.split("."))
    assert isinstance(out, Scenario)
    return out


def active_inputs(scenario: Scenario) -> list[Input]:
    """Ranges in absolute values, of the fields this scenario has; raises ConfigError on a wrong `ranges` section."""
    chosen: dict[str, Input] = {}
    for item in INPUTS:
        found = _default_range(scenario, item)
        if found is not None:
            chosen[item.field] = found
    for field, (low, high) in scenario.ranges.items():
        if field.startswith("speculation.") and scenario.speculation is None:
            get_value(scenario.model_copy(update={"speculation": Speculation()}), field)
            continue  # the plain one of two that are compared
        chosen[field] = _stated_range(scenario, field, low, high)
    return list(chosen.values())


def _default_range(scenario: Scenario, item: Input) -> Input | None:
    """An entry of INPUTS in absolute values; None where this scenario does not depend on it or states it as 0."""
    field, section, engine = item.field, scenario.speculation, scenario.engine
    if field.startswith("speculation.") and section is None:
        return None
    if field.startswith("workload.lengths") and scenario.workload.lengths.file is not None:
        return None
    if field == "refit.fixed_s" and scenario.refit.method == "in_flight":
        return None
    if field == "engine.launch_per_layer_s" and engine.launch_s is not None:
        return None
    if field == "speculation.draft_vocab":
        if section is None or section.method != "eagle3" or section.draft_vocab is not None:
            return None
        return replace(item, high=float(find_model(scenario.model).vocab))
    value = get_value(scenario, field)
    given = _is_set(scenario, field) and not field.startswith("workload.")
    if given and value is not None:
        item = replace(item, low=GIVEN[0], high=GIVEN[1], relative=True, source="given in the scenario")
    elif item.only_stated:
        return None
    if field == "training.mfu" and value is None:
        value = default_mfu(resolve_gpu(scenario.gpu), find_model(scenario.model))
    if not item.relative:
        return item
    if not value:
        return None
    low, high = (min(max(end * value, item.least), item.most) for end in (item.low, item.high))
    return replace(item, low=low, high=high, relative=False)


def _stated_range(scenario: Scenario, field: str, low: float, high: float) -> Input:
    """A range of the scenario's own; raises ConfigError where its ends are no values of the field."""
    parent, _, leaf = field.rpartition(".")
    section, value = get_value(scenario, parent), get_value(scenario, field)
    if section is None:
        raise ConfigError(f"ranges.{field}: the scenario has no section {parent}")
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"ranges.{field}: expected the name of a number")
    if low > high:
        raise ConfigError(f"ranges.{field}: expected low <= high, got {low} > {high}")
    lengths = scenario.workload.lengths
    if field in ("workload.lengths.mean", "workload.lengths.cv") and lengths.file is not None:
        raise ConfigError(f"ranges.{field}: has no effect beside workload.lengths.file; take one of them out")
    if isinstance(section, Acceptance) and leaf == "rate" and section.rate is None:
        other = next((name for name in FORMS if getattr(section, name) is not None), None)
        if other is not None:
            raise ConfigError(f"ranges.{field}: has no effect beside acceptance.{other}; take one of them out")
    whole = False
    for end in (low, high):
        try:
            moved = parse(set_value(scenario, field, end).model_dump(warnings=False))
            whole = isinstance(get_value(moved, field), int)
            if parent == "workload.lengths":
                length_law(moved)
        except ConfigError as error:
            raise ConfigError(f"ranges.{field}: {error}") from None
    return Input(field=field, low=low, high=high, source=USER, whole=whole)


def between(item: Input, u: float, scenario: Scenario) -> float:
    """The value at level u of an input's range: logarithmic where the range is positive, one of two vocabularies.

    A mean length assumed from the scenario's own stays within 1 and the cap; a law with a spread has it below the cap.
    """
    if item.field == "speculation.draft_vocab":
        return round(item.low if u < 0.5 else item.high)
    value = float(item.low * (item.high / item.low) ** u) if item.low > 0 else item.low + u * (item.high - item.low)
    value = round(value) if item.whole else value
    if item.field == "workload.lengths.mean" and item.source != USER:
        lengths = scenario.workload.lengths
        most = lengths.cap if lengths.cv == 0 else max(0.97 * lengths.cap, lengths.mean)
        return min(max(value, 1.0), most)
    return value
