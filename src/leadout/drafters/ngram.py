"""Prompt lookup: propose what followed the same last few tokens earlier in the row's own prompt and output.

A point-mass drafter on the host, no model and no taps: the longest suffix of `max_ngram`..`min_ngram` tokens that
occurred before decides, its most recent occurrence with enough tokens after it wins. Rows without a match draft
nothing.

Axes: B rows, K drafts, T tokens of a row so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.drafters.row_text import RowText
from leadout.errors import ConfigError
from leadout.interfaces import Draft, Noise
from leadout.records import Request


class NgramDrafter:
    """Implements `leadout.interfaces.Drafter`."""

    def __init__(self, *, num_slots: int, max_len: int, min_ngram: int, max_ngram: int, device: torch.device) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"prompt_lookup_min must be in 1..prompt_lookup_max, got {min_ngram} and {max_ngram}")
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._device = device
        self._text = RowText(num_slots, max_len)

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
        """Store prompt and given tokens."""
        for slot, request in zip(slots, requests, strict=True):
            self._text.open(slot, request)

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Look every row up."""
        width = int(max(lengths_B.max(initial=0), 1))
        tokens_BK = np.zeros((len(slots), width), np.int64)
        counts_B = np.zeros(len(slots), np.int64)
        for index, (slot, limit) in enumerate(zip(slots, lengths_B.tolist(), strict=True)):
            found = self._lookup(self._text.tokens(slot), limit)
            counts_B[index] = found.size
            tokens_BK[index, : found.size] = found
        width = int(max(counts_B.max(initial=0), 1))
        return Draft(
            tokens_BK=torch.from_numpy(tokens_BK[:, :width].copy()).to(self._device), counts_B=counts_B, probs=None
        )

    def _lookup(self, tokens_T: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
        """Up to `limit` tokens after the latest earlier occurrence of the longest matching suffix."""
        length = tokens_T.size
        if limit < 1:
            return tokens_T[:0]
        # Ends of earlier occurrences of the suffix, extended by one token per turn; most recent is last.
        ends = np.flatnonzero(tokens_T[:-1] == tokens_T[-1]) + 1
        best: int | None = None
        for size in range(1, self._max_ngram + 1):
            if size > 1:
                ends = ends[ends >= size]
                ends = ends[tokens_T[ends - size] == tokens_T[length - size]] if length >= size else ends[:0]
            if ends.size == 0:
                break
            if size >= self._min_ngram:
                whole = ends[ends + limit <= length]
                best = int(whole[-1] if whole.size else ends[0])
        return tokens_T[:0] if best is None else tokens_T[best : best + limit]

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Append committed tokens."""
        self._text.append(slots, tokens_BN, counts_B)

    def release(self, slots: Sequence[int]) -> None:
        """Forget the rows."""
        self._text.close(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Has no weights; raises ConfigError when given some."""
        if weights:
            raise ConfigError(f"the n-gram drafter takes no weights, got {len(weights)} tensors")
