"""Prompt lookup: propose what followed the same last few tokens earlier in the row's own prompt and output.

A point-mass drafter on the host, no model and no taps: the longest suffix of `max_ngram`..`min_ngram` tokens that
occurred before decides, its most recent occurrence with
enough tokens after it wins. Rows without a match draft nothing.

Axes: B rows, K drafts, N new tokens, T tokens of a row so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

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
        self._tokens_ST = np.zeros((num_slots, max_len + 1), np.int64)
        self._lengths_S = np.zeros(num_slots, np.int64)

    @property
    def taps(self) -> tuple[int, ...]:
        """Needs none."""
        return ()

    @property
    def point_mass(self) -> bool:
        """Looked-up drafts have no probabilities."""
        return True

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Store prompt and given tokens."""
        for slot, request in zip(slots, requests, strict=True):
            context = [request.prompt.token_ids]
            if request.given is not None:
                context.append(request.given.token_ids)
            tokens = np.concatenate(context)
            self._tokens_ST[slot, : tokens.size] = tokens
            self._lengths_S[slot] = tokens.size

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Look every row up."""
        width = int(max(lengths_B.max(initial=0), 1))
        tokens_BK = np.zeros((len(slots), width), np.int64)
        counts_B = np.zeros(len(slots), np.int64)
        for index, (slot, limit) in enumerate(zip(slots, lengths_B.tolist(), strict=True)):
            found = self._lookup(self._tokens_ST[slot, : self._lengths_S[slot]], limit)
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
        slots_B = np.asarray(slots, np.int64)
        column_N = np.arange(tokens_BN.shape[1])
        mask_BN = column_N < counts_B[:, None]
        slot_X = np.broadcast_to(slots_B[:, None], mask_BN.shape)[mask_BN]
        position_X = (self._lengths_S[slots_B][:, None] + column_N)[mask_BN]
        self._tokens_ST[slot_X, position_X] = tokens_BN.cpu().numpy()[mask_BN]
        self._lengths_S[slots_B] += counts_B

    def release(self, slots: Sequence[int]) -> None:
        """Forget the rows."""
        self._lengths_S[list(slots)] = 0

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Has no weights; raises ConfigError when given some."""
        if weights:
            raise ConfigError(f"the n-gram drafter takes no weights, got {len(weights)} tensors")
