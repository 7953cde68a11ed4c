"""Stage reward: decode rollouts, judge them with every term, add the terms up.

A function that says None about a completion is left out of its sum; a completion that no function could judge has
reward 0 and is masked, so that nothing is learnt from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from leadout.errors import ConfigError
from leadout.interfaces import Task
from leadout.records import Finish, Rollout, Score
from leadout.reward.builtin import SoftOverlong, TaskReward, exact, number
from leadout.reward.completion import Completion, RewardFunction, RewardTerm
from leadout.reward.math_judge import MathReward
from leadout.reward.user import load_user_function
from leadout.text import TextCodec, cut_at_stop


class RewardScorer:
    """A `Scorer` made of weighted reward functions.

    Example: ``RewardScorer(codec, [RewardTerm(name="exact", function=exact)]).score(rollouts)``
    """

    def __init__(
        self, codec: TextCodec, terms: Sequence[RewardTerm], *, mask_truncated_completions: bool = False
    ) -> None:
        self._codec = codec
        self._terms = tuple(terms)
        self._mask_truncated = mask_truncated_completions

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, same order."""
        if not rollouts:
            return []
        completions = [self._decode(rollout) for rollout in rollouts]
        values = [term.function(completions) for term in self._terms]
        return [
            self._sum(rollout, completion, [column[index] for column in values])
            for index, (rollout, completion) in enumerate(zip(rollouts, completions, strict=True))
        ]

    def _decode(self, rollout: Rollout) -> Completion:
        text = self._codec.decode(rollout.token_ids)
        if rollout.finish is Finish.STOP and isinstance(rollout.stop, str):
            text = cut_at_stop(text, (rollout.stop,))
        return Completion(
            prompt=rollout.prompt,
            text=text,
            token_ids=rollout.token_ids,
            version=max((span.version for span in rollout.spans), default=0),
        )

    def _sum(self, rollout: Rollout, completion: Completion, values: Sequence[float | None]) -> Score:
        parts: dict[str, float] = {}
        reward = 0.0
        for term, value in zip(self._terms, values, strict=True):
            if value is not None:
                parts[term.name] = value
                reward += term.weight * value
        masked = not parts or (self._mask_truncated and rollout.is_truncated)
        return Score(reward=reward, parts=parts, text=completion.text, masked=masked)


def make_terms(
    functions: Sequence[tuple[str, float]], *, task: Task | None, max_completion_length: int
) -> tuple[RewardTerm, ...]:
    """Terms from (function, weight) pairs; `task` is the procedural task that made the prompts, if one did.

    Raises:
        ConfigError: an unknown function, one named twice, a weight that is not finite, `task` without a task, or none
            at all.

    """
    if not functions:
        raise ConfigError("expected at least one reward function, got none; set reward: [{function: task}]")
    names = [name for name, _ in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"expected every reward function once, got {', '.join(names)}")
    for name, weight in functions:
        if not math.isfinite(weight):
            raise ConfigError(f"reward function {name}: expected a finite weight, got {weight}; set weight: 1.0")
    return tuple(
        RewardTerm(name=name, function=_function(name, task, max_completion_length), weight=weight)
        for name, weight in functions
    )


def _function(name: str, task: Task | None, max_completion_length: int) -> RewardFunction:
    match name:
        case "task":
            if task is None:
                raise ConfigError(
                    "reward function task needs data.train.task, got rows without a task; use exact, number or math"
                )
            return TaskReward(task)
        case "exact":
            return exact
        case "number":
            return number
        case "math":
            return MathReward()
        case "length":
            return SoftOverlong(max_length=max_completion_length)
        case _:
            return load_user_function(name)
