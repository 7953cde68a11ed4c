"""A projected step: stages, exposed seconds, what they rest on.

Synchronous: the stages follow one another on the same GPUs. Asynchronous: generators and learner work side by side
under the admission rule of `leadout.pipeline.lag`; what is exposed is what the learner waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.records import Stage
from leadout.sim.kernel_tables import Floats
from leadout.sim.memory import Memory
from leadout.sim.rollout_phase import RolloutPhase, draw_lengths, run_rollouts
from leadout.sim.scenario import Scenario
from leadout.sim.setup import Setup, Workbench, prepare, rollouts_per_step
from leadout.sim.stages import (
    default_mfu,
    draft_flops,
    forward_flops,
    learner_tokens,
    refit_seconds,
    reward_seconds,
    train_flops,
)
from leadout.sim.step_model import Part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """What the simulator says of one scenario."""

    scenario: Scenario
    seconds: dict[Stage, float]
    """Seconds of each stage on its own GPUs."""
    exposed: dict[Stage, float]
    """Seconds each stage adds to the step; their sum is the step."""
    acceptance_length: float
    """Tokens a round, over all rounds; 1 without drafting."""
    mean_k: float
    """Drafts a row, over all rounds."""
    tokens: float
    """Completion tokens a step."""
    mean_length: float
    max_length: float
    prefill_s: float
    recomputed_tokens: float
    live_rows: tuple[Floats, Floats]
    """(seconds, live rows of all replicas) of the first draw."""
    breakdown: tuple[Part, ...]
    """One round at the busiest moment."""
    breakdown_at: tuple[int, float, int]
    """(rows, mean context, k) of it."""
    round_seconds: float
    """Mean seconds of a round."""
    memory: Memory
    busy_gpu_s: float
    idle_gpu_s: float
    mean_lag: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from one update to the next."""
        return sum(self.exposed.values())

    @property
    def rollout_s(self) -> float:
        """Seconds of the rollout stage."""
        return self.seconds[Stage.ROLLOUT]

    @property
    def tokens_per_gpu_second(self) -> float:
        """Prompt and completion tokens a second and GPU over the whole step, as training logs count."""
        workload = self.scenario.workload
        prompts = workload.num_prompts * workload.num_generations * workload.prompt_length
        return (self.tokens + prompts) / (self.step_s * self.scenario.gpus)


def project(scenario: Scenario, bench: Workbench | None = None, *, quick: bool = False) -> Projection:
    """Project a scenario; raises ConfigError or CapacityError with one line when it cannot run.

    `quick` takes an asynchronous step from its bounds in place of an event loop.
    """
    setup = prepare(scenario, bench)
    phases = [run_rollouts(setup, draw_lengths(setup, draw)) for draw in range(scenario.draws)]
    seconds = {
        stage: float(np.mean([other[stage] for other in (stage_seconds(setup, p) for p in phases)])) for stage in Stage
    }
    if scenario.pipeline.mode == "async":
        from leadout.sim.asynchronous import overlap

        return overlap(setup, phases, seconds, quick=quick)
    return synchronous(setup, phases, seconds)


def synchronous(setup: Setup, phases: list[RolloutPhase], seconds: dict[Stage, float]) -> Projection:
    """Stages one after another; with separate GPUs one side idles while the other works."""
    scenario = setup.scenario
    step = sum(seconds.values())
    generating = float(np.mean([phase.busy_seconds for phase in phases])) * setup.layout.gpus
    learner = (seconds[Stage.LOGPROB] + seconds[Stage.TRAIN]) * scenario.training_gpus
    shared = seconds[Stage.DATA] + seconds[Stage.REFIT] + seconds[Stage.REWARD]
    busy = generating + learner + shared * scenario.gpus
    return summarise(setup, phases, seconds, dict(seconds), busy, scenario.gpus * step - busy)


