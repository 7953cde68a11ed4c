"""One round of the engine: draft, verify, accept, commit. With nothing drafted it is a plain decoding step.

The pending token of a row is its newest one: emitted, not yet in the cache. A round feeds the pending token and the
drafts to the policy in one pass; column n of the result is the law of the token after the first n drafts.

Axes: B live rows, K longest draft, N = K + 1 columns, X = B x N, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.draft_length.controller import RoundOutcome
from leadout.errors import ModelError
from leadout.interfaces import Draft
from leadout.models.sampling import ParamsBatch
from leadout.records import FloatArray, IntArray, Trace
from leadout.rollout.accept import Verdict, full_probs
from leadout.rollout.numbers import RoundNumbers
from leadout.rollout.parts import EngineParts, LawMaker
from leadout.rollout.rows import Row, RowTable
from leadout.rollout.sampler import Laws

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a round with what is constant while the set does not change; B rows."""

    rows: list[Row]
    slots: list[int]
    slots_B: Ints
    params: ParamsBatch
    seed_B: npt.NDArray[np.uint64]
    draw_B: Ints
    sibling_B: Ints
    end_ids: list[tuple[npt.NDArray[np.bool_], Ints]]
    """Distinct sets of end-of-sequence ids with the rows (bool[B]) that use each."""

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> LiveRows:
        """Prepare a set of rows."""
        params = [row.request.params for row in rows]
        distinct = sorted({p.stop_token_ids for p in params if p.stop_token_ids})
        return cls(
            rows=rows,
            slots=[row.slot for row in rows],
            slots_B=np.array([row.slot for row in rows], np.int64),
            params=ParamsBatch.of(params, device),
            seed_B=np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], np.uint64),
            draw_B=np.array([row.request.rollout_id.draw for row in rows], np.int64),
            sibling_B=np.array([row.request.rollout_id.sibling for row in rows], np.int64),
            end_ids=[(np.array([p.stop_token_ids == ids for p in params]), np.array(ids)) for ids in distinct],
        )

    def ends(self, tokens_BN: Ints) -> npt.NDArray[np.bool_]:
        """bool[B, N]: which tokens end their row."""
        ends_BN = np.zeros(tokens_BN.shape, bool)
        for uses_B, ids in self.end_ids:
            ends_BN |= uses_B[:, None] & np.isin(tokens_BN, ids)
        return ends_BN

    def numbers(self, start_B: Ints, device: torch.device, width: int = 1) -> RoundNumbers:
        """The random numbers of a round that starts at these positions and is `width` positions long."""
        return RoundNumbers(self.seed_B, self.draw_B, self.sibling_B, start_B, device, width)


def run_round(
    parts: EngineParts, sampler: LawMaker, table: RowTable, live: LiveRows, num_drafts: int, backlog: int
) -> tuple[list[Row], RoundOutcome]:
    """Advance every live row by at least one token; the rows that ended, and what to tell the draft length."""
    began = time.perf_counter()
    start_B = table.generated_S[live.slots_B].copy()
    numbers = live.numbers(start_B, parts.device, num_drafts + 1)
    draft = _propose(parts, live, np.minimum(num_drafts, table.remaining(live.rows) - 1), numbers)
    drafted_at = time.perf_counter()

    pending_B1 = torch.from_numpy(table.last_tokens(live.slots_B)).to(parts.device)[:, None]
    tokens_BN = pending_B1 if draft is None else torch.cat([pending_B1, draft.tokens_BK], 1)
    counts_B = np.ones(len(live.rows), np.int64) if draft is None else draft.counts_B + 1
    taps = parts.drafter.taps if parts.drafter is not None else ()
    states = parts.decoder.forward(tokens_BN, parts.kv, live.slots, taps, counts_B)
    laws = sampler.laws(parts.decoder.logits(states.hidden_BNH.flatten(0, 1)), live.params, live.slots, tokens_BN)
    if draft is None:
        next_B = laws.sampled.draw(numbers.token_uniforms(1)[:, 0])
        verdict = Verdict(np.zeros(len(live.rows), np.int64), next_B)
    else:
        verdict = parts.rule(laws.sampled, draft, numbers)
    ended = _commit(parts, sampler, table, live, draft, verdict, laws, states.taps_BNF)
    outcome = RoundOutcome(
        num_drafts=0 if draft is None else num_drafts,
        drafted_B=np.zeros(len(live.rows), np.int64) if draft is None else draft.counts_B,
        accepted_B=verdict.accepted_B,
        draft_seconds=drafted_at - began,
        verify_seconds=time.perf_counter() - drafted_at,
        backlog=backlog,
    )
    return ended, outcome


def _propose(parts: EngineParts, live: LiveRows, lengths_B: Ints, numbers: RoundNumbers) -> Draft | None:
    """Drafts for the round; None when no row drafts anything, which makes it a plain step."""
    if parts.drafter is None or not lengths_B.any():
        return None
    draft = parts.drafter.propose(live.slots, lengths_B, numbers)
    if draft.probs is not None and not bool(torch.isfinite(draft.probs.values_BKV.sum())):
        raise ModelError(
            "the drafter gives probabilities that are not finite: its weights are broken; start it anew or from "
            "another checkpoint, or set rollout.speculative_config: null"
        )
    return draft if draft.counts_B.any() else None


