"""One round of the engine: draft, verify, accept, commit. With nothing drafted it is a plain decoding step.

The pending token of a row is its newest one: emitted, not yet in the cache. A round feeds the pending token and the
drafts to the policy in one pass; column n of the result is the law of the token after the first n drafts.

Axes: B live rows, S rows that drafted, K longest draft, N = K + 1 columns, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from leadout.draft_length.controller import Choice, RoundOutcome
from leadout.rollout.decide import Decision, Drafted, decide
from leadout.rollout.live import LiveRows
from leadout.rollout.numbers import RoundNumbers
from leadout.rollout.parts import EngineParts, LawMaker
from leadout.rollout.rows import Row, RowTable
from leadout.rollout.trace import trace_round

Ints = npt.NDArray[np.int64]


def run_round(
    parts: EngineParts, sampler: LawMaker, table: RowTable, live: LiveRows, choice: Choice, backlog: int
) -> tuple[list[Row], RoundOutcome]:
    """Advance every live row by at least one token; the rows that ended, and what to tell the draft length."""
    began = time.perf_counter()
    start_B = table.generated_S[live.slots_B]
    numbers = live.numbers(start_B, parts.device, choice.num_drafts + 1)
    asked, drafted = _propose(parts, table, live, choice, numbers)
    drafted_at = time.perf_counter()

    tokens_BN, counts_B = _block(table, live, drafted, parts.device)
    taps = parts.drafter.taps if parts.drafter is not None else ()
    states = parts.decoder.forward(tokens_BN, parts.kv, live.slots, taps, counts_B)
    decision = decide(parts, sampler, live, numbers, drafted, tokens_BN, states.hidden_BNH)
    ended = _commit(parts, sampler, table, live, start_B, drafted, decision, states.taps_BNF)
    outcome = RoundOutcome(
        num_drafts=choice.num_drafts if asked else 0,
        num_asked=asked,
        drafted_B=counts_B - 1,
        accepted_B=decision.accepted_B,
        draft_seconds=drafted_at - began,
        verify_seconds=time.perf_counter() - drafted_at,
        backlog=backlog,
        ended=len(ended),
        ended_at_limit=sum(row.finish is row.limit_finish for row in ended),
        ended_rounds=[table.rounds_of(row.slot) for row in ended],
    )
    return ended, outcome


def _propose(
    parts: EngineParts, table: RowTable, live: LiveRows, choice: Choice, numbers: RoundNumbers
) -> tuple[int, Drafted | None]:
    """How many rows were asked, and their drafts; None when no row drafts anything, which makes it a plain step."""
    if parts.drafter is None or not choice.num_drafts:
        return 0, None
    lengths_B = np.minimum(choice.num_drafts, table.remaining(live.slots_B) - 1)
    if not lengths_B[: choice.num_rows].any():
        return 0, None
    slots = live.slots
    if choice.num_rows < len(slots):
        asked_A = np.arange(choice.num_rows)
        slots, lengths_B, numbers = slots[: choice.num_rows], lengths_B[asked_A], numbers.take(asked_A)
    draft = parts.drafter.propose(slots, lengths_B, numbers)
    rows_S = np.flatnonzero(draft.counts_B)
    if rows_S.size == 0:
        return len(slots), None
    return len(slots), Drafted(rows_S, draft if rows_S.size == len(slots) else draft.take(rows_S))


def _block(table: RowTable, live: LiveRows, drafted: Drafted | None, device: torch.device) -> tuple[torch.Tensor, Ints]:
    """The tokens of the pass, i64[B, N]: pending tokens and drafts; and how many of each row are real."""
    pending_B = table.last_tokens(live.slots_B)
    counts_B = np.ones(len(live.rows), np.int64)
    if drafted is None:
        return torch.from_numpy(pending_B[:, None]).to(device), counts_B
    counts_B[drafted.rows_S] += drafted.draft.counts_B
    drafts_SK = drafted.draft.tokens_BK.cpu().numpy()
    tokens_BN = np.zeros((len(pending_B), 1 + drafts_SK.shape[1]), np.int64)
    tokens_BN[:, 0] = pending_B
    tokens_BN[drafted.rows_S, 1:] = drafts_SK
    return torch.from_numpy(tokens_BN).to(device), counts_B


def _commit(
    parts: EngineParts,
    sampler: LawMaker,
    table: RowTable,
    live: LiveRows,
    start_B: Ints,
    drafted: Drafted | None,
    decision: Decision,
    taps_BNF: torch.Tensor | None,
) -> list[Row]:
    """Write the round, which began at positions `start_B`, into table, caches and drafter."""
    tokens_BN = decision.tokens_BN
    committed = table.commit(
        live.rows,
        live.slots_B,
        tokens_BN,
        decision.accepted_B + 1,
        decision.logprobs_BN,
        decision.policy_logprobs_BN,
        live.ends(tokens_BN),
    )
    if drafted is None:
        table.record_round(live.slots_B, 0, 0)
    else:
        drafted_B, looked_up_B = np.zeros(len(live.rows), np.int64), np.zeros(len(live.rows), bool)
        drafted_B[drafted.rows_S] = drafted.draft.counts_B
        if drafted.draft.looked_up_B is not None:
            looked_up_B[drafted.rows_S] = drafted.draft.looked_up_B
        trace_round(table, live, drafted, decision.accepted_B, start_B, committed.counts_B, parts.vocab_size)
        table.record_round(live.slots_B, drafted_B, np.minimum(decision.accepted_B, committed.counts_B), looked_up_B)
    parts.kv.advance(live.slots, committed.counts_B)
    if live.params.any_penalties:
        emitted = [decision.emitted_BN[i, :c] for i, c in enumerate(committed.counts_B)]
        sampler.observe(live.slots, [row.request.params for row in live.rows], emitted)
    if parts.drafter is not None:
        parts.drafter.observe(live.slots, decision.emitted_BN, committed.counts_B, taps_BNF)
    return committed.ended


def first_tokens(
    sampler: LawMaker, table: RowTable, live: LiveRows, logits_BV: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, list[Row]]:
    """Draw and commit the token that follows each row's context; the tokens i64[B, 1] and the rows already over."""
    numbers = live.numbers(table.generated_S[live.slots_B], device)
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
        table.record_round(np.array([row.slot for row in resumed], np.int64), 0, 0)
    committed = table.commit(live.rows, live.slots_B, tokens_B1, ones_B, logprobs_B1, policy_B1, live.ends(tokens_B1))
    if live.params.any_penalties:
        sampler.observe(live.slots, [row.request.params for row in live.rows], list(drawn_B[:, None]))
    return drawn_B[:, None], committed.ended
