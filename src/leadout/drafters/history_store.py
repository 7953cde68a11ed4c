"""Finished rollouts by prompt, in bounded memory: what the history drafter looks up. Host only, no torch.

The rollouts of a prompt lie one after the other, oldest first, a border before each. The border stands for "the
response begins here", so that the first tokens of a row match the beginnings of earlier responses before anything else.

Axes: T tokens of all rollouts of one prompt, borders included.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from leadout.records import RolloutId

BORDER = -1
"""Stands before each rollout; no token has this id."""


class HistoryStore:
    """Keeps at most `max_tokens` tokens in all and `max_rollouts` rollouts of a prompt.

    The oldest rollouts of the prompts that were not asked for the longest go first. A rollout that comes again (one
    that was interrupted and continued) replaces its earlier part.
    """

    def __init__(self, *, max_tokens: int, max_rollouts: int) -> None:
        self._max_tokens = max_tokens
        self._max_rollouts = max_rollouts
        self._prompts: OrderedDict[str, OrderedDict[RolloutId, npt.NDArray[np.int32]]] = OrderedDict()
        self._joined: dict[str, npt.NDArray[np.int32]] = {}
        self.num_tokens = 0
        """Tokens held, borders left out."""

    def add(self, prompt_id: str, rollout_id: RolloutId, tokens_T: npt.NDArray[np.integer]) -> None:
        """Keep the tokens of a rollout (a copy)."""
        if tokens_T.size == 0 or tokens_T.size > self._max_tokens:
            return
        rollouts = self._prompts.setdefault(prompt_id, OrderedDict())
        self._prompts.move_to_end(prompt_id)
        if rollout_id in rollouts:
            self.num_tokens -= rollouts.pop(rollout_id).size
        rollouts[rollout_id] = tokens_T.astype(np.int32)
        self.num_tokens += tokens_T.size
        while len(rollouts) > self._max_rollouts:
            self._drop_oldest(prompt_id)
        self._joined.pop(prompt_id, None)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest(next(iter(self._prompts)))

    def _drop_oldest(self, prompt_id: str) -> None:
        rollouts = self._prompts[prompt_id]
        _, dropped = rollouts.popitem(last=False)
        self.num_tokens -= dropped.size
        self._joined.pop(prompt_id, None)
        if not rollouts:
            del self._prompts[prompt_id]

    def start(self, prompt_id: str, rollout_id: RolloutId) -> None:
        """Say that a rollout of a prompt is being made: an earlier attempt at the very same one is forgotten.

        Made again from the same numbers it would be its own draft, which says nothing about speed.
        """
        if prompt_id not in self._prompts:
            return
        self._prompts.move_to_end(prompt_id)
        dropped = self._prompts[prompt_id].pop(rollout_id, None)
        if dropped is not None:
            self.num_tokens -= dropped.size
            self._joined.pop(prompt_id, None)
            if not self._prompts[prompt_id]:
                del self._prompts[prompt_id]

    def text(self, prompt_id: str) -> npt.NDArray[np.int32]:
        """i32[T]: border, rollout, border, rollout, …; empty for a prompt without history."""
        joined = self._joined.get(prompt_id)
        if joined is None:
            parts: list[npt.NDArray[np.int32]] = []
            for tokens_T in self._prompts.get(prompt_id, {}).values():
                parts += [np.array([BORDER], np.int32), tokens_T]
            joined = np.concatenate(parts) if parts else np.zeros(0, np.int32)
            if parts:
                self._joined[prompt_id] = joined
        return joined

    def forget_joined(self, prompt_id: str) -> None:
        """Drop the joined copy of a prompt that no live row has; it is made again when needed."""
        self._joined.pop(prompt_id, None)

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable: prompts in order of use, token ids as base64 of little-endian int32."""
        return {
            "prompts": [
                [prompt_id, [[*rollout_id, _encode(tokens_T)] for rollout_id, tokens_T in rollouts.items()]]
                for prompt_id, rollouts in self._prompts.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it, within the present bounds."""
        self._prompts.clear()
        self._joined.clear()
        self.num_tokens = 0
        prompts = state["prompts"]
        assert isinstance(prompts, list)
        for prompt_id, rollouts in prompts:
            for draw, sibling, text in rollouts:
                self.add(prompt_id, RolloutId(draw, sibling), _decode(text))


def _encode(tokens_T: npt.NDArray[np.int32]) -> str:
    return base64.b64encode(tokens_T.astype("<i4").tobytes()).decode("ascii")


def _decode(text: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32)