def summarise(
    setup: Setup,
    phases: list[RolloutPhase],
    seconds: dict[Stage, float],
    exposed: dict[Stage, float],
    busy: float,
    idle: float,
    mean_lag: float = 0.0,
) -> Projection:
    """The record of a projection."""
    rounds = np.array([phase.generation.rounds for phase in phases]).sum()
    made = sum(float((p.generation.intervals.rows_N * p.generation.intervals.span_N).sum()) for p in phases)
    row_rounds = sum(
        float((p.generation.intervals.rows_N * p.generation.intervals.span_N / p.generation.length_N).sum())
        for p in phases
    )
    drafted = sum(
        float(
            (
                p.generation.k_N * p.generation.intervals.rows_N * p.generation.intervals.span_N / p.generation.length_N
            ).sum()
        )
        for p in phases
    )
    lengths = np.concatenate([phase.lengths.ravel() for phase in phases])
    first = phases[0].generation
    weight = first.intervals.rows_N * first.decode_s_N
    middle = int(np.searchsorted(np.cumsum(weight), weight.sum() / 2))
    middle = min(middle, len(weight) - 1)
    rows, k = int(first.intervals.rows_N[middle]), int(first.k_N[middle])
    context = float(first.intervals.context_N[middle] / rows + first.intervals.span_N[middle] / 2)
    return Projection(
        scenario=setup.scenario,
        seconds=seconds,
        exposed=exposed,
        acceptance_length=made / row_rounds if row_rounds else 1.0,
        mean_k=drafted / row_rounds if row_rounds else 0.0,
        tokens=float(lengths.sum()) / len(phases),
        mean_length=float(lengths.mean()),
        max_length=float(np.mean([phase.lengths.max() for phase in phases])),
        prefill_s=float(np.mean([p.generation.prefill_seconds / max(setup.replicas, 1) for p in phases])),
        recomputed_tokens=float(np.mean([p.generation.intervals.recomputed for p in phases])),
        live_rows=phases[0].live_rows(),
        breakdown=tuple(setup.model.breakdown(k, rows, context)),
        breakdown_at=(rows, context, k),
        round_seconds=sum(float(p.generation.decode_s_N.sum()) for p in phases) / rounds if rounds else 0.0,
        memory=setup.memory,
        busy_gpu_s=busy,
        idle_gpu_s=idle,
        mean_lag=mean_lag,
    )


def stage_seconds(setup: Setup, phase: RolloutPhase) -> dict[Stage, float]:
    """Seconds of every stage for one draw, each on its own GPUs."""
    if setup.profile is not None:
        return _calibrated_stages(setup, phase)
    scenario, shape = setup.scenario, setup.shape
    training, workload = scenario.training, scenario.workload
    used = phase.lengths[: workload.num_prompts].ravel()
    tokens = learner_tokens(used, workload.prompt_length, workload.lengths.cap, packed=training.packed)
    rate = scenario.training_gpus * setup.gpu.flops(scenario.precision.train)
    mfu = training.mfu if training.mfu is not None else default_mfu(setup.gpu, shape)
    logprob_mfu = training.logprob_mfu if training.logprob_mfu is not None else mfu
    flops = training.num_iterations * train_flops(shape, tokens, recompute=training.recompute_activations)
    if setup.drafter is not None and training.draft_passes:
        flops += draft_flops(setup.drafter, tokens, training.draft_passes)
    passes = (2 if training.reference else 1) if training.logprob_stage else 0
    return {
        Stage.DATA: scenario.data_s,
        Stage.REFIT: refit_stage(setup),
        Stage.ROLLOUT: phase.seconds,
        Stage.REWARD: reward_seconds(
            float(rollouts_per_step(scenario)),
            scenario.reward.seconds_per_sample,
            scenario.reward.workers,
            overlapped=scenario.reward.overlapped,
            rollout_seconds=phase.seconds,
        ),
        Stage.LOGPROB: passes * forward_flops(shape, tokens) / (rate * logprob_mfu),
        Stage.TRAIN: flops / (rate * mfu) + training.extra_s,
    }


def _calibrated_stages(setup: Setup, phase: RolloutPhase) -> dict[Stage, float]:
    """Stages of a calibrated machine: linear in tokens and samples."""
    assert setup.profile is not None
    profile, workload = setup.profile, setup.scenario.workload
    used = phase.lengths[: workload.num_prompts].ravel()
    tokens, samples = float(used.sum()) + len(used) * workload.prompt_length, float(len(used))
    return {
        Stage.DATA: profile.data.of(0.0, samples),
        Stage.REFIT: profile.refit.of(0.0, 0.0),
        Stage.ROLLOUT: phase.seconds,
        Stage.REWARD: profile.reward.of(tokens, samples),
        Stage.LOGPROB: profile.logprob.of(tokens, samples),
        Stage.TRAIN: profile.train.of(tokens, samples),
    }


def refit_stage(setup: Setup) -> float:
    """Seconds of one weight update as the step sees it."""
    scenario, section = setup.scenario, setup.scenario.refit
    method = section.method or ("broadcast" if scenario.separate else "copy")
    total = (setup.shape.params + (setup.drafter.params if setup.drafter else 0.0)) * 2.0
    return refit_seconds(method, setup.gpu, total, section.links, section.bandwidth_fraction, section.fixed_s)
