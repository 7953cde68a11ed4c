"""A simulated machine for the tests of the controller."""

from __future__ import annotations

import numpy as np

from leadout.draft_length.controller import FixedLength, GoodputLength, RoundOutcome


class Machine:
    """A generator by numbers: seconds of a round by shape, and acceptance with probability `accept` per draft.

    A row finds drafts with probability `finds`. With `wander` > 0 it is now fast, now slow; its own `clock` leaves that
    out.
    """

    def __init__(self, accept: float, *, step: float = 10.0, per_token: float = 0.1, draft: float = 0.5) -> None:
        self.accept, self.finds = accept, 1.0
        self.step, self.per_token, self.draft = step, per_token, draft
        self.pace, self.wander = 0.0, 0.0
        self.rng, self.minutes = np.random.default_rng(0), np.random.default_rng(0)
        self.lengths: list[int] = []
        self.tokens, self.clock = 0, 0.0

    def round(self, length: GoodputLength | FixedLength, rows: int) -> int:
        choice = length.choose(rows)
        k = choice.num_drafts
        hits = np.minimum.accumulate(self.rng.random((rows, max(k, 1))) < self.accept, axis=1).sum(1) if k else 0
        drafted_B = np.where(np.arange(rows) < choice.num_rows, k, 0)
        if self.finds < 1.0:
            drafted_B[self.rng.random(rows) >= self.finds] = 0
        self.pace += self.wander * self.minutes.normal() - 0.01 * self.pace
        slower = float(np.exp(self.pace))
        outcome = RoundOutcome(
            num_drafts=k,
            num_asked=choice.num_rows if k else 0,
            drafted_B=drafted_B,
            accepted_B=np.minimum(hits, drafted_B),
            draft_seconds=slower * k * self.draft,
            verify_seconds=slower * (self.step + self.per_token * (rows + int(drafted_B.sum()))),
        )
        length.record(outcome)
        self.tokens += rows + int(outcome.accepted_B.sum())
        self.clock += (outcome.draft_seconds + outcome.verify_seconds) / slower
        self.lengths.append(k)
        return k

    def seconds(self, rows: int, k: int) -> float:
        return self.step + self.per_token * rows * (k + 1) + k * self.draft

    def goodput(self, rows: int, k: int) -> float:
        committed = sum(self.accept**i for i in range(k + 1))
        return rows * committed / self.seconds(rows, k)

    def run(self, length: GoodputLength | FixedLength, rows: int, rounds: int) -> list[int]:
        return [self.round(length, rows) for _ in range(rounds)]


def settle(machine: Machine, length: GoodputLength, rows: int) -> list[int]:
    """Let it measure, then the choices of 200 rounds."""
    machine.run(length, rows, 2000)
    return machine.run(length, rows, 200)
