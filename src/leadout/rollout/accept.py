"""The accept rule: which drafts are kept, and what replaces the first one that is not. Pure functions of p, q, numbers.

For every position the emitted token has the policy's law p, whatever the drafter proposed:

- a sampled draft d ~ q is kept with probability min(1, p(d)/q(d)); else the token is drawn from (p - q)+ normalised
  (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", theorem 1 and appendix A.1;
  Chen et al. 2023, algorithm 2);
- a point-mass draft d is kept iff it equals x, where x ~ p is drawn with the position's own number. It is the same
  rule with q = 1 at d, and the emitted tokens are those of plain decoding.

After the last draft was kept one more token, the bonus, is drawn from p.

Axes: B rows, K drafts, N = K + 1 positions, V policy vocabulary, R some rows, X = B x N positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from leadout.errors import ModelError
from leadout.interfaces import Draft, DraftProbs
from leadout.models.sampling import Law, native_for
from leadout.rollout.numbers import RoundNumbers

MIN_RESIDUAL_MASS = 1e-7
_NOT_FINITE = (
    "the drafter gives probabilities that are not finite: its weights are broken; start it anew or from another "
    "checkpoint, or set rollout.speculative_config: null"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one round."""

    accepted_B: npt.NDArray[np.int64]
    """Drafts kept, 0 <= accepted <= drafted."""
    next_B: torch.Tensor
    """The correction or bonus after them, i64."""


