"""From a scenario to the objects that compute: shapes, layout, engine, laws, step model, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from leadout.errors import CapacityError, ConfigError, LayoutError
from leadout.sim.acceptance import AcceptanceLaw, from_conditional, from_cumulative, from_mean_length
from leadout.sim.attention import QueryGrowth
from leadout.sim.curves import MAX_STRETCH
from leadout.sim.drain import Slots
from leadout.sim.engine import EngineTerms
from leadout.sim.forward import Layout
from leadout.sim.generate import RoundModel, Tables, make_tables
from leadout.sim.hardware import Gpu
from leadout.sim.lengths import LengthLaw, read_lengths
from leadout.sim.memory import Memory, check_memory
from leadout.sim.profile import Profile, ProfileModel, load_profile, measured_choices
from leadout.sim.resolve import resolve_gpu, resolve_tables
from leadout.sim.scenario import Scenario
from leadout.sim.sections import Speculation
from leadout.sim.shapes import DraftShape, ModelShape, draft_shape, find_model
from leadout.sim.step_model import StepModel, build_step_model

METHOD_LAWS: dict[str, AcceptanceLaw] = {
    "eagle3": AcceptanceLaw(rates=(0.768,), decay=0.972),
    "mtp": AcceptanceLaw(rates=(0.886, 0.869, 0.861)),
    "small_model": AcceptanceLaw(rates=(0.70,), decay=0.98),
    "ngram": AcceptanceLaw(rates=(0.35,), decay=1.0),
}
"""Laws taken without any measured acceptance: EAGLE-3 on a reasoning 8B model (fit to published lengths), MTP of a 9B
model in reinforcement learning; small models and n-grams are assumptions."""


KV_GRID_END = 131_072
"""Longest context of the attention rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """Everything a projection needs."""

    scenario: Scenario
    gpu: Gpu
    shape: ModelShape
    layout: Layout
    engine: EngineTerms
    drafter: DraftShape | None
    law: AcceptanceLaw | None
    k: int | tuple[int, ...]
    lengths: LengthLaw
    model: RoundModel
    tables: Tables
    memory: Memory
    slots: Slots
    profile: Profile | None = None
    """Set when the machine was calibrated; then it also gives the other stages."""

    @property
    def ranks(self) -> int:
        """Replicas, each rank with data-parallel attention counted."""
        return self.replicas * self.layout.data_parallel

    @property
    def replicas(self) -> int:
        """Generator replicas."""
        return self.scenario.generation_gpus // self.layout.gpus


class Workbench:
    """Step models made so far, so that a sweep builds each one once."""

    def __init__(self) -> None:
        self._models: dict[object, Tables] = {}
        self._layouts: dict[object, StepModel] = {}

    def tables(
        self, shape: ModelShape, layout: Layout, engine: EngineTerms, drafter: DraftShape | None, rows: int
    ) -> Tables:
        """Step tables for a replica, from the cache when they were made with as many rows."""
        place = (
            *(layout.gpu, layout.tables is None or id(layout.tables), layout.tensor_parallel, layout.expert_parallel),
            *(layout.data_parallel, layout.dtype, layout.kv_dtype, layout.routing, layout.expert_kernel),
        )
        key = (shape, place, engine, drafter)
        found = self._models.get(key)
        if found is None or found.max_batch < rows:
            base = self._layouts.get(key[:2] + key[3:])
            if base is None:
                base = self._layouts[key[:2] + key[3:]] = build_step_model(shape, layout, engine, drafter)
            found = self._models[key] = make_tables(replace(base, engine=engine), max(rows, 1))
        return found


def engine_terms(scenario: Scenario) -> EngineTerms:
    """The engine section as terms."""
    section = scenario.engine
    growth = QueryGrowth(
        per_draft=section.attention_per_draft,
        fallback_above=section.attention_fallback_above,
        fallback_factor=section.attention_fallback_factor,
    )
    names = (
        *(
            "host_s",
            "host_per_layer_s",
            "host_per_row_s",
            "draft_host_s",
            "ngram_host_per_row_s",
            "launch_per_layer_s",
            "launch_s",
        ),
        *(
            "sampler_passes",
            "kernel_scale",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "enforce_eager",
        ),
        "cudagraph_capture_sizes",
    )
    return EngineTerms(attention=growth, **{name: getattr(section, name) for name in names})


def acceptance_law(section: Speculation) -> AcceptanceLaw:
    """The law a speculation section describes."""
    given, drift = section.acceptance, section.acceptance.drift_per_version
    if given.conditional is not None:
        return from_conditional(list(given.conditional), given.decay, drift)
    if given.cumulative is not None:
        return from_cumulative(list(given.cumulative), drift)
    if given.mean_length is not None:
        return from_mean_length(given.mean_length, given.at_k, drift)
    if given.rate is not None:
        return from_conditional([given.rate], given.decay, drift)
    law = METHOD_LAWS[section.method]
    return AcceptanceLaw(rates=law.rates, decay=law.decay, drift=drift)


def length_law(scenario: Scenario) -> LengthLaw:
    """The length law of the workload."""
    section = scenario.workload.lengths
    if section.file is None:
        return LengthLaw(mean=section.mean, cv=section.cv, cap=section.cap, group_correlation=section.group_correlation)
    samples = np.minimum(read_lengths(section.file), section.cap)
    mean = float(samples.mean())
    cv = float(samples.std() / mean)
    return LengthLaw(mean=mean, cv=cv, cap=section.cap, group_correlation=section.group_correlation, samples=samples)


