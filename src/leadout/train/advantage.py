"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2): how much better than its siblings a rollout is.

A pure function of all groups of a step, since scaling by the batch needs them all. Axes: G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from leadout.records import Group

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""


def advantages(groups: Sequence[Group], scale: Scale) -> list[npt.NDArray[np.float64]]:
    """Reward minus the mean of its group, divided by a standard deviation (one degree of freedom less).

    A group of equal rewards gives exact zeros. Truncated rollouts that are masked count in the mean and the deviation,
    since their reward says how hard the prompt is, and have advantage 0 themselves; rollouts that no function could
    judge have no reward and count nowhere.

    Args:
        groups: All groups of the step.
        scale: Divide by the deviation within the "group", over the whole "batch", or by nothing ("none": Dr. GRPO).

    Returns:
        Per group f64[G], in sibling order.

    """
    pooled = [_judged(group) for group in groups]
    batch_std = _std(np.concatenate(pooled)) if pooled else 0.0
    result = []
    for group, judged in zip(groups, pooled):
        reward_G = np.array([score.reward for score in group.scores], np.float64)
        if _all_equal(judged):
            result.append(np.zeros_like(reward_G))
            continue
        centred_G = reward_G - judged.mean()
        if scale != "none":
            centred_G /= (_std(judged) if scale == "group" else batch_std) + EPSILON
        masked_G = np.array([score.masked for score in group.scores])
        result.append(np.where(masked_G, 0.0, centred_G))
    return result


def zero_std_share(groups: Sequence[Group]) -> float:
    """Share of groups whose rewards are all equal: they teach nothing. TRL's `frac_reward_zero_std`."""
    if not groups:
        return 0.0
    equal = [_all_equal(_judged(group)) for group in groups]
    return sum(equal) / len(equal)


def _judged(group: Group) -> npt.NDArray[np.float64]:
    """Rewards of the rollouts that some function could judge."""
    return np.array([score.reward for score in group.scores if score.parts or not score.masked], np.float64)


def _all_equal(reward_G: npt.NDArray[np.float64]) -> bool:
    return bool((reward_G == reward_G[:1]).all())


def _std(values: npt.NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