class AcceptRule(Protocol):
    """Decides a round; the engine's is `verify`, the audit injects faulty ones."""

    def __call__(self, law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
        """`law` holds X = B x N positions, row-major; position n of row b follows its first n drafts."""
        ...


def acceptance_probability(p_X: torch.Tensor, q_X: torch.Tensor) -> torch.Tensor:
    """min(1, p/q) of drafted tokens, f64[X]; q must be positive where a token was drafted."""
    return (p_X.double() / q_X.double()).clamp(max=1.0)


def residual(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """(p - q)+ over the full vocabulary, not normalised; p itself where nothing but rounding is left of it."""
    rest_RV = (p_RV - q_RV).clamp_min(0.0)
    empty_R = rest_RV.sum(-1) < MIN_RESIDUAL_MASS
    return torch.where(empty_R[:, None], p_RV, rest_RV)


def full_probs(probs: DraftProbs, rows_R: torch.Tensor, offset_R: torch.Tensor, like_RV: torch.Tensor) -> torch.Tensor:
    """Q of some rows at one position each, over the policy's vocabulary (0 outside the draft vocabulary)."""
    q_RD = probs.values_BKV[rows_R, offset_R].to(like_RV.dtype)
    q_RV = torch.zeros_like(like_RV)
    if probs.token_ids_V is None:
        q_RV[:, : q_RD.shape[-1]] = q_RD
    else:
        q_RV[:, probs.token_ids_V] = q_RD
    return q_RV


def verify(law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
    """The exact rule for one round of B rows with up to K drafts each."""
    if draft.probs is None:
        return verify_point_mass(law, draft, numbers)
    if draft.looked_up_B is None or not draft.looked_up_B.any():
        return verify_sampled(law, draft, draft.probs, numbers)
    return verify_mixed(law, draft, draft.probs, draft.looked_up_B, numbers)


def verify_mixed(
    law: Law, draft: Draft, probs: DraftProbs, looked_up_B: npt.NDArray[np.bool_], numbers: RoundNumbers
) -> Verdict:
    """Each row by the rule of its own kind of draft, as if the others were not there.

    Either rule emits p given everything before the position, and which of them a row gets is known before its tokens
    are drawn, so a rollout whose rounds change between them still has the policy's law. Its tokens equal plain
    decoding's only as long as all its rounds were looked up.
    """
    exact = verify_point_mass(law, draft, numbers)
    sampled = verify_sampled(law, draft, probs, numbers)
    chooses_B = torch.from_numpy(looked_up_B).to(sampled.next_B.device)
    return Verdict(
        np.where(looked_up_B, exact.accepted_B, sampled.accepted_B),
        torch.where(chooses_B, exact.next_B, sampled.next_B),
    )


def verify_point_mass(law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
    """Draw every position from p with its own number; drafts are kept while they equal the draws."""
    num_rows, num_drafts = draft.tokens_BK.shape
    drawn_X = law.draw(numbers.token_uniforms(num_drafts + 1).reshape(-1))
    drawn_BN = drawn_X.cpu().numpy().reshape(num_rows, num_drafts + 1)
    accepted_B = leading(drawn_BN[:, :num_drafts] == draft.tokens_BK.cpu().numpy(), draft.counts_B)
    next_B = drawn_BN[np.arange(num_rows), accepted_B]
    return Verdict(accepted_B, torch.from_numpy(next_B).to(drawn_X.device))


def verify_sampled(law: Law, draft: Draft, probs: DraftProbs, numbers: RoundNumbers) -> Verdict:
    """Accept with min(1, p/q); at the first rejection draw from the residual, after none from p.

    Raises:
        ModelError: a q that was drafted from is not finite.

    """
    num_rows, num_drafts = draft.tokens_BK.shape
    device = draft.tokens_BK.device
    library = native_for(law.weights_XV)
    if library is not None and probs.values_BKV.dtype is torch.float32:
        weights = law.weights_XV, law.block_sums_XC, law.total_X
        numbers_3BN = numbers.judging_uniforms(num_drafts + 1)
        drafts = draft.tokens_BK, draft.counts_B, probs.values_BKV, probs.columns_BK, probs.token_ids_V
        judged = library.judge(weights, *drafts, numbers_3BN, MIN_RESIDUAL_MASS)
        if judged is None:
            raise ModelError(_NOT_FINITE)
        return Verdict(*judged)
    is_drafted_BK = torch.from_numpy(np.arange(num_drafts) < draft.counts_B[:, None]).to(device)
    if not math.isfinite(float(probs.values_BKV[is_drafted_BK].sum())):
        raise ModelError(_NOT_FINITE)
    index_BK = torch.arange(num_rows, device=device)[:, None] * (num_drafts + 1)
    index_BK = index_BK + torch.arange(num_drafts, device=device)
    p_BK = law.weights_XV[index_BK, draft.tokens_BK].double() / law.total_X[index_BK]
    q_BK = probs.values_BKV.gather(-1, probs.columns_BK[..., None]).squeeze(-1)
    # Padding past a row's count may hold q = 0; its outcome is not used.
    accepts_BK = numbers.accept_uniforms(num_drafts) < acceptance_probability(p_BK, q_BK.clamp_min(1e-45))
    accepted_B = leading(accepts_BK.cpu().numpy(), draft.counts_B)
    return Verdict(accepted_B, draw_next(law, draft, probs, accepted_B, numbers))


def draw_next(
    law: Law, draft: Draft, probs: DraftProbs, accepted_B: npt.NDArray[np.int64], numbers: RoundNumbers
) -> torch.Tensor:
    """i64[B]: the correction of rows that rejected a draft, the bonus of the others. One draw per row."""
    num_rows, num_drafts = draft.tokens_BK.shape
    device = draft.tokens_BK.device
    offset_B = torch.from_numpy(accepted_B).to(device)
    last = law.rows(torch.arange(num_rows, device=device) * (num_drafts + 1) + offset_B)
    token_uniforms_B = numbers.token_uniforms(num_drafts + 1).gather(-1, offset_B[:, None]).squeeze(-1)
    rejected_R = torch.from_numpy((accepted_B < draft.counts_B).nonzero()[0]).to(device)
    if rejected_R.numel() == 0:
        return last.draw(token_uniforms_B)
    weights_BV = last.weights_XV.clone()
    p_RV = last.rows(rejected_R).probs(last.weights_XV.shape[-1])
    weights_BV[rejected_R] = residual(p_RV, full_probs(probs, rejected_R, offset_B[rejected_R], p_RV))
    uniforms_B = token_uniforms_B.clone()
    uniforms_B[rejected_R] = numbers.residual_uniforms(accepted_B)[rejected_R]
    return Law.from_weights(weights_BV).draw(uniforms_B)


def leading(holds_BK: npt.NDArray[np.bool_], counts_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """i64[B]: how many of the first `counts_B` entries of each row hold before the first that does not."""
    outcome_BK = holds_BK & (np.arange(holds_BK.shape[1]) < counts_B[:, None])
    return np.asarray(np.logical_and.accumulate(outcome_BK, axis=1).sum(axis=1), np.int64)