def draft_choices(section: Speculation | None) -> int | tuple[int, ...]:
    """k, or the candidates of `auto`."""
    if section is None:
        return 0
    if section.num_speculative_tokens == "auto":
        return tuple(range(section.max_draft_length + 1))
    return section.num_speculative_tokens


def make_layout(scenario: Scenario, gpu: Gpu) -> Layout:
    """The generation section as a layout."""
    section = scenario.generation
    return Layout(
        gpu=gpu,
        tables=resolve_tables(scenario.tables),
        tensor_parallel=section.tensor_parallel,
        data_parallel=section.data_parallel,
        expert_parallel=section.expert_parallel,
        dtype=scenario.precision.weights,
        kv_dtype=scenario.precision.kv_cache,
        routing=section.moe_routing,
        expert_kernel=section.moe_kernel,
    )


def check_layout(scenario: Scenario, layout: Layout, shape: ModelShape) -> None:
    """Raise LayoutError when the layout does not divide the model or the GPUs."""
    try:
        layout.check(shape)
    except ConfigError as error:
        raise LayoutError(str(error)) from None
    if scenario.generation_gpus % layout.gpus:
        raise LayoutError(
            f"generation: {scenario.generation_gpus} GPUs do not divide into replicas of tensor_parallel x "
            f"data_parallel = {layout.gpus}"
        )


def prepare(scenario: Scenario, bench: Workbench | None = None) -> Setup:
    """Resolve a scenario; raises ConfigError (LayoutError among them) or CapacityError with one line."""
    gpu, shape = resolve_gpu(scenario.gpu), find_model(scenario.model)
    layout = make_layout(scenario, gpu)
    check_layout(scenario, layout, shape)
    k = draft_choices(scenario.speculation)
    section = scenario.speculation if k != 0 else None  # k = 0 is the plain path, whatever drafter is named
    drafter = draft_shape(section.method, shape, section.draft_vocab, section.model) if section else None
    engine = engine_terms(scenario)
    if scenario.profile is not None:
        return _calibrated(scenario, gpu, shape, layout, engine, k)
    memory = check_memory(
        shape,
        layout,
        drafter,
        utilization=engine.gpu_memory_utilization,
        colocated=not scenario.separate,
        offload=scenario.training.offload,
        training_gpus=scenario.training_gpus,
    )
    law = length_law(scenario)
    longest = law.cap + scenario.workload.prompt_length
    if memory.cache_tokens < longest:
        raise CapacityError(
            f"workload.lengths.cap: the cache holds {memory.cache_tokens:.0f} tokens, a rollout may need "
            f"{longest:.0f}; lower the cap or raise generation.tensor_parallel"
        )
    if longest > MAX_STRETCH * KV_GRID_END:
        raise CapacityError(
            f"workload.lengths.cap: {longest:.0f} tokens is over {MAX_STRETCH:.0f} times the longest context measured "
            f"({KV_GRID_END})"
        )
    per_rank = -(-rollouts_per_step(scenario) // (scenario.generation_gpus // layout.tensor_parallel))
    lagged = per_rank * (scenario.pipeline.max_staleness + 1)
    rows = min(engine.max_num_seqs, lagged)
    tables = (bench or Workbench()).tables(shape, layout, engine, drafter, rows)
    return Setup(
        scenario=scenario,
        gpu=gpu,
        shape=shape,
        layout=layout,
        engine=engine,
        drafter=drafter,
        law=acceptance_law(section).scaled(section.acceptance_scale) if section else None,
        k=k,
        lengths=law,
        model=tables.model,
        tables=tables,
        memory=memory,
        slots=Slots(rows=engine.max_num_seqs, tokens=memory.cache_tokens),
    )


NO_MEMORY = Memory(
    weights_bytes=0.0,
    drafter_bytes=0.0,
    learner_bytes=0.0,
    overhead_bytes=0.0,
    cache_bytes=0.0,
    cache_tokens=0.0,
    learner_train_bytes=0.0,
)
"""A calibrated machine is not checked for memory: it ran."""


def _calibrated(
    scenario: Scenario, gpu: Gpu, shape: ModelShape, layout: Layout, engine: EngineTerms, k: int | tuple[int, ...]
) -> Setup:
    """A setup whose seconds come from a profile; `auto` chooses among the draft lengths that were measured."""
    assert scenario.profile is not None
    profile, section = load_profile(scenario.profile), scenario.speculation
    method = section.method if section is not None and k != 0 else "none"
    choices = measured_choices(profile, method, k) if isinstance(k, tuple) else k
    rows = min(engine.max_num_seqs, -(-rollouts_per_step(scenario) // (scenario.generation_gpus // layout.gpus)))
    model = ProfileModel(profile=profile, method=method)
    return Setup(
        scenario=scenario,
        gpu=gpu,
        shape=shape,
        layout=layout,
        engine=engine,
        drafter=None,
        law=acceptance_law(section).scaled(section.acceptance_scale) if section is not None and k != 0 else None,
        k=choices,
        lengths=length_law(scenario),
        model=model,
        tables=make_tables(model, rows),
        memory=NO_MEMORY,
        slots=Slots(rows=engine.max_num_seqs),
        profile=profile,
    )


def prompts_drawn(scenario: Scenario) -> int:
    """Groups generated a step, those without signal included: P / (1 - share)."""
    return int(np.ceil(scenario.workload.num_prompts / (1.0 - scenario.workload.share_without_signal) - 1e-9))


def rollouts_per_step(scenario: Scenario) -> int:
    """Rollouts generated a step."""
    return prompts_drawn(scenario) * scenario.workload.num_generations
