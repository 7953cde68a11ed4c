"""The loop to read first: one step of GRPO is data, refit, rollout, reward, logprob, train, one after the other.

Consumes prompts from the source; produces one policy version per step. Nothing overlaps, so every rollout was made by
the very weights that learn from it and the lag is 0. Where the stages run does not show here: the pipeline knows
only the Protocols of `leadout.interfaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leadout.clock import Clock
from leadout.interfaces import Generator, Learner, PromptSource, Scorer
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import DrawCounter
from leadout.pipeline.step_metrics import step_metrics
from leadout.records import Group, Request, SamplingParams, Stage, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """What a step leaves behind: the row of figures, and what they were made from."""

    report: StepReport
    """The row for metrics.jsonl."""
    requests: tuple[Request, ...]
    """What was asked of the generator."""
    groups: tuple[Group, ...]
    """What came back, scored."""


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
        stage = self.clock.stage

        with stage(Stage.DATA):
            prompts = self.source.take(self.num_prompts)
            requests = self.draws.requests(prompts, self.params, self.num_generations)

        with stage(Stage.REFIT):
            refitted = self.generator.refit(self.learner.publish())

        with stage(Stage.ROLLOUT):
            rollouts = generate(self.generator, requests)

        with stage(Stage.REWARD):
            groups = group_by_draw(rollouts, self.scorer.score(rollouts))

        with stage(Stage.LOGPROB):
            logprobs = self.learner.logprobs(groups)

        before_update()
        with stage(Stage.TRAIN):
            trained = self.learner.step(groups, logprobs)

        seconds = self.clock.finish_step()
        metrics = step_metrics(groups, refitted, logprobs, trained, seconds, frozen_drafter=self.frozen_drafter)
        report = StepReport(step=number, version=refitted.version, seconds=seconds, metrics=metrics)
        return FinishedStep(report=report, requests=tuple(requests), groups=tuple(groups))
