"""From one rollout and the learner's logits to the numbers that the tests sum.

Everything per vocabulary lives only inside one chunk of positions here; what leaves is a few floats per token.

Axes: T tokens of a rollout, N positions of a chunk, D traced drafts, V policy vocabulary, L tilts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from leadout.audit.floor import Floor, in_order
from leadout.audit.law import Law
from leadout.audit.t1_pit import id_uniform, ordered_uniform
from leadout.audit.t2_ratio import LOG_ZERO, log_ratio
from leadout.audit.t3_tilt import tilt_terms
from leadout.audit.t4_rule import accept_probability, impossible_corrections, origin_weights
from leadout.audit.tails import Floats

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

SURE_SUPPORT = 0.002
"""The parts of the accept rule are tested where rounding may change the support's mass by less than this share."""
NUM_DRAFT_UNIFORMS = 5
"""Independent uniforms that `measure_drafts` takes for every draft."""
MIN_RESIDUAL = 0.02
"""A residual with less mass than this is rounding rather than a law; its corrections are not tested."""


class Columns:
    """A record of equally long arrays that can be joined."""

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """One record from several, in order."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def take(self, index: Ints | slice) -> Self:
        """Some of the rows, in the order of `index`."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns(Columns):
    """What the tests need of every emitted token."""

    token_N: Ints
    """The token."""
    inside_N: Bools
    """Surely inside the support: used by T1, T2, T3, T7."""
    outside_N: Bools
    """Surely outside: counted by T5."""
    uniform_N: Floats
    """T1's U; nan unless inside."""
    power2_N: Floats
    """sum p^2."""
    power3_N: Floats
    """sum p^3."""
    excess_N: Floats
    """-log p(x) minus the entropy."""
    variance_N: Floats
    """Variance of log p under p."""
    tilts_NL: Floats
    """log growth of each temperature tilt."""
    law_low_N: Floats
    """Least log-probability of the sampled law."""
    law_high_N: Floats
    """Largest log-probability of the sampled law."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftColumns(Columns):
    """What the tests need of every traced draft; nan where a test cannot use it."""

    point_D: Bools
    """Point-mass proposal."""
    ratio_uniform_D: Floats
    """T2's U of the emitted token (sampled proposals)."""
    hit_D: Bools
    """The emitted token is the draft."""
    hit_chance_D: Floats
    """p(draft) of point-mass proposals."""
    accepted_D: Bools
    """The draft was accepted."""
    accept_low_D: Floats
    """Least acceptance probability the support allows (sampled proposals)."""
    accept_high_D: Floats
    """Largest."""
    origin_uniform_D: Floats
    """U of the emitted token in the law of accepted tokens or of corrections, by id."""
    correction_ratio_D: Floats
    """The same for corrections, ordered by p/q."""
    rejected_draft_D: Floats
    """U of a rejected draft in the law of rejected drafts, by id."""
    impossible_D: Bools
    """A correction where the residual is zero."""
    draft_uniform_D: Floats
    """U of the draft in q (sampled proposals)."""


def measure_tokens(law: Law, token_N: torch.Tensor, v_N: torch.Tensor) -> TokenColumns:
    """T1, T3, T5 and T7's numbers for the tokens drawn at N positions; `v_N` are the audit's own uniforms."""
    log_p_NV = law.log_p_NV()
    p_NV = log_p_NV.exp()
    log_full_x_N = law.log_full_NV.gather(-1, token_N[:, None])[:, 0]
    inside_N = log_full_x_N >= law.inner_N
    log_p_x_N = torch.where(inside_N, log_p_NV.gather(-1, token_N[:, None])[:, 0], 0.0)
    finite_NV = log_p_NV.clamp(min=LOG_ZERO)
    weighted_NV = p_NV * finite_NV
    mean_N = weighted_NV.sum(-1).double()
    square_N = torch.linalg.vecdot(weighted_NV, finite_NV).double()
    squared_NV = p_NV * p_NV
    uniform_N = ordered_uniform(log_p_NV, p_NV, token_N, v_N)
    inner_mass_N = torch.where(torch.isneginf(law.log_inner_mass_N), log_full_x_N, law.log_inner_mass_N)
    return TokenColumns(
        token_N=token_N.numpy(),
        inside_N=inside_N.numpy(),
        outside_N=(log_full_x_N < law.outer_N).numpy(),
        uniform_N=torch.where(inside_N, uniform_N, torch.nan).numpy(),
        power2_N=squared_NV.sum(-1).double().numpy(),
        power3_N=torch.linalg.vecdot(squared_NV, p_NV).double().numpy(),
        excess_N=(mean_N - log_p_x_N.double()).numpy(),
        variance_N=(square_N - mean_N**2).clamp(min=0.0).numpy(),
        tilts_NL=tilt_terms(log_p_NV, p_NV, log_p_x_N).numpy(),
        law_low_N=(log_full_x_N - law.log_outer_mass_N).clamp(max=0.0).double().numpy(),
        law_high_N=(log_full_x_N - inner_mass_N).clamp(max=0.0).double().numpy(),
    )


