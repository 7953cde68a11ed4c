"""What an audit sees of a round: the verified drafts of the rows that ask for a trace, with the law they came from.

Axes: B live rows, S rows that drafted, K longest draft, D verified drafts of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft
from leadout.records import FloatArray, IntArray, Trace
from leadout.rollout.accept import full_probs
from leadout.rollout.decide import Drafted
from leadout.rollout.live import LiveRows
from leadout.rollout.rows import RowTable

Ints = npt.NDArray[np.int64]


def trace_round(
    table: RowTable,
    live: LiveRows,
    drafted: Drafted,
    accepted_B: Ints,
    first_B: Ints,
    counts_B: Ints,
    vocab_size: int,
) -> None:
    """Keep the verified drafts of rows that are being audited.

    `first_B`: position of the round's first token; `counts_B`: tokens committed.
    """
    draft = drafted.draft
    for index, place in enumerate(drafted.rows_S.tolist()):
        row = live.rows[place]
        if not row.request.params.trace:
            continue
        verified = int(min(accepted_B[place] + 1, draft.counts_B[index], counts_B[place]))
        law = traced_law(draft, index, verified, vocab_size)
        row.trace.append(
            Trace(
                round_D=np.full(verified, table.num_rounds(row.slot), np.int32),
                position_D=np.arange(verified, dtype=np.int32) + np.int32(first_B[place]),
                draft_D=draft.tokens_BK[index, :verified].cpu().numpy().astype(np.int32),
                accepted_D=np.arange(verified) < accepted_B[place],
                draft_prob_D=law.prob_D,
                probs_DV=law.probs_DV,
                token_ids_V=law.token_ids_V,
            )
        )


@dataclass(frozen=True, slots=True)
class TracedLaw:
    """q of some drafts of one row, as `Trace` holds it."""

    prob_D: FloatArray
    probs_DV: FloatArray | None
    token_ids_V: IntArray | None


def traced_law(draft: Draft, row: int, verified: int, vocab_size: int) -> TracedLaw:
    """What the first `verified` drafts of a row were proposed from.

    Where a drafter mixes looked-up and sampled drafts, all are written over the policy's whole vocabulary, looked-up
    ones as a one-hot q: the rule for point masses is the sampled rule with such a q.
    """
    probs = draft.probs
    if draft.looked_up_B is None and probs is None:
        return TracedLaw(np.ones(verified, np.float32), None, None)
    tokens_D = draft.tokens_BK[row, :verified]
    if draft.looked_up_B is None:
        assert probs is not None
        prob_D = probs.values_BKV[row, torch.arange(verified), probs.columns_BK[row, :verified]]
        ids_V = None if probs.token_ids_V is None else probs.token_ids_V.cpu().numpy().astype(np.int32)
        return TracedLaw(prob_D.cpu().numpy(), probs.values_BKV[row, :verified].cpu().numpy(), ids_V)
    dtype = torch.float32 if probs is None else probs.values_BKV.dtype
    whole_DV = torch.zeros((verified, vocab_size), dtype=dtype, device=tokens_D.device)
    if probs is None or draft.looked_up_B[row]:
        whole_DV.scatter_(1, tokens_D[:, None], 1.0)
    else:
        rows_D, offset_D = torch.full_like(tokens_D, row), torch.arange(verified, device=tokens_D.device)
        whole_DV = full_probs(probs, rows_D, offset_D, whole_DV)
    prob_D = whole_DV.gather(1, tokens_D[:, None]).squeeze(1)
    return TracedLaw(prob_D.cpu().numpy(), whole_DV.cpu().numpy(), None)
