"""Everything a finished step says of itself, under the names of metrics.jsonl."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

from leadout.pipeline.rollout_metrics import (
    acceptance_by_age,
    completion_metrics,
    lag_metrics,
    reward_metrics,
    speculation_metrics,
)
from leadout.records import Group, LearnerLogprobs, RefitReport, Stage, TrainReport


def step_metrics(
    groups: Sequence[Group],
    refitted: RefitReport,
    logprobs: LearnerLogprobs | None,
    trained: TrainReport,
    seconds: Mapping[Stage, float],
    exposed: Mapping[Stage, float] | None = None,
    *,
    frozen_drafter: bool = False,
    draft_age: float | None = None,
) -> dict[str, float | str]:
    """Metrics of one step, all but its number, version and seconds.

    Where the logprob pass and the training pass measured the same thing, the logprob pass came first and counts.
    `rollout/tokens_per_second` = completion tokens / rollout seconds, `step/tokens_per_second` = completion tokens /
    seconds of the step, `memory/peak` in GiB. `policy/checksum`, `draft/{version,checksum}` are of the weights that
    made the rollouts.

    `exposed`: seconds of each stage that no other hid, None where none was hidden. `frozen_drafter`: a model drafts and
    does not learn; it is as old as the run. `draft_age`: `draft/age` of the drafter that made the rollouts, where that
    is not the one that the learner held.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics: dict[str, float | str] = {**reward_metrics(groups)}
    metrics |= trained.metrics
    if logprobs is not None:
        metrics |= logprobs.metrics
    metrics |= completion_metrics(groups) | speculation_metrics(rollouts) | lag_metrics(rollouts, trained.version - 1)
    age = trained.metrics.get("draft/age") if draft_age is None else draft_age
    if age is not None:
        metrics["draft/age"] = age
    if age is not None or frozen_drafter:
        metrics |= acceptance_by_age(rollouts, 0 if age is None else refitted.version - int(age))
    wall = sum((seconds if exposed is None else exposed).values())
    metrics |= _speeds(sum(float(rollout.loss_mask.sum()) for rollout in rollouts), seconds[Stage.ROLLOUT], wall)
    metrics["memory/peak"] = peak_memory()
    metrics["policy/checksum"] = refitted.checksum
    if refitted.draft_checksum is not None:
        metrics["draft/version"] = refitted.draft_version
        metrics["draft/checksum"] = refitted.draft_checksum
    return metrics


def _speeds(tokens: float, rollout: float, step: float) -> dict[str, float]:
    spans = {"rollout/tokens_per_second": rollout, "step/tokens_per_second": step}
    return {name: tokens / span for name, span in spans.items() if span > 0.0}


def peak_memory() -> float:
    """Largest resident memory of this process so far, GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
