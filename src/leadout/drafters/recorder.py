"""Not a drafter at all: it sits in a drafter's place and keeps the policy's states while plain rollouts are generated.

Offline training of a drafter needs the policy's inner states of the very tokens that the engine has just generated.
With this in the engine they need no second pass of the policy. Rollouts come out as with no drafter.

Axes: B rows, N tokens of a round, P prompt tokens, R generated tokens, F concatenated taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.errors import RefitError
from leadout.interfaces import Draft, Noise
from leadout.records import Request, RolloutId


class StateRecorder:
    """Implements `leadout.interfaces.Drafter`; drafts nothing."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        """`taps`: policy layers whose inputs are kept; the number of layers names what enters the final norm."""
        self._taps = taps
        self._running: dict[int, tuple[RolloutId, list[torch.Tensor]]] = {}
        self._finished: dict[RolloutId, torch.Tensor] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """Those given."""
        return self._taps

    @property
    def runs_context(self) -> bool:
        """Drafts nothing."""
        return False

    @property
    def point_mass(self) -> bool:
        """No draft has probabilities, since there is none."""
        return True

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Keep the prompt's states, one copy for all siblings."""
        assert prompt_taps_PF is not None, "the engine taps what `taps` asks for"
        kept_PF = prompt_taps_PF.clone()
        for slot, request in zip(slots, requests, strict=True):
            self._running[slot] = (request.rollout_id, [kept_PF])

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Nothing."""
        tokens_BK = torch.zeros((len(slots), 1), dtype=torch.int64)
        return Draft(tokens_BK=tokens_BK, counts_B=np.zeros(len(slots), np.int64), probs=None)

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Keep the states of the tokens before the committed ones."""
        if taps_BNF is None:
            return
        kept_BNF = taps_BNF.clone()
        for row, (slot, count) in enumerate(zip(slots, counts_B.tolist(), strict=True)):
            self._running[slot][1].append(kept_BNF[row, :count])

    def release(self, slots: Sequence[int]) -> None:
        """Put the states of rows that are over where `take` finds them."""
        for slot in slots:
            rollout_id, parts = self._running.pop(slot)
            self._finished[rollout_id] = torch.cat(parts)

    def take(self, rollout_id: RolloutId) -> torch.Tensor:
        """States of a finished rollout's prompt and tokens but its last, [P + R - 1, F]; handed out once."""
        return self._finished.pop(rollout_id)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Raises RefitError: it has no weights."""
        raise RefitError("a recorder of states has no weights to take")
