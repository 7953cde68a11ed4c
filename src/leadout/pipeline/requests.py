"""Prompts -> requests: the end of stage ``data``.

Every prompt drawn in a run gets the next number of one global counter, and its rollouts are named (draw, sibling).
The numbers are never reused, so the random numbers keyed by them never repeat within a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from leadout.records import Prompt, Request, RolloutId, SamplingParams


class DrawCounter:
    """Hands out draw numbers; part of a checkpoint."""

    def __init__(self, next_draw: int = 0) -> None:
        self.next_draw = next_draw
        """The number the next prompt will get."""

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams, num_generations: int) -> list[Request]:
        """`num_generations` requests for each prompt, siblings adjacent and in order."""
        first = self.next_draw
        self.next_draw += len(prompts)
        return make_requests(prompts, params, num_generations, first_draw=first)


def make_requests(
    prompts: Sequence[Prompt], params: SamplingParams, num_generations: int, first_draw: int = 0
) -> list[Request]:
    """Requests whose draws count up from `first_draw`.

    Example: two prompts and two generations from draw 7 give ids (7, 0), (7, 1), (8, 0), (8, 1).
    """
    return [
        Request(rollout_id=RolloutId(draw, sibling), prompt=prompt, params=params)
        for draw, prompt in enumerate(prompts, first_draw)
        for sibling in range(num_generations)
    ]
