"""The text of live rows on the host: prompt, given and generated tokens, for drafters that look things up.

Axes: B rows, N new tokens, S slots, T tokens of a row so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.records import Request

Ints = npt.NDArray[np.int64]


class RowText:
    """Token ids by slot."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._tokens_ST = np.zeros((num_slots, max_len + 1), np.int64)
        self._prompts_S = np.zeros(num_slots, np.int64)
        self._lengths_S = np.zeros(num_slots, np.int64)

    def open(self, slot: int, request: Request) -> None:
        """Start a row with its prompt and given tokens."""
        context = [request.prompt.token_ids]
        if request.given is not None:
            context.append(request.given.token_ids)
        tokens = np.concatenate(context)
        self._tokens_ST[slot, : tokens.size] = tokens
        self._lengths_S[slot] = tokens.size
        self._prompts_S[slot] = len(request.prompt.token_ids)

    def append(self, slots: Sequence[int], tokens_BN: torch.Tensor, counts_B: Ints) -> None:
        """Row b gained `tokens_BN[b, :counts_B[b]]`."""
        slots_B = np.asarray(slots, np.int64)
        column_N = np.arange(tokens_BN.shape[1])
        mask_BN = column_N < counts_B[:, None]
        slot_X = np.broadcast_to(slots_B[:, None], mask_BN.shape)[mask_BN]
        position_X = (self._lengths_S[slots_B][:, None] + column_N)[mask_BN]
        self._tokens_ST[slot_X, position_X] = tokens_BN.cpu().numpy()[mask_BN]
        self._lengths_S[slots_B] += counts_B

    def tokens(self, slot: int) -> Ints:
        """i64[T]: everything so far (a view)."""
        return self._tokens_ST[slot, : self._lengths_S[slot]]

    def output(self, slot: int) -> Ints:
        """i64: what follows the prompt (a view)."""
        return self._tokens_ST[slot, self._prompts_S[slot] : self._lengths_S[slot]]

    def close(self, slots: Sequence[int]) -> None:
        """Forget rows."""
        self._lengths_S[list(slots)] = 0
        self._prompts_S[list(slots)] = 0
