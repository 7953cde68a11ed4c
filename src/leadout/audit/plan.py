"""What an audit generates: built-in prompts and the number of rollouts, fixed before the first token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leadout.records import Prompt, Request, RolloutId, SamplingParams

DEFAULT_PROMPTS: tuple[str, ...] = (
    "What is 17 + 25? Explain each step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Name three uses of copper and say why it suits them.",
    "Translate into French: the train leaves at seven.",
    "A shop sells pens at 3 for 2 dollars. How much are 12 pens?",
    "Describe how to make a paper aeroplane.",
    "Why does the moon change its shape during a month?",
    "Write a Python function that reverses a list in place.",
    "List the planets in order, with one fact about each.",
    "Summarise the water cycle in four sentences.",
    "Give advice to someone who cannot sleep.",
    "What is the difference between a virus and a bacterium?",
    "Write a poem of eight lines about winter in a city.",
    "If a car drives 150 km in two hours, how far does it get in five?",
    "Explain what a prime number is to a child.",
    "Compare cycling and walking for short errands.",
)
"""Short, of several kinds, so that entropies differ."""

SIBLINGS = 4
"""Rollouts of each prompt draw: siblings show shared noise."""
FILL = 0.7
"""Rollouts end early; this share of the longest length is counted on."""


def audit_requests(
    prompts: Sequence[Prompt], params: SamplingParams, *, tokens: int, siblings: int = SIBLINGS, first_draw: int = 0
) -> list[Request]:
    """Requests for about `tokens` tokens: whole groups, prompts in turn, every draw with an id of its own."""
    draws = max(1, math.ceil(tokens / (FILL * params.max_new_tokens * siblings)))
    return [
        Request(rollout_id=RolloutId(first_draw + draw, sibling), prompt=prompts[draw % len(prompts)], params=params)
        for draw in range(draws)
        for sibling in range(siblings)
    ]
