"""A generator over a known table of logits, with real records, rounds and traces; its accept rule can be any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from leadout.audit.biased_rules import Rule, draw, exact
from leadout.audit.observe import Scores
from leadout.interfaces import Running
from leadout.records import (
    Capabilities,
    Finish,
    Prompt,
    RefitReport,
    Request,
    Rollout,
    RolloutId,
    Rounds,
    SamplingParams,
    Source,
    Span,
    Trace,
    WeightUpdate,
)

EOS = 0
VOCAB = 16


def make_tables(seed: int = 0, draft_noise: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
    """Policy logits by previous token, and the draft's probabilities."""
    rng = np.random.default_rng(seed)
    table_SV = 1.5 * rng.standard_normal((VOCAB, VOCAB))
    table_SV[:, EOS] -= 1.5
    draft_SV = np.exp(table_SV + draft_noise * rng.standard_normal(table_SV.shape))
    return table_SV, draft_SV / draft_SV.sum(-1, keepdims=True)


def make_requests(draws: int, siblings: int, params: SamplingParams) -> list[Request]:
    """`draws` prompts with `siblings` rollouts each."""
    prompts = [
        Prompt(id=f"p{draw}", token_ids=np.asarray([1 + draw % (VOCAB - 1)], np.int32), text="p")
        for draw in range(draws)
    ]
    return [
        Request(rollout_id=RolloutId(draw, sibling), prompt=prompts[draw], params=params)
        for draw in range(draws)
        for sibling in range(siblings)
    ]


@dataclass
class TableGenerator:
    """Speculates with k = 3 from the draft table; `law_temperature` is what it really samples at."""

    table_SV: np.ndarray
    draft_SV: np.ndarray
    rule: Rule = exact
    law_temperature: float | None = None
    logprob_temperature: float | None = None
    traced: bool = True
    keeps_tokens_after_eos: bool = False
    drop_last: int = 0
    """Rollouts that are never returned."""
    version: int = 0
    _queue: list[Request] = field(default_factory=list)
    _laws: dict[float, np.ndarray] = field(default_factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        """Traces or not."""
        return Capabilities(
            trace=self.traced,
            exact_seeds=False,
            policy_logprobs=True,
            in_flight_refit=frozenset(),
            methods=frozenset(),
            max_context=1000,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue them."""
        self._queue += requests

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """Up to ten rollouts."""
        if len(self._queue) <= self.drop_last:
            return []
        batch, self._queue = self._queue[:10], self._queue[10:]
        return [self._roll(request) for request in batch]

    def cancel(self, ids: Sequence[RolloutId]) -> list[Rollout]:
        """Nothing runs between calls."""
        return []

    def refit(self, update: WeightUpdate, running: Running = "finish") -> RefitReport:
        """Never called here."""
        raise AssertionError

    def set_awake(self, awake: bool) -> None:
        """Always awake."""

    def _law(self, previous: int, params: SamplingParams, temperature: float | None) -> np.ndarray:
        used = temperature or params.temperature
        if used not in self._laws:
            p_SV = np.exp((self.table_SV - self.table_SV.max(-1, keepdims=True)) / used)
            self._laws[used] = p_SV / p_SV.sum(-1, keepdims=True)
        return self._laws[used][previous]

    def _roll(self, request: Request) -> Rollout:
        rng = np.random.default_rng((11, *request.rollout_id))
        params, context = request.params, [int(request.prompt.token_ids[-1])]
        drafted, accepted, rows = [], [], []
        context.append(int(draw(self._law(context[-1], params, self.law_temperature)[None], rng.random(1))[0]))
        while not self._over(context, params):
            length, count = int(rng.choice([0, 1, 3, 3])), 0
            length = min(length, params.max_new_tokens - len(context))
            for _ in range(length):
                p_V, q_V = self._law(context[-1], params, self.law_temperature), self.draft_SV[context[-1]]
                outcome = self.rule(p_V[None], q_V[None], rng)
                kept = bool(outcome.accepted_B[0])
                rows.append((len(drafted), len(context) - 1, int(outcome.draft_B[0]), kept, q_V))
                context.append(int(outcome.token_B[0]))
                count += kept
                if not kept or self._over(context, params):
                    break
            ended = self._over(context, params)
            if count == length and not ended:
                p_V = self._law(context[-1], params, self.law_temperature)
                context.append(int(draw(p_V[None], rng.random(1))[0]))
            drafted.append(length)
            accepted.append(count)
        return self._record(request, context, drafted, accepted, rows)

    def _over(self, context: list[int], params: SamplingParams) -> bool:
        ended = context[-1] == EOS and not self.keeps_tokens_after_eos
        return ended or len(context) - 1 >= params.max_new_tokens

    def _record(self, request: Request, context: list[int], drafted: list, accepted: list, rows: list) -> Rollout:
        token_T, params = np.asarray(context[1:], np.int32), request.params
        logprobs = [
            np.log(self._law(before, params, self.logprob_temperature)[token]) for before, token in pairwise(context)
        ]
        trace = None
        if self.traced and params.trace:
            trace = Trace(
                round_D=np.asarray([row[0] for row in rows], np.int32),
                position_D=np.asarray([row[1] for row in rows], np.int32),
                draft_D=np.asarray([row[2] for row in rows], np.int32),
                accepted_D=np.asarray([row[3] for row in rows], bool),
                draft_prob_D=np.asarray([row[4][row[2]] for row in rows]),
                probs_DV=np.asarray([row[4] for row in rows]).reshape(len(rows), VOCAB),
                token_ids_V=None,
            )
        ended = token_T[-1] == EOS
        return Rollout(
            request_id=request.rollout_id,
            prompt=request.prompt,
            token_ids=token_T,
            logprobs=np.asarray(logprobs),
            policy_logprobs=np.asarray(logprobs),
            spans=(Span(length=token_T.size, source=Source.POLICY, version=self.version),),
            rounds=Rounds(drafted=np.asarray(drafted, np.int16), accepted=np.asarray(accepted, np.int16)),
            finish=Finish.EOS if ended else Finish.LENGTH,
            stop=EOS if ended else None,
            trace=trace,
        )


def table_score(table_SV: np.ndarray):
    """Teacher forcing for `TableGenerator`: logits by previous token, one exact pass."""

    def score(rollouts: Sequence[Rollout]) -> Iterator[Scores]:
        for rollout in rollouts:
            before_T = np.concatenate((rollout.prompt.token_ids[-1:], rollout.token_ids[:-1]))
            yield Scores(exact_TV=torch.from_numpy(table_SV[before_T]), rounded_TV=None)

    return score
