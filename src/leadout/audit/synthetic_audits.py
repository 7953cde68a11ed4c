"""Many audits of the synthetic policy, by the code that audits real generators.

Axes: N tokens of all rollouts in order, D verified drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from leadout.audit.biased_rules import Floats, Ints
from leadout.audit.floor import Floor
from leadout.audit.law import Law, log_full, make_law
from leadout.audit.measure import (
    NUM_DRAFT_UNIFORMS,
    DraftColumns,
    TokenColumns,
    measure_correction_floor,
    measure_draft_floor,
    measure_drafts,
    measure_floor,
    measure_tokens,
)
from leadout.audit.sample import AuditSample, Labels
from leadout.audit.synthetic import Made, Setup, simulate
from leadout.audit.tolerances import Precision, tolerances_for

FLOOR_POSITIONS = 20_000
"""Positions of a batch that measure the rounding floors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Measured:
    tokens: TokenColumns
    drafts: DraftColumns
    draft_index_D: Ints
    law: Law
    rounded_NV: torch.Tensor


def _measure(setup: Setup, made: Made, precision: Precision, rng: np.random.Generator) -> _Measured:
    scores_NV = log_full(torch.from_numpy(made.exact_NV), setup.params)
    law = make_law(scores_NV, setup.params, tolerances_for(precision))
    tokens = measure_tokens(law, torch.from_numpy(made.token_N), torch.from_numpy(rng.random(made.token_N.shape[0])))
    index_D = made.verified_N.nonzero()[0]
    drafts = measure_drafts(
        law.rows(torch.from_numpy(index_D)),
        torch.from_numpy(made.token_N[index_D]),
        torch.from_numpy(made.draft_N[index_D]),
        torch.from_numpy(made.accepted_N[index_D]),
        None if setup.point_drafts else torch.from_numpy(made.q_NV[index_D]),
        torch.from_numpy(rng.random((NUM_DRAFT_UNIFORMS, index_D.shape[0]))),
    )
    rounded_NV = log_full(torch.from_numpy(made.rounded_NV), setup.params)
    return _Measured(tokens=tokens, drafts=drafts, draft_index_D=index_D, law=law, rounded_NV=rounded_NV)


def samples(setup: Setup, num_audits: int, seed: int, precision: Precision = "bfloat16") -> Iterator[AuditSample]:
    """Independent audits of one generator, each ready to be judged; they share the rounding floors of their policy."""
    made = simulate(setup, num_audits, seed)
    found = _measure(setup, made, precision, np.random.default_rng(seed + 1))
    floor = _floor(setup, found, made)
    starts = np.searchsorted(made.rollout_N, np.arange(num_audits + 1) * setup.num_rollouts)
    draft_starts = np.searchsorted(found.draft_index_D, starts)
    error_N = made.logprob_N - _at(found.law.log_full_NV, made.token_N)
    for audit in range(num_audits):
        rows = slice(int(starts[audit]), int(starts[audit + 1]))
        drafts = slice(int(draft_starts[audit]), int(draft_starts[audit + 1]))
        sample = AuditSample(setup.params, tolerances_for(precision), setup.rounding > 0.0)
        sample.floor = floor
        rollout_N = made.rollout_N[rows]
        labels = Labels(class_N=made.class_N[rows], rollout_N=rollout_N, draw_N=rollout_N // setup.num_siblings)
        sample.rollouts = setup.num_rollouts
        sample.add_tokens(found.tokens.take(rows), labels)
        sample.add_logprobs(error_N[rows], error_N[rows])
        index_D = found.draft_index_D[drafts]
        if setup.traced and index_D.size:
            sample.add_drafts(found.drafts.take(drafts), made.class_N[index_D])
        yield sample


def _at(scores_NV: torch.Tensor, token_N: Ints) -> Floats:
    return np.asarray(scores_NV.gather(-1, torch.from_numpy(token_N)[:, None])[:, 0].numpy(), np.float64)


def _floor(setup: Setup, found: _Measured, made: Made) -> Floor:
    """Rounding floors from the first positions of the batch."""
    floor = Floor()
    if setup.rounding == 0.0:
        return floor
    head_N = torch.arange(min(FLOOR_POSITIONS, made.token_N.size))
    measure_floor(floor, found.law.rows(head_N), found.rounded_NV[head_N])
    floor.square.add((_at(found.rounded_NV, made.token_N) - _at(found.law.log_full_NV, made.token_N)) ** 2)
    index_D = found.draft_index_D[:FLOOR_POSITIONS]
    if index_D.size:
        draft_D, accepted_D = torch.from_numpy(made.draft_N[index_D]), torch.from_numpy(made.accepted_N[index_D])
        q_DV = None if setup.point_drafts else torch.from_numpy(made.q_NV[index_D])
        law, moved_DV = found.law.rows(torch.from_numpy(index_D)), found.rounded_NV[index_D]
        measure_draft_floor(floor, law, moved_DV, draft_D, accepted_D, q_DV)
        rejected = (~accepted_D).nonzero()[:, 0]
        q_rejected = None if q_DV is None else q_DV[rejected]
        measure_correction_floor(floor, law.rows(rejected), moved_DV[rejected], draft_D[rejected], q_rejected)
    return floor
