"""What a choice of draft length may ask of the live rows besides their number.

The engine hands `DraftLength.choose` a function that makes a `Load`: most rounds of a resting drafter never ask, and
what is not asked for is not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """The live rows of a moment; by default rows that are never over, whose drafter is up to date."""

    backlog: int = 0
    """Tokens, over all rows, that the drafter would first have to catch up on."""
    remaining: float = math.inf
    """Mean tokens that the rows may still generate, over which catching up pays back."""
    spread: float = math.inf
    """Their standard deviation over their mean, infinite where others wait for the places of those that end."""
