"""The loop to read first: one step of GRPO is data, refit, rollout, reward, logprob, train, one after the other.

Consumes prompts from the source; produces one policy version per step. Nothing overlaps, so every rollout was made by
the very weights that learn from it and the lag is 0; `leadout.pipeline.asynchronous` runs the same stages at other
times. Where the stages run does not show here: the pipeline knows only the Protocols of `leadout.interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leadout.clock import Clock
from leadout.interfaces import Generator, Learner, PromptSource, Scorer
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import DrawCounter
from leadout.pipeline.step_metrics import step_metrics
from leadout.records import (
    Group,
    LearnerLogprobs,
    RefitReport,
    Request,
    Rollout,
    SamplingParams,
    Stage,
    StepReport,
    TrainReport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """What a step leaves behind: the row of figures, and what they were made from."""

    report: StepReport
    """The row for metrics.jsonl."""
    requests: tuple[Request, ...]
    """What was asked of the generator."""
    groups: tuple[Group, ...]
    """What came back, scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rollouts of a step, ready to be learnt from."""

    requests: tuple[Request, ...]
    """What was asked of the generator."""
    rollouts: tuple[Rollout, ...]
    """One for each request, in their order."""
    refitted: RefitReport
    """The weights that made them."""
    seconds: float | None = None
    """What generating them took where other stages may have hidden it; None where they waited."""
    draft_age: float | None = None
    """`draft/age` of the drafter that made them; None: of the one that the learner holds when it learns from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What the stages after the rollout give."""

    groups: tuple[Group, ...]
    logprobs: LearnerLogprobs | None
    trained: TrainReport


@dataclass(slots=True, kw_only=True)
class SynchronousPipeline:
    """Runs the stages of a step in turn."""

    source: PromptSource
    generator: Generator
    scorer: Scorer
    learner: Learner
    params: SamplingParams
    """The law of every rollout; its seed is the run's."""
    num_prompts: int
    """Prompts per step."""
    num_generations: int
    """Rollouts per prompt."""
    clock: Clock
    draws: DrawCounter
    frozen_drafter: bool = False
    """Whether a model drafts that does not learn."""

    def step(self, number: int, before_update: Callable[[], None] = lambda: None) -> FinishedStep:
        """Run step `number` (1-based).

        Until `before_update` is called the learner has not changed and the step can be dropped; after it the step
        has to be finished.
        """
        requests = self.ask()
        refitted = self.refit()
        with self.clock.stage(Stage.ROLLOUT):
            rollouts = generate(self.generator, requests)
        batch = Batch(requests=tuple(requests), rollouts=tuple(rollouts), refitted=refitted)
        return self.finish(number, batch, self.learn(batch, before_update))

    def ask(self) -> list[Request]:
        """Stage data: the requests of the next prompts."""
        with self.clock.stage(Stage.DATA):
            prompts = self.source.take(self.num_prompts)
            return self.draws.requests(prompts, self.params, self.num_generations)

    def refit(self) -> RefitReport:
        """Stage refit: the generator takes the learner's present weights."""
        with self.clock.stage(Stage.REFIT):
            return self.generator.refit(self.learner.publish())

    def learn(self, batch: Batch, before_update: Callable[[], None]) -> Learnt:
        """Stages reward, logprob and train."""
        stage = self.clock.stage

        with stage(Stage.REWARD):
            groups = group_by_draw(batch.rollouts, self.scorer.score(batch.rollouts))

        with stage(Stage.LOGPROB):
            logprobs = self.learner.logprobs(groups)

        before_update()
        with stage(Stage.TRAIN):
            trained = self.learner.step(groups, logprobs)
        return Learnt(groups=tuple(groups), logprobs=logprobs, trained=trained)

    def finish(self, number: int, batch: Batch, learnt: Learnt) -> FinishedStep:
        """The step's row of figures."""
        seconds, exposed = self.clock.finish_step(), None
        if batch.seconds is not None:
            seconds, exposed = {**seconds, Stage.ROLLOUT: batch.seconds}, seconds
        metrics = step_metrics(
            learnt.groups,
            batch.refitted,
            learnt.logprobs,
            learnt.trained,
            seconds,
            exposed,
            frozen_drafter=self.frozen_drafter,
            draft_age=batch.draft_age,
        )
        version = batch.refitted.version
        report = StepReport(step=number, version=version, seconds=seconds, exposed=exposed, metrics=metrics)
        return FinishedStep(report=report, requests=batch.requests, groups=learnt.groups)
