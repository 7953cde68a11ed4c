"""Stage data and reward from their sections: prompts in order, the scorer, the sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.config import Data, Dataset, Grpo, RewardFunction, RolloutSection
from leadout.data.prompts import PromptFormat, PromptSet, make_prompts
from leadout.data.rows import Row, hub_rows, read_rows, task_rows
from leadout.data.tasks import make_task
from leadout.interfaces import Task
from leadout.records import SamplingParams
from leadout.reward.scorer import RewardScorer, make_terms
from leadout.text import TextCodec

EVALUATION_SEED = 0x5EED
"""Mixed into the run's seed so that evaluation and training never share rows of a task or random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """A data set as prompts, with the task that made and judges it, if one did."""

    prompts: PromptSet
    task: Task | None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts.prompts)


def load_data(
    dataset: Dataset, section: Data, codec: TextCodec, *, seed: int, context: int, setting: str = "data.train.path"
) -> LoadedData:
    """Rows and prompts of a data set; `context` is the largest row the generator can hold.

    `setting` is the key that named a file, for the message when it is not there.
    """
    task = None if dataset.task is None else make_task(dataset.task, dataset.task_args)
    limit = context - 1 if section.max_prompt_length is None else min(section.max_prompt_length, context - 1)
    form = PromptFormat(
        prompt_key=dataset.prompt_key,
        answer_key=dataset.answer_key,
        apply_chat_template=section.apply_chat_template,
        chat_template_kwargs=section.chat_template_kwargs,
        system_prompt=section.system_prompt,
        max_tokens=limit,
        overlong=section.overlong,
    )
    return LoadedData(prompts=make_prompts(_rows(dataset, task, seed, setting), codec, form), task=task)


def _rows(dataset: Dataset, task: Task | None, seed: int, setting: str) -> list[Row]:
    if task is not None:
        return task_rows(task, dataset.num_rows, seed)
    if dataset.path is not None:
        return read_rows(dataset.path, dataset.num_rows, setting)
    assert dataset.hub is not None, "the section holds exactly one source"
    return hub_rows(dataset.hub, dataset.split, dataset.num_rows)


def make_scorer(
    functions: Sequence[RewardFunction], codec: TextCodec, task: Task | None, rollout: RolloutSection, grpo: Grpo
) -> RewardScorer:
    """The reward of a recipe."""
    pairs = [(each.function, each.weight) for each in functions]
    terms = make_terms(pairs, task=task, max_completion_length=rollout.max_completion_length)
    return RewardScorer(codec, terms, mask_truncated_completions=grpo.mask_truncated_completions)


def sampling_params(section: RolloutSection, codec: TextCodec, seed: int) -> SamplingParams:
    """The law of a run's rollouts."""
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        max_new_tokens=section.max_completion_length,
        stop=section.stop,
        stop_token_ids=codec.eos_token_ids,
        seed=seed,
    )