def measure_drafts(
    law: Law,
    token_D: torch.Tensor,
    draft_D: torch.Tensor,
    accepted_D: torch.Tensor,
    q_DV: torch.Tensor | None,
    v_5D: torch.Tensor,
) -> DraftColumns:
    """T2 and T4's numbers of D verified drafts; `law` at their positions, `q_DV` None for a point mass."""
    log_p_DV = law.log_p_NV()
    p_DV = log_p_DV.exp()
    p_token_D = p_DV.gather(-1, token_D[:, None])[:, 0]
    inside_D = p_token_D > 0
    sure_D = (law.log_outer_mass_N - law.log_inner_mass_N) <= SURE_SUPPORT
    weight_DV = origin_weights(p_DV, q_DV, draft_D, accepted_D)
    origin_D = id_uniform(weight_DV, token_D, v_5D[1])
    mass_D = weight_DV.sum(-1)
    if q_DV is None:
        tested_D = ~accepted_D & inside_D & (mass_D > MIN_RESIDUAL)
        p_draft_D = p_DV.gather(-1, draft_D[:, None])[:, 0].double()
        chance_D = torch.where(inside_D & (p_draft_D > 0), p_draft_D.clamp(max=1.0), torch.nan)
        return _point_columns(token_D, draft_D, accepted_D, chance_D, torch.where(tested_D, origin_D, torch.nan))
    q_draft_D = q_DV.gather(-1, draft_D[:, None])[:, 0]
    low_D, _ = support_range(law, draft_D)
    _, high_D = support_range(law, draft_D)
    _, token_high_D = support_range(law, token_D)
    ratio_DV = log_ratio(log_p_DV, q_DV)
    ratio_D = ordered_uniform(ratio_DV, p_DV, token_D, v_5D[0])
    law_DV = weight_DV / mass_D[:, None].clamp(min=1e-30)
    correction_D = ordered_uniform(ratio_DV, law_DV, token_D, v_5D[3])
    rejected_D = id_uniform((q_DV - p_DV).clamp(min=0.0), draft_D, v_5D[4])
    tested_D = sure_D & inside_D & (mass_D > torch.where(accepted_D, 0.0, MIN_RESIDUAL))
    q_token_D = q_DV.gather(-1, token_D[:, None])[:, 0]
    return DraftColumns(
        point_D=np.zeros(token_D.shape[0], bool),
        ratio_uniform_D=torch.where(inside_D, ratio_D, torch.nan).numpy(),
        hit_D=(token_D == draft_D).numpy(),
        hit_chance_D=np.full(token_D.shape[0], np.nan),
        accepted_D=accepted_D.numpy(),
        accept_low_D=accept_probability(low_D, q_draft_D).numpy(),
        accept_high_D=accept_probability(high_D, q_draft_D).numpy(),
        origin_uniform_D=torch.where(tested_D, origin_D, torch.nan).numpy(),
        correction_ratio_D=torch.where(tested_D & ~accepted_D, correction_D, torch.nan).numpy(),
        rejected_draft_D=torch.where(tested_D & ~accepted_D, rejected_D, torch.nan).numpy(),
        impossible_D=impossible_corrections(token_high_D, q_token_D, accepted_D).numpy(),
        draft_uniform_D=id_uniform(q_DV, draft_D, v_5D[2]).numpy(),
    )


