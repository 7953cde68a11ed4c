"""A drafter that looks drafts up, made to draft as many as it is asked for in every row.

How often a look-up finds something depends on the text, so rounds at fixed k would differ. For seconds of a round with
exactly k drafts the look-up runs as it is, and its drafts are filled up with a token that the policy is free to refuse.

Axes: B rows, K drafts, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft, Drafter, Noise
from leadout.records import Request

_FILLING = 0
"""Any token id would do."""


class FullDrafts:
    """Implements `leadout.interfaces.Drafter` over one whose drafts are point masses."""

    def __init__(self, inner: Drafter) -> None:
        assert inner.point_mass, "drafts with probabilities cannot be filled up"
        self._inner = inner

    @property
    def taps(self) -> tuple[int, ...]:
        """As the inner one."""
        return self._inner.taps

    @property
    def runs_context(self) -> bool:
        """As the inner one."""
        return self._inner.runs_context

    @property
    def point_mass(self) -> bool:
        """Always."""
        return True

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Pass on."""
        self._inner.admit(slots, requests, prompt_taps_PF)

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """What is found, filled up to `lengths_B`."""
        draft = self._inner.propose(slots, lengths_B, noise)
        missing = int(lengths_B.max(initial=0)) - draft.tokens_BK.shape[1]
        tokens_BK = torch.nn.functional.pad(draft.tokens_BK, (0, max(missing, 0)), value=_FILLING)
        return replace(draft, tokens_BK=tokens_BK, counts_B=lengths_B.copy())

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Pass on."""
        self._inner.observe(slots, tokens_BN, counts_B, taps_BNF)

    def release(self, slots: Sequence[int]) -> None:
        """Pass on."""
        self._inner.release(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Pass on."""
        self._inner.load(weights, version)
