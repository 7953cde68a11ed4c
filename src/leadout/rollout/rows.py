"""The live rows of the engine: what each has generated so far, in arrays indexed by slot.

Committing a round is a handful of array operations for all rows together; only rows with stop strings are visited one
by one. A row becomes a `Rollout` when it ends.

Axes: S slots, B rows of this round, N columns of this round, T capacity in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from leadout.records import Finish, Request, Rollout, Rounds, Source, Span, Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class StopWatch(Protocol):
    """Watches one row's text for stop strings."""

    def push(self, token_id: int) -> str | None:
        """Take the next token; the stop string it completes, if any."""
        ...


StopWatchFactory = Callable[[tuple[str, ...]], StopWatch]


@dataclass(slots=True, kw_only=True)
class Row:
    """One live row: the parts that are not arrays."""

    request: Request
    slot: int
    limit: int
    """Generated tokens at which it ends, given ones included."""
    limit_finish: Finish
    """Whether that limit is its own length or the context."""
    watch: StopWatch | None
    spans: list[Span]
    """Closed spans: given tokens, and tokens of earlier weight versions."""
    finish: Finish | None = None
    stop: int | str | None = None
    trace: list[Trace] = field(default_factory=list)

    @property
    def closed(self) -> int:
        """Tokens in closed spans."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a round really committed, after cutting at the end of rows."""

    counts_B: Ints
    """Tokens of each row, at least 1."""
    ended: list[Row]
    """Rows that are over."""


class RowTable:
    """Tokens, log-probabilities and rounds of every slot."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        # The last column takes what nobody reads.
        self._trash = capacity
        self._tokens_ST = np.zeros((num_slots, capacity + 1), np.int64)
        self._logprobs_ST = np.zeros((num_slots, capacity + 1))
        self._policy_logprobs_ST = np.zeros((num_slots, capacity + 1))
        self._drafted_ST = np.zeros((num_slots, capacity), np.int16)
        self._accepted_ST = np.zeros((num_slots, capacity), np.int16)
        self._looked_up_ST = np.zeros((num_slots, capacity), bool)
        self.generated_S = np.zeros(num_slots, np.int64)
        self._limits_S = np.zeros(num_slots, np.int64)
        self._rounds_S = np.zeros(num_slots, np.int64)

    def open(self, row: Row) -> None:
        """Start a row with the tokens it was given."""
        slot, given = row.slot, row.request.given
        self.generated_S[slot] = self._rounds_S[slot] = 0
        self._limits_S[slot] = row.limit
        if given is None:
            return
        length, rounds = given.length, given.rounds
        self._tokens_ST[slot, :length] = given.token_ids
        self._logprobs_ST[slot, :length] = given.logprobs
        self._policy_logprobs_ST[slot, :length] = given.policy_logprobs
        self.generated_S[slot] = length
        self._rounds_S[slot] = rounds.drafted.size
        self._drafted_ST[slot, : rounds.drafted.size] = rounds.drafted
        self._accepted_ST[slot, : rounds.accepted.size] = rounds.accepted
        self._looked_up_ST[slot, : rounds.drafted.size] = False if rounds.looked_up is None else rounds.looked_up

    def last_tokens(self, slots_B: Ints) -> Ints:
        """i64[B]: the newest token of each row."""
        return np.asarray(self._tokens_ST[slots_B, self.generated_S[slots_B] - 1])

    def remaining(self, slots_B: Ints) -> Ints:
        """i64[B]: tokens the row of each slot may still generate."""
        return np.asarray(self._limits_S[slots_B] - self.generated_S[slots_B])

    def commit(
        self,
        rows: Sequence[Row],
        slots_B: Ints,
        tokens_BN: Ints,
        counts_B: Ints,
        logprobs_BN: Floats,
        policy_logprobs_BN: Floats,
        ends_BN: npt.NDArray[np.bool_],
    ) -> Committed:
        """Append `counts_B` tokens to each row, cut after the first end (`ends_BN` marks end-of-sequence tokens)."""
        hits_BN = None
        if ends_BN.any():
            hits_BN = ends_BN & (np.arange(tokens_BN.shape[1]) < counts_B[:, None])
            counts_B = np.where(hits_BN.any(1), hits_BN.argmax(1) + 1, counts_B)
        watched = [index for index, row in enumerate(rows) if row.watch is not None]
        if watched:
            counts_B = counts_B.copy()
        for index in watched:
            counts_B[index] = self._watch(rows[index], tokens_BN[index, : counts_B[index]])
        self._append(slots_B, counts_B, tokens_BN, logprobs_BN, policy_logprobs_BN)
        over_B = self.generated_S[slots_B] >= self._limits_S[slots_B]
        if hits_BN is not None:
            over_B |= hits_BN[np.arange(len(rows)), counts_B - 1]
        for index in watched:
            over_B[index] |= rows[index].finish is not None
        over_E = over_B.nonzero()[0].tolist()
        for index in over_E:
            last = counts_B[index] - 1
            self._close(rows[index], hits_BN is not None and bool(hits_BN[index, last]), int(tokens_BN[index, last]))
        return Committed(counts_B, [rows[index] for index in over_E])

    def _append(
        self, slots_B: Ints, counts_B: Ints, tokens_BN: Ints, logprobs_BN: Floats, policy_logprobs_BN: Floats
    ) -> None:
        """The first `counts_B` columns of each row behind what it has; what lies past them is overwritten later."""
        start_B = self.generated_S[slots_B]
        place_BN = np.minimum(start_B[:, None] + np.arange(tokens_BN.shape[1]), self._trash)
        slots_B1 = slots_B[:, None]
        self._tokens_ST[slots_B1, place_BN] = tokens_BN
        self._logprobs_ST[slots_B1, place_BN] = logprobs_BN
        self._policy_logprobs_ST[slots_B1, place_BN] = policy_logprobs_BN
        self.generated_S[slots_B] = start_B + counts_B

    @staticmethod
    def _watch(row: Row, tokens: Ints) -> int:
        """Feed a row's new tokens to its stop strings; how many of them it keeps."""
        assert row.watch is not None
        for count, token in enumerate(tokens.tolist(), start=1):
            matched = row.watch.push(token)
            if matched is not None:
                row.finish, row.stop = Finish.STOP, matched
                return count
        return int(tokens.size)

    @staticmethod
    def _close(row: Row, at_end_token: bool, token: int) -> None:
        """Name the reason a row ended; an end-of-sequence token counts before a stop string or a limit."""
        if at_end_token:
            row.finish, row.stop = Finish.EOS, token
        elif row.finish is None:
            row.finish = row.limit_finish

    def record_round(
        self,
        slots_B: Ints,
        drafted_B: Ints | int,
        accepted_B: Ints | int,
        looked_up_B: npt.NDArray[np.bool_] | bool = False,
    ) -> None:
        """Note one round of each row."""
        index_B = self._rounds_S[slots_B]
        self._drafted_ST[slots_B, index_B] = drafted_B
        self._accepted_ST[slots_B, index_B] = accepted_B
        self._looked_up_ST[slots_B, index_B] = looked_up_B
        self._rounds_S[slots_B] = index_B + 1

    def tokens(self, slot: int) -> Ints:
        """i64[T]: what a row has generated so far (a view)."""
        return self._tokens_ST[slot, : self.generated_S[slot]]

    def num_rounds(self, slot: int) -> int:
        """Rounds of a row so far."""
        return int(self._rounds_S[slot])

    def rounds_of(self, slot: int) -> tuple[Ints, Ints]:
        """i64[R] each: drafts verified and accepted in every round of a row."""
        rounds = int(self._rounds_S[slot])
        return self._drafted_ST[slot, :rounds].astype(np.int64), self._accepted_ST[slot, :rounds].astype(np.int64)

    def rollout(self, row: Row, version: int, dtype: type[np.floating]) -> Rollout:
        """The row as a record; its open span was made by `version`."""
        slot = row.slot
        length, rounds = int(self.generated_S[slot]), int(self._rounds_S[slot])
        looked_up = self._looked_up_ST[slot, :rounds].copy()
        spans = list(row.spans)
        if length > row.closed:
            spans.append(Span(length=length - row.closed, source=Source.POLICY, version=version))
        return Rollout(
            request_id=row.request.rollout_id,
            prompt=row.request.prompt,
            token_ids=self._tokens_ST[slot, :length].astype(np.int32),
            logprobs=self._logprobs_ST[slot, :length].astype(dtype),
            policy_logprobs=self._policy_logprobs_ST[slot, :length].astype(dtype),
            spans=tuple(spans),
            rounds=Rounds(
                drafted=self._drafted_ST[slot, :rounds].copy(),
                accepted=self._accepted_ST[slot, :rounds].copy(),
                looked_up=looked_up if looked_up.any() else None,
            ),
            finish=row.finish or Finish.CANCELLED,
            stop=row.stop,
            trace=join_traces(row.trace) if row.request.params.trace else None,
        )


