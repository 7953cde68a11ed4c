"""Seconds of the learner's stages on this machine: refit, log-probabilities, train, by tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from leadout.bench.calibration import fit_line
from leadout.build.bench import BenchOptions
from leadout.build.bench_machine import BenchMachine, DrafterChoice
from leadout.build.data import sampling_params
from leadout.build.generator import make_generator
from leadout.build.learner import load_trainable, make_learner
from leadout.config import Data, Dataset, Draft, RolloutSection, RunConfig, SpeculativeConfig, Train
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import make_requests
from leadout.records import Group, Rollout, Score
from leadout.sim.profile import Linear

_GROUP = 4
_PROMPTS = (1, 4)
_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """Per stage."""

    refit: Linear
    logprob: Linear
    train: Linear


def learner_times(machine: BenchMachine, options: BenchOptions, choice: DrafterChoice | None) -> LearnerTimes:
    """One step of a small and one of a larger batch, twice, the first time uncounted.

    The learner is a run's own with its usual settings; the draft head of `choice` learns along.
    """
    kind = None if choice is None else choice.head
    folder = None if choice is None else choice.draft
    speculation = None if kind is None else SpeculativeConfig(method=kind, model=folder)
    config = RunConfig(
        model=options.model,
        data=Data(train=Dataset(task="arithmetic")),
        rollout=RolloutSection(
            num_prompts=max(_PROMPTS),
            num_generations=_GROUP,
            max_completion_length=_TOKENS,
            dtype=options.dtype,
            speculative_config=speculation,
        ),
        draft=Draft(enabled=kind is not None),
        train=Train(dtype=options.dtype),
    )
    head = None if kind is None else deepcopy(machine.head(folder, kind)).float()
    model = load_trainable(machine.path, config.train.dtype, machine.decoder.device)
    params = sampling_params(config.rollout, machine.codec, 0)
    learner = make_learner(config, model, machine.path, params, head, None)
    generator = make_generator(
        machine.decoder,
        machine.codec,
        config.rollout,
        num_rows=max(_PROMPTS) * _GROUP,
        head=head,
        learns_draft=kind is not None,
    )
    tokens: list[float] = []
    seconds: dict[str, list[float]] = {"refit": [], "logprob": [], "train": []}
    for repeat, prompts in enumerate((*_PROMPTS, *_PROMPTS)):
        marks = [time.perf_counter()]
        generator.refit(learner.publish())
        marks.append(time.perf_counter())
        requests = make_requests(machine.prompts(prompts, options.context), params, _GROUP, first_draw=10 * repeat)
        groups = _scored(generate(generator, requests))
        marks.append(time.perf_counter())
        logprobs = learner.logprobs(groups)
        marks.append(time.perf_counter())
        learner.step(groups, logprobs)
        marks.append(time.perf_counter())
        if repeat >= len(_PROMPTS):
            made = sum(rollout.length for group in groups for rollout in group.rollouts)
            tokens.append(float(made + prompts * _GROUP * options.context))
            seconds["refit"].append(marks[1] - marks[0])
            seconds["logprob"].append(marks[3] - marks[2])
            seconds["train"].append(marks[4] - marks[3])
    return LearnerTimes(
        refit=Linear(fixed_s=sum(seconds["refit"]) / len(seconds["refit"])),
        logprob=fit_line(tokens, seconds["logprob"]),
        train=fit_line(tokens, seconds["train"]),
    )


def _scored(rollouts: Sequence[Rollout]) -> list[Group]:
    """Groups with rewards that differ within each, so that there is something to learn."""
    scores = [
        Score(reward=float(rollout.request_id.sibling % 2), parts={}, text="", masked=False) for rollout in rollouts
    ]
    return group_by_draw(rollouts, scores)
