"""Accept rules with a known mistake, for the engine's `rule`.

Each is the exact rule with one part exchanged, so that what differs is plain to see.

Axes: B rows, K drafts, N = K + 1 positions, V policy vocabulary, R rows that rejected a draft, X = B x N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft
from leadout.models.randomness import Purpose
from leadout.models.sampling import Law, ParamsBatch, filter_weights
from leadout.records import SamplingParams
from leadout.rollout.accept import (
    AcceptRule,
    Verdict,
    acceptance_probability,
    full_probs,
    leading,
    residual,
    verify,
)
from leadout.rollout.numbers import RoundNumbers

Ints = npt.NDArray[np.int64]
Accept = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Residual = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Change = Callable[[Law], Law]


def exact_residual(p_RV: torch.Tensor, q_RV: torch.Tensor, draft_R: torch.Tensor) -> torch.Tensor:
    """(p - q)+."""
    return residual(p_RV, q_RV)


def without_draft(p_RV: torch.Tensor, q_RV: torch.Tensor, draft_R: torch.Tensor) -> torch.Tensor:
    """p without the draft."""
    return p_RV.scatter(-1, draft_R[:, None], 0.0)


def one_token_residual(p_RV: torch.Tensor, q_RV: torch.Tensor, draft_R: torch.Tensor) -> torch.Tensor:
    """q subtracted at the drafted token only; after a rejection nothing is left of p there."""
    p_R1, q_R1 = p_RV.gather(-1, draft_R[:, None]), q_RV.gather(-1, draft_R[:, None])
    return p_RV.scatter(-1, draft_R[:, None], (p_R1 - q_R1).clamp(min=0.0))


def policy_residual(p_RV: torch.Tensor, q_RV: torch.Tensor, draft_R: torch.Tensor) -> torch.Tensor:
    """p itself."""
    return p_RV


def point_acceptance(p_X: torch.Tensor, q_X: torch.Tensor) -> torch.Tensor:
    """p(d), as if the draft were certain."""
    return p_X.double()


def same(law: Law) -> Law:
    """No change."""
    return law


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRule:
    """The rule for sampled drafts with parts exchanged; point-mass drafts keep the exact rule."""

    accept: Accept = acceptance_probability
    correction: Residual = exact_residual
    accept_law: Change = same
    """Law that acceptance looks at."""
    correction_law: Change = same
    """Law that corrections come from."""
    bonus_law: Change = same
    """Law that the bonus comes from."""
    bonus_shift: int = 0
    """The bonus is drawn this many positions away."""

    def __call__(self, law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
        """One round of B rows."""
        if draft.probs is None:
            return verify(law, draft, numbers)
        num_rows, num_drafts = draft.tokens_BK.shape
        start_B1 = torch.arange(num_rows)[:, None] * (num_drafts + 1)
        index_BK = start_B1 + torch.arange(num_drafts)
        seen = self.accept_law(law)
        p_BK = seen.weights_XV[index_BK, draft.tokens_BK].double() / seen.total_X[index_BK]
        q_BK = draft.probs.values_BKV.gather(-1, draft.probs.columns_BK[..., None]).squeeze(-1).clamp_min(1e-45)
        accepts_BK = numbers.accept_uniforms(num_drafts) < self.accept(p_BK, q_BK)
        accepted_B = leading(accepts_BK.numpy(), draft.counts_B)
        return Verdict(accepted_B, self._next(law, draft, accepted_B, numbers))

    def _next(self, law: Law, draft: Draft, accepted_B: Ints, numbers: RoundNumbers) -> torch.Tensor:
        assert draft.probs is not None
        num_rows, num_drafts = draft.tokens_BK.shape
        start_B, offset_B = torch.arange(num_rows) * (num_drafts + 1), torch.from_numpy(accepted_B)
        bonus_B = (offset_B + self.bonus_shift).clamp(min=0)
        uniforms_B = numbers.token_uniforms(num_drafts + 1).gather(-1, offset_B[:, None]).squeeze(-1)
        next_B = self.bonus_law(law.rows(start_B + bonus_B)).draw(uniforms_B)
        rejected_R = torch.from_numpy((accepted_B < draft.counts_B).nonzero()[0])
        if rejected_R.numel() == 0:
            return next_B
        at_R = offset_B[rejected_R]
        vocab_size = law.weights_XV.shape[-1]
        p_RV = self.correction_law(law.rows(start_B[rejected_R] + at_R)).probs(vocab_size)
        q_RV = full_probs(draft.probs, rejected_R, at_R, p_RV)
        weights_RV = self.correction(p_RV, q_RV, draft.tokens_BK[rejected_R, at_R])
        empty_R1 = weights_RV.sum(-1, keepdim=True) <= 0.0
        weights_RV = torch.where(empty_R1, p_RV, weights_RV)
        residual_R = numbers.residual_uniforms(accepted_B)[rejected_R]
        return next_B.scatter(0, rejected_R, Law.from_weights(weights_RV).draw(residual_R))


@dataclass(frozen=True, slots=True)
class _SharedAccept(RoundNumbers):
    """The number that decided acceptance draws the correction."""

    @property
    def correcting(self) -> Purpose:
        """Another purpose's."""
        return Purpose.ACCEPT


@dataclass(frozen=True, slots=True)
class _SharedDraft(RoundNumbers):
    """The number that drew the draft draws the correction."""

    @property
    def correcting(self) -> Purpose:
        """Another purpose's."""
        return Purpose.DRAFT


@dataclass(frozen=True, slots=True)
class RenumberedRule:
    """The exact rule over other numbers."""

    kind: type[RoundNumbers]

    def __call__(self, law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
        """One round of B rows."""
        changed = self.kind(numbers.seed_B, numbers.draw_B, numbers.sibling_B, numbers.start_B, numbers.device)
        return verify(law, draft, changed)


def shared_accept_rule() -> AcceptRule:
    """Acceptance and correction from one number."""
    return RenumberedRule(_SharedAccept)


def shared_draft_rule() -> AcceptRule:
    """Draft and correction from one number."""
    return RenumberedRule(_SharedDraft)


def mixed_rows(law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
    """Where rows accepted different counts, each gets its neighbour's correction or bonus."""
    verdict = verify(law, draft, numbers)
    ragged = bool((verdict.accepted_B != verdict.accepted_B[0]).any())
    return Verdict(verdict.accepted_B, verdict.next_B.roll(1)) if ragged else verdict


@dataclass(frozen=True, slots=True)
class Filtered:
    """A law after the filters of `params`, for rules that are handed the unfiltered one."""

    params: SamplingParams
    _batches: dict[int, ParamsBatch] = field(default_factory=dict)

    def __call__(self, law: Law) -> Law:
        """Zero everything outside the filters."""
        rows = law.weights_XV.shape[0]
        if rows not in self._batches:
            self._batches[rows] = ParamsBatch.of([self.params] * rows)
        return Law.from_weights(filter_weights(law.weights_XV, self._batches[rows]))


@dataclass(frozen=True, slots=True)
class Untempered:
    """A tempered law at temperature 1 again."""

    temperature: float

    def __call__(self, law: Law) -> Law:
        """Weights to the power of the temperature."""
        return Law.from_weights(law.weights_XV**self.temperature)
