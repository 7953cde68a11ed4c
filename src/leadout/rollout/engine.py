"""The native generator: requests in, rollouts out, continuous batching with plain and speculative rounds.

Stage ``rollout`` of a step. The engine admits waiting requests whenever slots are free, runs rounds over the live rows
(`leadout.rollout.round`), and releases rows the moment they end. It runs in the caller's thread: `collect` does the
work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from leadout.draft_length.controller import Choice, DraftLength
from leadout.draft_length.load import Load
from leadout.errors import CapacityError, ConfigError, RefitError
from leadout.interfaces import Running
from leadout.records import (
    Capabilities,
    Finish,
    RefitReport,
    Request,
    Rollout,
    RolloutId,
    WeightUpdate,
)
from leadout.rollout.admission import Admission
from leadout.rollout.backlog import Backlog
from leadout.rollout.live import LiveRows
from leadout.rollout.parts import EngineParts
from leadout.rollout.prefill import context_of
from leadout.rollout.round import first_tokens, run_round
from leadout.rollout.rows import Row, RowTable, already_over

ApplyUpdate = Callable[[WeightUpdate], RefitReport]

_MODELS = ("eagle3", "parallel", "mtp", "small_model")

METHODS = frozenset({"ngram", "history", *_MODELS, *(f"history+{name}" for name in _MODELS)})
"""Drafting methods of the native engine."""


class NativeGenerator:
    """Implements `leadout.interfaces.Generator` in this process."""

    def __init__(self, parts: EngineParts, *, num_slots: int, apply_update: ApplyUpdate, version: int = 0) -> None:
        """`apply_update` checks an update and loads it into decoder and drafter, or raises RefitError."""
        self._parts = parts
        self._num_slots = num_slots
        self._apply_update = apply_update
        self._version = version
        self._table = RowTable(num_slots, parts.max_len)
        self._sampler = parts.sampler(num_slots, parts.vocab_size, parts.device)
        self._admission = Admission(parts)
        self._rows: dict[int, Row] = {}
        self._live: LiveRows | None = None
        self._done: list[Rollout] = []
        self._backlog = Backlog(num_slots)

    @property
    def capabilities(self) -> Capabilities:
        """What the native engine can do."""
        return Capabilities(
            trace=True,
            exact_seeds=True,
            policy_logprobs=True,
            in_flight_refit=frozenset({"finish", "cancel", "recompute"}),
            methods=METHODS,
            max_context=self._parts.max_len,
        )

    @property
    def version(self) -> int:
        """Version of the weights that are serving."""
        return self._version

    def variant(self, draft_length: DraftLength, *, drafts: bool = True) -> NativeGenerator:
        """Another generator over the same weights, caches and drafter; only one of them may have rows at a time."""
        parts = replace(self._parts, draft_length=draft_length)
        if not drafts:
            parts = replace(parts, drafter=None)
        return NativeGenerator(parts, num_slots=self._num_slots, apply_update=self._apply_update, version=self._version)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises CapacityError for a prompt that leaves no room, ConfigError for impossible ones."""
        known = self._admission.ids()
        known.update(row.request.rollout_id for row in self._rows.values())
        waiting, done = [], []
        for request in requests:
            over = already_over(request, self._parts.max_len)
            if over is not None:
                done.append(over)
                continue
            self._check(request, known)
            known.add(request.rollout_id)
            # Nothing was given: the first token belongs to no round, as in any fresh rollout.
            fresh = request.given is not None and request.given.length == 0
            waiting.append(replace(request, given=None) if fresh else request)
        self._admission.add(waiting)
        self._done.extend(done)

    def _check(self, request: Request, known: set[RolloutId]) -> None:
        if request.rollout_id in known:
            raise ConfigError(f"rollout {tuple(request.rollout_id)} is already being generated; ids must not repeat")
        context = context_of(request)
        if len(context) == 0:
            raise ConfigError(f"prompt {request.prompt.id!r} is empty; at least one token is needed")
        if len(context) >= self._parts.max_len:
            raise CapacityError(
                f"prompt {request.prompt.id!r} has {len(context)} tokens, which leaves no room in a context of "
                f"{self._parts.max_len}; shorten it, drop it (data.overlong: drop) or raise rollout.max_model_len"
            )
        if int(context.min()) < 0 or int(context.max()) >= self._parts.vocab_size:
            raise ConfigError(
                f"prompt {request.prompt.id!r} holds token ids outside 0..{self._parts.vocab_size - 1}; "
                "the tokenizer does not belong to this model"
            )
        if request.params.stop and self._parts.stop_watch is None:
            raise ConfigError("stop strings need a tokenizer; this generator was built without one")

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """Run until at least one rollout is over, nothing is left, or `timeout` seconds passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with torch.inference_mode():
            while not self._done and (self._admission or self._rows):
                self._advance()
                if deadline is not None and time.monotonic() >= deadline:
                    break
        done, self._done = self._done, []
        return done

    def cancel(self, ids: Sequence[RolloutId]) -> list[Rollout]:
        """Stop these rollouts and return what they have; unknown ids are ignored."""
        wanted = set(ids)
        partial = self._admission.cancel(wanted)
        rows = [row for row in self._rows.values() if row.request.rollout_id in wanted]
        for row in rows:
            row.finish = Finish.CANCELLED
        partial.extend(self._release(rows))
        return partial

    def refit(self, update: WeightUpdate, running: Running = "finish") -> RefitReport:
        """Take new weights. Running rows first finish, are cancelled, or go on with their cache computed anew.

        Cancelled and finished rows come out of the next `collect`. Raises RefitError on a bad update, and for
        `keep_kv`, whose caches would mix two versions.
        """
        if running == "keep_kv":
            raise RefitError("refit(running='keep_kv') would mix cached states of two versions; use 'recompute'")
        if running == "finish":
            with torch.inference_mode():
                while self._rows:
                    self._round()
        elif running == "cancel":
            self._done.extend(self.cancel([row.request.rollout_id for row in self._rows.values()]))
        self._admission.start_over()
        report = self._apply_update(update)
        if self._rows:
            self._restart(report.version)
        self._version = report.version
        return report

    def _restart(self, version: int) -> None:
        """Compute the caches of running rows anew under new weights; their next tokens carry the new version."""
        rows = list(self._rows.values())
        self._forget(rows)
        self._rows.clear()
        given = [self._table.rollout(row, self._version, self._numpy_dtype) for row in rows]
        self._admission.add_first(replace(row.request, given=rollout) for row, rollout in zip(rows, given, strict=True))

    def set_awake(self, awake: bool) -> None:
        """Give the key-value cache back to the system, or take it again; rows must not be running."""
        if self._rows or self._admission:
            raise ConfigError("set_awake needs an idle generator; collect or cancel its rollouts first")
        self._parts.kv.set_allocated(awake)

    def state_dict(self) -> dict[str, object]:
        """Acceptance statistics of the draft length and what the drafter remembers, for a resume."""
        state: dict[str, object] = {"draft_length": self._parts.draft_length.state_dict()}
        if self._parts.history is not None:
            state["history"] = self._parts.history.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore them."""
        draft_length = state["draft_length"]
        assert isinstance(draft_length, dict)
        self._parts.draft_length.load_state_dict(draft_length)
        if self._parts.history is not None:
            history = state["history"]
            assert isinstance(history, dict)
            self._parts.history.load_state_dict(history)

    @property
    def _numpy_dtype(self) -> type[np.floating]:
        return np.float64 if self._parts.dtype is torch.float64 else np.float32

    def _advance(self) -> None:
        """Admit what fits, then run one round."""
        if self._admission:
            self._admit()
        if self._rows:
            self._round()

    def _admit(self) -> None:
        for batch, logits_GV in self._admission.advance(len(self._rows)):
            rows = [self._open(request, slot) for c in batch for request, slot in zip(c.requests, c.slots, strict=True)]
            for cohort in batch:
                self._backlog.admit(cohort.slots, len(cohort.context))
            owner_B = np.repeat(np.arange(len(batch)), [len(c.slots) for c in batch])
            live = LiveRows.of(rows, self._parts.device)
            logits_BV = logits_GV[torch.from_numpy(owner_B).to(self._parts.device)]
            tokens_B1, ended = first_tokens(self._sampler, self._table, live, logits_BV, self._parts.device)
            if self._parts.drafter is not None:
                self._parts.drafter.observe(live.slots, tokens_B1, np.ones(len(rows), np.int64), None)
            self._done.extend(self._release(ended))
            self._live = None

    def _load(self) -> Load:
        """What the draft length may ask of the live rows."""
        assert self._live is not None
        remaining_B = self._table.remaining(self._live.slots_B)
        return Load(
            backlog=self._tokens_behind(self._live.slots),
            remaining=float(remaining_B.mean()),
            spread=math.inf if self._admission else float(remaining_B.std() / remaining_B.mean()),
        )

    def _tokens_behind(self, slots: Sequence[int]) -> int:
        """Tokens of these rows that the drafter's model has to run first; none while it drafts every round."""
        drafter = self._parts.drafter
        return (
            self._backlog.tokens(slots, self._parts.kv.lengths) if drafter is not None and drafter.runs_context else 0
        )

    def _open(self, request: Request, slot: int) -> Row:
        params, given = request.params, request.given
        room = self._parts.max_len - len(request.prompt.token_ids)
        watch = None
        if params.stop:
            assert self._parts.stop_watch is not None
            watch = self._parts.stop_watch(params.stop)
        row = Row(
            request=request,
            slot=slot,
            limit=min(params.max_new_tokens, room),
            limit_finish=Finish.LENGTH if params.max_new_tokens <= room else Finish.CONTEXT,
            watch=watch,
            spans=list(given.spans) if given is not None else [],
            trace=[given.trace] if given is not None and given.trace is not None else [],
        )
        if given is not None and watch is not None:
            for token in given.token_ids.tolist():
                watch.push(token)
        self._rows[slot] = row
        self._table.open(row)
        output = torch.from_numpy(self._table.tokens(slot).copy()).to(self._parts.device)
        prompt = torch.from_numpy(request.prompt.token_ids.astype(np.int64)).to(self._parts.device)
        self._sampler.admit(slot, params, prompt, output)
        return row

    def _round(self) -> None:
        if self._live is None:
            order = self._parts.kv.order(list(self._rows))
            self._live = LiveRows.of([self._rows[slot] for slot in order], self._parts.device)
        live = self._live
        choice, backlog = Choice(0, 0), 0
        if self._parts.drafter is not None:
            choice = self._parts.draft_length.choose(len(live.rows), self._load)
            if choice.num_drafts:
                backlog = self._tokens_behind(live.slots[: choice.num_rows])
        ended, outcome = run_round(self._parts, self._sampler, self._table, live, choice, backlog)
        if outcome.num_asked:
            self._backlog.caught_up(live.slots[: outcome.num_asked], self._parts.kv.lengths)
        self._parts.draft_length.record(outcome)
        self._done.extend(self._release(ended))

    def _release(self, rows: Sequence[Row]) -> list[Rollout]:
        """Turn rows into rollouts and free their slots."""
        if not rows:
            return []
        rollouts = [self._table.rollout(row, self._version, self._numpy_dtype) for row in rows]
        self._forget(rows)
        for row in rows:
            del self._rows[row.slot]
        return rollouts

    def _forget(self, rows: Sequence[Row]) -> None:
        slots = [row.slot for row in rows]
        if self._parts.drafter is not None:
            self._parts.drafter.release(slots)
        self._parts.kv.release(slots)
        self._backlog.release(slots)
        self._live = None
