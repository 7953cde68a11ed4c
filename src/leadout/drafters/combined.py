"""Two drafters as one: looked-up drafts where earlier text matches, the model's where it does not, or where it pays.

A row takes either source as a whole for one round (`leadout.draft_length.source_choice`). Looked-up rows are point
masses and are verified as such even where other rows of the round bring a sampled q, so both rules stay what they are.
Rows that the model did not draft for are caught up the next time it does, as after rounds without speculation.

Axes: B rows, K drafts, A rows the model drafts for, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.draft_length.source_choice import SourceChoice
from leadout.drafters.history import HistoryDrafter, LookedUp
from leadout.interfaces import Draft, Drafter, DraftProbs, Noise
from leadout.records import Request

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _SomeRows:
    """The numbers of some rows of a round."""

    noise: Noise
    index_A: torch.Tensor

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        """f64[A]."""
        return self.noise.draft_uniforms(depth)[self.index_A]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A round that was proposed and not yet observed."""

    slots: tuple[int, ...]
    looked_up_B: npt.NDArray[np.bool_]
    matched_B: Ints
    drafted_B: Ints
    ended: float | None


class CombinedDrafter:
    """Implements `leadout.interfaces.Drafter`, and `Stateful` for history and measurements."""

    def __init__(self, history: HistoryDrafter, model: Drafter, choice: SourceChoice, *, device: torch.device) -> None:
        self.history = history
        self.model = model
        self._choice = choice
        self._device = device
        self._pending: _Pending | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's."""
        return self.model.taps

    @property
    def runs_context(self) -> bool:
        """As the model."""
        return self.model.runs_context

    @property
    def point_mass(self) -> bool:
        """Whether every draft is a point mass: the model's are too."""
        return self.model.point_mass

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """New rows for both."""
        self.history.admit(slots, requests, prompt_taps_PF)
        self.model.admit(slots, requests, prompt_taps_PF)

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """Look up, ask the model for the rows that need it, and put both together."""
        found = self.history.look_up(slots, lengths_B)
        looks_up_B, asks_B = self._choice.choose(found.matched_B, found.counts_B, lengths_B)
        began = self._choice.now()
        made, index_A = None, np.flatnonzero(asks_B)
        if index_A.size:
            rows = _SomeRows(noise, torch.from_numpy(index_A).to(self._device))
            made = self.model.propose([slots[int(i)] for i in index_A], lengths_B[index_A], rows)
        draft = self._joined(found, looks_up_B, made, index_A)
        ended = self._choice.now()
        if made is not None and began is not None and ended is not None:
            self._choice.record_seconds(len(slots), ended - began, None)
        self._pending = _Pending(tuple(slots), looks_up_B, found.matched_B, draft.counts_B, ended)
        return draft

    def _joined(
        self, found: LookedUp, looks_up_B: npt.NDArray[np.bool_], made: Draft | None, index_A: npt.NDArray[np.intp]
    ) -> Draft:
        counts_B = np.where(looks_up_B, found.counts_B, 0)
        if made is not None:
            counts_B[index_A] = made.counts_B
        width = int(max(counts_B.max(initial=0), 1))
        held = min(width, found.tokens_BK.shape[1])
        tokens_BK = torch.zeros((len(counts_B), width), dtype=torch.int64, device=self._device)
        looked_BK = np.where(looks_up_B[:, None], found.tokens_BK, 0)[:, :held]
        tokens_BK[:, :held] = torch.from_numpy(np.ascontiguousarray(looked_BK)).to(self._device)
        probs = None
        if made is not None:
            rows_A = torch.from_numpy(index_A).to(self._device)
            made_width = min(width, made.tokens_BK.shape[1])
            tokens_BK[rows_A, :made_width] = made.tokens_BK[:, :made_width]
            if made.probs is not None:
                probs = _spread(made.probs, rows_A, len(counts_B), width)
        mixes = None if self.model.point_mass else looks_up_B
        return Draft(tokens_BK=tokens_BK, counts_B=counts_B, probs=probs, looked_up_B=mixes)

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: Ints,
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Committed tokens for both; measure the round they ended."""
        pending, self._pending = self._pending, None
        asked = 0 if pending is None else len(pending.slots)
        # A probe asks the first rows only.
        if pending is not None and pending.slots == tuple(slots[:asked]):
            accepted_B = np.minimum(counts_B[:asked] - 1, pending.drafted_B)
            self._choice.record(pending.looked_up_B, pending.matched_B, pending.drafted_B, accepted_B)
            now = self._choice.now()
            if now is not None and pending.ended is not None and asked == len(slots):
                self._choice.record_seconds(len(slots), None, now - pending.ended)
        self.history.observe(slots, tokens_BN, counts_B, None)
        self.model.observe(slots, tokens_BN, counts_B, taps_BNF)

    def release(self, slots: Sequence[int]) -> None:
        """Rows are over for both."""
        self.history.release(slots)
        self.model.release(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """New weights of the model."""
        self.model.load(weights, version)

    def state_dict(self) -> dict[str, object]:
        """History and measured acceptance."""
        return {"history": self.history.state_dict(), "choice": self._choice.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore them."""
        history, choice = state["history"], state["choice"]
        assert isinstance(history, dict) and isinstance(choice, dict)
        self.history.load_state_dict(history)
        self._choice.load_state_dict(choice)


def _spread(probs: DraftProbs, rows_A: torch.Tensor, num_rows: int, width: int) -> DraftProbs:
    """The q of some rows among all rows of the round; the others hold nothing."""
    made_width = min(width, probs.values_BKV.shape[1])
    values_BKV = probs.values_BKV.new_zeros((num_rows, width, probs.values_BKV.shape[2]))
    columns_BK = probs.columns_BK.new_zeros((num_rows, width))
    values_BKV[rows_A, :made_width] = probs.values_BKV[:, :made_width]
    columns_BK[rows_A, :made_width] = probs.columns_BK[:, :made_width]
    return DraftProbs(values_BKV=values_BKV, columns_BK=columns_BK, token_ids_V=probs.token_ids_V)