def _point_columns(
    token_D: torch.Tensor,
    draft_D: torch.Tensor,
    accepted_D: torch.Tensor,
    chance_D: torch.Tensor,
    correction_D: torch.Tensor,
) -> DraftColumns:
    """Point-mass drafts: whether they were hit, against p(draft), and the U of corrections."""
    nan_D = np.full(token_D.shape[0], np.nan)
    return DraftColumns(
        point_D=np.ones(token_D.shape[0], bool),
        ratio_uniform_D=nan_D,
        hit_D=(token_D == draft_D).numpy(),
        hit_chance_D=chance_D.numpy(),
        accepted_D=accepted_D.numpy(),
        accept_low_D=nan_D,
        accept_high_D=nan_D,
        origin_uniform_D=correction_D.numpy(),
        correction_ratio_D=nan_D,
        rejected_draft_D=nan_D,
        impossible_D=(~accepted_D & (token_D == draft_D)).numpy(),
        draft_uniform_D=nan_D,
    )


def support_range(law: Law, token_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest probability of a token in the sampled law, over every support between inner and outer."""
    score_D = law.log_full_NV.gather(-1, token_D[:, None])[:, 0].double()
    least_D = torch.where(score_D >= law.inner_N, (score_D - law.log_outer_mass_N).exp(), 0.0)
    # Inside the band the token itself and everything above it is kept, so the mass is at least the larger of both.
    mass_D = torch.maximum(law.log_inner_mass_N.double(), score_D)
    largest_D = torch.where(score_D >= law.outer_N, (score_D - mass_D).exp(), 0.0)
    return least_D, largest_D


def measure_floor(floor: Floor, law: Law, rounded_NV: torch.Tensor) -> None:
    """Add N positions to the floors of T1 and T3; `rounded_NV` is log of the unfiltered law of the rounded pass."""
    log_p_NV, log_r_NV = law.log_p_NV(), law.with_scores(rounded_NV)
    p_NV, r_NV = log_p_NV.exp(), log_r_NV.exp()
    floor.pit.add(*in_order(log_p_NV, p_NV, r_NV))
    shift_N = -torch.linalg.vecdot(r_NV - p_NV, log_p_NV.clamp(min=LOG_ZERO)).double()
    usable_N = torch.isfinite(law.inner_N) | torch.isneginf(law.inner_N)
    floor.entropy.add(shift_N[usable_N].numpy())


def measure_draft_floor(
    floor: Floor,
    law: Law,
    rounded_DV: torch.Tensor,
    draft_D: torch.Tensor,
    accepted_D: torch.Tensor,
    q_DV: torch.Tensor | None,
) -> None:
    """Add D verified drafts to the floors of T2 and of T4's acceptances and accepted tokens."""
    log_p_DV, log_r_DV = law.log_p_NV(), law.with_scores(rounded_DV)
    p_DV, r_DV = log_p_DV.exp(), log_r_DV.exp()
    p_draft_D = p_DV.gather(-1, draft_D[:, None])[:, 0]
    r_draft_D = r_DV.gather(-1, draft_D[:, None])[:, 0]
    if q_DV is None:
        floor.accept.add((r_draft_D - p_draft_D).double().numpy())
        return
    floor.ratio.add(*in_order(log_ratio(log_p_DV, q_DV), p_DV, r_DV))
    q_A = q_DV[accepted_D]
    floor.accepted.add(torch.minimum(p_DV[accepted_D], q_A), torch.minimum(r_DV[accepted_D], q_A))
    q_draft_D = q_DV.gather(-1, draft_D[:, None])[:, 0]
    shift_D = accept_probability(r_draft_D, q_draft_D) - accept_probability(p_draft_D, q_draft_D)
    floor.accept.add(shift_D.numpy())


def measure_correction_floor(
    floor: Floor, law: Law, rounded_DV: torch.Tensor, draft_D: torch.Tensor, q_DV: torch.Tensor | None
) -> None:
    """Add D rejected drafts to the floors of T4's corrections; all of them, since they are few and vary most."""
    log_p_DV, log_r_DV = law.log_p_NV(), law.with_scores(rounded_DV)
    rejected_D = torch.zeros(draft_D.shape, dtype=torch.bool)
    exact_DV = origin_weights(log_p_DV.exp(), q_DV, draft_D, rejected_D)
    moved_DV = origin_weights(log_r_DV.exp(), q_DV, draft_D, rejected_D)
    tested_D = exact_DV.sum(-1) > MIN_RESIDUAL
    floor.correction.add(exact_DV[tested_D], moved_DV[tested_D])
    if q_DV is not None:
        ratio_DV = log_ratio(log_p_DV, q_DV)
        floor.correction_ratio.add(*in_order(ratio_DV[tested_D], exact_DV[tested_D], moved_DV[tested_D]))
