"""A reward that differs between siblings, so that the policy of a test run moves."""

from __future__ import annotations

from collections.abc import Sequence


def letters(completions: Sequence[str], **columns: object) -> list[float]:
    """Between 0 and 1, by the characters of the text."""
    return [sum(map(ord, completion)) % 8 / 7 for completion in completions]


def wrong_length(completions: Sequence[str], **columns: object) -> list[float]:
    """One reward too many."""
    return [0.0] * (len(completions) + 1)
