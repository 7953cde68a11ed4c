"""Generators that draw from the policy, or not, and lie about it in their records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from leadout.records import Finish, Prompt, Request, Rollout, Rounds, SamplingParams, Source, Span
from tests.audit.fakes import EOS, TableGenerator


def honest(rollout: Rollout) -> list[Rollout]:
    """As it is."""
    return [rollout]


@dataclass
class Liar(TableGenerator):
    """Hands over something else than what it drew."""

    told: Callable[[Rollout], list[Rollout]] = honest

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """What it tells of each rollout."""
        return [told for rollout in super().collect(timeout) for told in self.told(rollout)]


@dataclass
class Stuck(TableGenerator):
    """Returns its first rollouts again and again."""

    first: tuple[Rollout, ...] = ()

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """The same every time."""
        self.first = self.first or tuple(super().collect(timeout))
        return list(self.first)


@dataclass
class OtherPrompt(TableGenerator):
    """Continues another prompt than the one it got, and records that one."""

    def _roll(self, request: Request) -> Rollout:
        return super()._roll(replace(request, prompt=Prompt(id="x", token_ids=np.asarray([7], np.int32), text="x")))


@dataclass
class HalfTraced(TableGenerator):
    """Says that it cannot trace, and traces the even draws all the same."""

    def _roll(self, request: Request) -> Rollout:
        self.traced = request.rollout_id.draw % 2 == 0
        rollout = super()._roll(replace(request, params=replace(request.params, trace=True)))
        self.traced = False
        return rollout


def emptied(rollout: Rollout, finish: Finish) -> Rollout:
    """Without a token."""
    none = np.zeros(0, np.int16)
    return replace(
        rollout,
        token_ids=rollout.token_ids[:0],
        logprobs=rollout.logprobs[:0],
        policy_logprobs=rollout.policy_logprobs[:0],
        spans=(),
        rounds=Rounds(drafted=none, accepted=none),
        finish=finish,
        stop=None,
        trace=None,
    )


def without_end(rollout: Rollout) -> Rollout:
    """Without its end-of-sequence token and the round that held it, said to have run out of length."""
    if rollout.finish is not Finish.EOS or rollout.length == 1:
        return rollout
    after_R = 1 + np.cumsum(rollout.rounds.accepted.astype(np.int64) + 1)
    rounds = int(np.count_nonzero(after_R < rollout.length))
    length = int(after_R[rounds - 1]) if rounds else 1
    assert rollout.trace is not None
    return replace(
        rollout,
        token_ids=rollout.token_ids[:length],
        logprobs=rollout.logprobs[:length],
        policy_logprobs=rollout.policy_logprobs[:length],
        spans=(Span(length=length, source=Source.POLICY, version=0),),
        rounds=Rounds(drafted=rollout.rounds.drafted[:rounds], accepted=rollout.rounds.accepted[:rounds]),
        finish=Finish.LENGTH,
        stop=None,
        trace=rollout.trace.take(rollout.trace.round_D < rounds),
    )


def of_version(rollout: Rollout, version: int) -> Rollout:
    """Stamped with another version."""
    return replace(rollout, spans=(Span(length=rollout.length, source=Source.POLICY, version=version),))


@dataclass
class RareEnds(TableGenerator):
    """Ends half as often as the policy does, and draws all else as it does."""

    def _law(self, previous: int, params: SamplingParams, temperature: float | None) -> np.ndarray:
        law_V = super()._law(previous, params, temperature).copy()
        law_V[EOS] *= 0.5
        return law_V / law_V.sum()


def undrafted(rollout: Rollout) -> Rollout:
    """The same tokens, said to come from plain steps."""
    none = np.zeros(rollout.length - 1, np.int16)
    return replace(rollout, rounds=Rounds(drafted=none, accepted=none), trace=None)
