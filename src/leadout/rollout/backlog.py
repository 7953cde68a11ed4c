"""What a drafter would have to run before it can draft: tokens that were committed while it rested.

A drafter with a model of its own is only handed tokens and states while speculation is off; switching on costs their
run. Siblings share the run over their prompt, so a prompt counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class _Prompt:
    """A prompt no drafter has run yet."""

    tokens: int
    slots: set[int]


class Backlog:
    """Counts by slot; the drafter itself keeps the states."""

    def __init__(self, num_slots: int) -> None:
        self._done_S = np.zeros(num_slots, np.int64)
        """Cache length up to which each slot's drafter has run."""
        self._prompts: list[_Prompt] = []

    def admit(self, slots: Sequence[int], tokens: int) -> None:
        """Rows that share a context of so many tokens."""
        self._done_S[list(slots)] = tokens
        self._prompts.append(_Prompt(tokens, set(slots)))

    def tokens(self, slots: Sequence[int], lengths_S: npt.NDArray[np.int64]) -> int:
        """Tokens to run before these rows can draft; `lengths_S`: cache length of every slot."""
        behind = int((lengths_S[slots] - self._done_S[slots]).sum())
        if not self._prompts:
            return behind
        wanted = set(slots)
        return behind + sum(prompt.tokens for prompt in self._prompts if prompt.slots & wanted)

    def caught_up(self, slots: Sequence[int], lengths_S: npt.NDArray[np.int64]) -> None:
        """These rows have just drafted."""
        self._done_S[slots] = lengths_S[slots]
        if self._prompts:
            ran = set(slots)
            self._prompts = [prompt for prompt in self._prompts if not prompt.slots & ran]

    def release(self, slots: Sequence[int]) -> None:
        """These rows are over."""
        for prompt in self._prompts:
            prompt.slots.difference_update(slots)
        self._prompts = [prompt for prompt in self._prompts if prompt.slots]