def emitted_tokens(draft: Draft | None, verdict: Verdict) -> torch.Tensor:
    """i64[B, N]: accepted drafts followed by the correction or bonus; later columns are meaningless."""
    if draft is None:
        return verdict.next_B[:, None]
    tokens_BN = torch.nn.functional.pad(draft.tokens_BK, (0, 1))
    accepted_B1 = torch.from_numpy(verdict.accepted_B).to(tokens_BN.device)[:, None]
    return tokens_BN.scatter(1, accepted_B1, verdict.next_B[:, None])


def _commit(
    parts: EngineParts,
    sampler: LawMaker,
    table: RowTable,
    live: LiveRows,
    draft: Draft | None,
    verdict: Verdict,
    laws: Laws,
    taps_BNF: torch.Tensor | None,
) -> list[Row]:
    """Write the round into table, caches and drafter."""
    emitted_BN = emitted_tokens(draft, verdict)
    num_rows, width = emitted_BN.shape
    logprobs_BN = laws.sampled.logprob(emitted_BN.reshape(-1)).reshape(num_rows, width).cpu().numpy()
    policy_BN = logprobs_BN
    if laws.policy is not laws.sampled:
        policy_BN = laws.policy.logprob(emitted_BN.reshape(-1)).reshape(num_rows, width).cpu().numpy()
    tokens_BN = emitted_BN.cpu().numpy()
    first_B = table.generated_S[live.slots_B].copy()
    committed = table.commit(live.rows, tokens_BN, verdict.accepted_B + 1, logprobs_BN, policy_BN, live.ends(tokens_BN))
    drafted_B = np.zeros(num_rows, np.int64) if draft is None else draft.counts_B
    if draft is not None:
        _trace(table, live, draft, verdict, first_B, committed.counts_B, parts.vocab_size)
    table.record_round(live.slots_B, drafted_B, np.minimum(verdict.accepted_B, committed.counts_B))
    parts.kv.advance(live.slots, committed.counts_B)
    params = [row.request.params for row in live.rows]
    if live.params.any_penalties:
        sampler.observe(live.slots, params, [emitted_BN[i, :c] for i, c in enumerate(committed.counts_B)])
    if parts.drafter is not None:
        parts.drafter.observe(live.slots, emitted_BN, committed.counts_B, taps_BNF)
    return committed.ended


def _trace(
    table: RowTable, live: LiveRows, draft: Draft, verdict: Verdict, first_B: Ints, counts_B: Ints, vocab_size: int
) -> None:
    """Keep the verified drafts of rows that are being audited."""
    for index, row in enumerate(live.rows):
        if not row.request.params.trace:
            continue
        verified = int(min(verdict.accepted_B[index] + 1, draft.counts_B[index], counts_B[index]))
        tokens_D = draft.tokens_BK[index, :verified].cpu().numpy().astype(np.int32)
        law = traced_law(draft, index, verified, vocab_size)
        row.trace.append(
            Trace(
                round_D=np.full(verified, table.num_rounds(row.slot), np.int32),
                position_D=np.arange(verified, dtype=np.int32) + np.int32(first_B[index]),
                draft_D=tokens_D,
                accepted_D=np.arange(verified) < verdict.accepted_B[index],
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


def first_tokens(
    sampler: LawMaker, table: RowTable, live: LiveRows, logits_BV: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, list[Row]]:
    """Draw and commit the token that follows each row's context; the tokens i64[B, 1] and the rows already over."""
    numbers = live.numbers(table.generated_S[live.slots_B].copy(), device)
    pending_B1 = torch.zeros((len(live.rows), 1), dtype=torch.int64, device=device)
    laws = sampler.laws(logits_BV, live.params, live.slots, pending_B1)
    drawn_B = laws.sampled.draw(numbers.token_uniforms(1)[:, 0])
    logprobs_B1 = laws.sampled.logprob(drawn_B)[:, None].cpu().numpy()
    policy_B1 = laws.policy.logprob(drawn_B)[:, None].cpu().numpy()
    tokens_B1 = drawn_B[:, None].cpu().numpy()
    ones_B = np.ones(len(live.rows), np.int64)
    resumed = [row for row in live.rows if row.request.given is not None]
    if resumed:
        # The first token after given ones belongs to a plain round, so that only one token per rollout has no round.
        slots = np.array([row.slot for row in resumed], np.int64)
        table.record_round(slots, np.zeros(len(resumed), np.int64), np.zeros(len(resumed), np.int64))
    committed = table.commit(live.rows, tokens_B1, ones_B, logprobs_B1, policy_B1, live.ends(tokens_B1))
    params = [row.request.params for row in live.rows]
    if live.params.any_penalties:
        sampler.observe(live.slots, params, list(drawn_B[:, None]))
    return drawn_B[:, None], committed.ended
