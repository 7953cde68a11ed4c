"""How well the policy solves a fixed list of prompts: pass@1, mean@k, pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leadout.interfaces import Generator, Scorer
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import make_requests
from leadout.records import Group, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The same prompts, answered by whatever weights the generator holds.

    The rollouts are numbered from draw 0 every time: give `params` a seed other than the run's, so that evaluation
    and training never share random numbers.
    """

    prompts: tuple[Prompt, ...]
    generator: Generator
    scorer: Scorer
    params: SamplingParams
    num_generations: int = 1
    """k: answers per prompt."""
    solved_reward: float = 1.0
    """An answer counts as solved from this reward on."""

    def run(self) -> dict[str, float]:
        """Generate and score; returns the `eval/*` metrics of `evaluation_metrics`."""
        requests = make_requests(self.prompts, self.params, self.num_generations)
        rollouts = generate(self.generator, requests)
        return evaluation_metrics(group_by_draw(rollouts, self.scorer.score(rollouts)), self.solved_reward)


def evaluation_metrics(groups: Sequence[Group], solved_reward: float = 1.0) -> dict[str, float]:
    """Metrics of one group per prompt with k answers each; empty without groups.

    - `eval/mean@k`: reward, averaged over all answers.
    - `eval/pass@1`: share of answers that are solved, averaged over prompts: the unbiased estimate of solving a prompt
      with one try (Chen et al. 2021, arXiv 2107.03374, section 2.1 with one try).
    - `eval/pass@k`, k > 1: share of prompts with at least one solved answer among the k.
    - `eval/mean_length`, `eval/clipped_ratio`: tokens per answer, share that ran out of tokens.
    """
    if not groups:
        return {}
    rewards_PK = np.array([[score.reward for score in group.scores] for group in groups], float)
    solved_PK = rewards_PK >= solved_reward
    k = rewards_PK.shape[1]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        f"eval/mean@{k}": float(rewards_PK.mean()),
        "eval/pass@1": float(solved_PK.mean()),
        "eval/mean_length": float(np.mean([rollout.length for rollout in rollouts])),
        "eval/clipped_ratio": float(np.mean([rollout.is_truncated for rollout in rollouts])),
    }
    if k > 1:
        metrics[f"eval/pass@{k}"] = float(solved_PK.any(axis=1).mean())
    return metrics