def join_traces(parts: Sequence[Trace]) -> Trace:
    """One trace from those of single rounds, in order."""
    parts = [part for part in parts if part.draft_D.size]
    if not parts:
        empty = np.zeros(0, np.int32)
        return Trace(
            round_D=empty,
            position_D=empty,
            draft_D=empty,
            accepted_D=np.zeros(0, bool),
            draft_prob_D=np.zeros(0, np.float32),
            probs_DV=None,
            token_ids_V=None,
        )
    probs = [part.probs_DV for part in parts if part.probs_DV is not None]
    assert len(probs) in (0, len(parts)), "a row's drafter is either sampled or a point mass"
    return Trace(
        round_D=np.concatenate([part.round_D for part in parts]),
        position_D=np.concatenate([part.position_D for part in parts]),
        draft_D=np.concatenate([part.draft_D for part in parts]),
        accepted_D=np.concatenate([part.accepted_D for part in parts]),
        draft_prob_D=np.concatenate([part.draft_prob_D for part in parts]),
        probs_DV=np.concatenate(probs) if probs else None,
        token_ids_V=parts[0].token_ids_V,
    )


def unstarted(request: Request) -> Rollout:
    """A cancelled rollout that was still waiting: what it was given, or nothing."""
    if request.given is not None:
        return replace(request.given, request_id=request.rollout_id, finish=Finish.CANCELLED, stop=None)
    empty = np.zeros(0)
    return Rollout(
        request_id=request.rollout_id,
        prompt=request.prompt,
        token_ids=np.zeros(0, np.int32),
        logprobs=empty.astype(np.float32),
        policy_logprobs=empty.astype(np.float32),
        spans=(),
        rounds=Rounds(drafted=np.zeros(0, np.int16), accepted=np.zeros(0, np.int16)),
        finish=Finish.CANCELLED,
    )


def already_over(request: Request, max_len: int) -> Rollout | None:
    """A request whose given tokens leave nothing to generate ends at once: they ended by themselves, use up the
    length, or fill the context.
    """
    given = request.given
    if given is None:
        return None
    if given.finish in (Finish.EOS, Finish.STOP):
        return replace(given, request_id=request.rollout_id)
    if given.length >= request.params.max_new_tokens:
        return replace(given, request_id=request.rollout_id, finish=Finish.LENGTH, stop=None)
    if len(request.prompt.token_ids) + given.length >= max_len:
        return replace(given, request_id=request.rollout_id, finish=Finish.CONTEXT, stop=None)
    return None
