"""Drafts from earlier answers: what followed the same tokens in finished rollouts of the prompt, or in the row itself.

A point-mass drafter on the host, no model and no taps. The longest suffix of the row that occurred before decides; of
all its occurrences, in finished siblings, rollouts of earlier epochs and the row's own text, the continuation that most
of them share is proposed (the idea of SuffixDecoding, arXiv 2411.04975, with scans of bounded texts in place of a
suffix tree). Texts may be of any age: whatever is proposed, a point-mass draft is only kept where the policy draws it.

Axes: B rows, K drafts, T tokens of a text, M tokens of a row, C occurrences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.drafters.history_store import BORDER, HistoryStore
from leadout.drafters.row_text import RowText
from leadout.errors import ConfigError
from leadout.interfaces import Draft, Noise
from leadout.records import Request, RolloutId

Ints = npt.NDArray[np.integer]

MAX_MATCH = 24
"""Longer matches are not told apart."""
MAX_VOTES = 64
"""Occurrences that vote, the most recent ones."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What was found for B rows."""

    tokens_BK: npt.NDArray[np.int64]
    """Proposed tokens; padding is 0."""
    counts_B: npt.NDArray[np.int64]
    """How many, 0 without a match."""
    matched_B: npt.NDArray[np.int64]
    """Length of the suffix that matched."""


class HistoryDrafter:
    """Implements `leadout.interfaces.Drafter`, and `Stateful` so that a resumed run keeps its history."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_len: int,
        device: torch.device,
        min_match: int = 1,
        max_tokens: int = 2_000_000,
        max_rollouts: int = 32,
    ) -> None:
        """`min_match`: shortest suffix to draft from; `max_tokens`, `max_rollouts` (of a prompt): what is kept."""
        if min_match < 1:
            raise ConfigError(f"the shortest match must be at least 1 token, got {min_match}")
        self._min_match = min_match
        self._device = device
        self._rows = RowText(num_slots, max_len)
        self._requests: dict[int, tuple[str, RolloutId]] = {}
        self.store = HistoryStore(max_tokens=max_tokens, max_rollouts=max_rollouts)
        """Finished rollouts."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Needs none."""
        return ()

    @property
    def runs_context(self) -> bool:
        """Looks up only."""
        return False

    @property
    def point_mass(self) -> bool:
        """Looked-up drafts have no probabilities."""
        return True

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Start the rows' texts."""
        for slot, request in zip(slots, requests, strict=True):
            self._rows.open(slot, request)
            self._requests[slot] = (request.prompt.id, request.rollout_id)
            self.store.start(request.prompt.id, request.rollout_id)

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Look every row up."""
        found = self.look_up(slots, lengths_B)
        width = int(max(found.counts_B.max(initial=0), 1))
        tokens_BK = torch.from_numpy(found.tokens_BK[:, :width].copy()).to(self._device)
        return Draft(tokens_BK=tokens_BK, counts_B=found.counts_B, probs=None)

    def look_up(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64]) -> LookedUp:
        """Up to `lengths_B` tokens for each row."""
        width = int(max(lengths_B.max(initial=0), 1))
        tokens_BK = np.zeros((len(slots), width), np.int64)
        counts_B, matched_B = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        for index, (slot, limit) in enumerate(zip(slots, lengths_B.tolist(), strict=True)):
            if limit < 1:
                continue
            size, found = self._continuation(slot, limit)
            tokens_BK[index, : found.size] = found
            counts_B[index], matched_B[index] = found.size, size
        return LookedUp(tokens_BK, counts_B, matched_B)

    def _continuation(self, slot: int, limit: int) -> tuple[int, Ints]:
        """The longest match of a row, 0 if too short, and the tokens that most of its occurrences go on with."""
        whole_M, output_M = self._rows.tokens(slot), self._rows.output(slot)
        history_T = self.store.text(self._requests[slot][0])
        in_row, row_ends = longest_matches(whole_M, whole_M)
        suffix_M = np.concatenate([[BORDER], output_M[-MAX_MATCH:]]) if output_M.size < MAX_MATCH else output_M
        in_history, history_ends = longest_matches(history_T, suffix_M)
        size = max(in_row, in_history)
        if size < self._min_match:
            return 0, whole_M[:0]
        votes = []
        if in_history == size:
            votes.append(continuations(history_T, history_ends[-MAX_VOTES:], limit))
        if in_row == size:
            votes.append(continuations(whole_M, row_ends[-MAX_VOTES:], limit))
        found = majority(np.concatenate(votes))
        return (size, found) if found.size else (0, found)

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Append committed tokens."""
        self._rows.append(slots, tokens_BN, counts_B)

    def release(self, slots: Sequence[int]) -> None:
        """Keep what the rows said; the siblings that still run can use it from now on."""
        for slot in slots:
            if slot in self._requests:
                prompt_id, rollout_id = self._requests.pop(slot)
                self.store.add(prompt_id, rollout_id, self._rows.output(slot))
                if all(live != prompt_id for live, _ in self._requests.values()):
                    self.store.forget_joined(prompt_id)
        self._rows.close(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Has no weights; raises ConfigError when given some."""
        if weights:
            raise ConfigError(f"the history drafter takes no weights, got {len(weights)} tensors")

    def state_dict(self) -> dict[str, object]:
        """The finished rollouts."""
        return self.store.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore them."""
        self.store.load_state_dict(state)


def longest_matches(text_T: Ints, suffix_M: Ints, limit: int = MAX_MATCH) -> tuple[int, Ints]:
    """Length of the longest suffix of `suffix_M` that occurs in the text before its last token, and all its ends.

    An end is the index of the token after the occurrence, so a row may be matched with itself.
    """
    size, best = 0, np.zeros(0, np.int64)
    if text_T.size < 2 or suffix_M.size == 0:
        return size, best
    ends = np.flatnonzero(text_T[:-1] == suffix_M[-1]) + 1
    while ends.size:
        size, best = size + 1, ends
        if size == min(limit, suffix_M.size):
            break
        ends = ends[ends > size]
        ends = ends[text_T[ends - size - 1] == suffix_M[-size - 1]]
    return size, best


def continuations(text_T: Ints, ends_C: Ints, limit: int) -> Ints:
    """[C, K]: the tokens after each end, `BORDER` past the end of the text."""
    index_CK = ends_C[:, None] + np.arange(limit)
    return np.where(index_CK < text_T.size, text_T[np.minimum(index_CK, text_T.size - 1)], BORDER)


def majority(votes_CK: Ints) -> Ints:
    """Token by token what most of the votes say that agree so far; a tie goes to the latest. Stops at borders."""
    if votes_CK.shape[0] == 1:
        borders = np.flatnonzero(votes_CK[0] == BORDER)
        return np.asarray(votes_CK[0, : borders[0]] if borders.size else votes_CK[0])
    chosen: list[int] = []
    for column in range(votes_CK.shape[1]):
        said_C = votes_CK[:, column]
        said_C = said_C[said_C != BORDER]
        if said_C.size == 0:
            break
        token_U, count_U = np.unique(said_C, return_counts=True)
        most = token_U[count_U == count_U.max()]
        chosen.append(int(most[0] if most.size == 1 else said_C[np.isin(said_C, most)][-1]))
        votes_CK = votes_CK[votes_CK[:, column] == chosen[-1]]
    return np.array(chosen, np.int64)
