"""How many tokens to draft in the next round: fixed, or the number with the best forecast goodput.

The engine asks before each round and reports after it. A choice may depend on acceptance history, load and clock,
never on the token about to be drawn or on rejected drafts: either would bias what is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from leadout.draft_length.acceptance import AcceptanceStats
from leadout.draft_length.costs import CostProfile
from leadout.draft_length.goodput import best_draft_length

_HYSTERESIS = 1.03
_PROBE_AFTER = 60
_PROBE_AT_LATEST = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What a finished round reports."""

    num_drafts: int
    """k that was asked for; 0 for a plain step."""
    drafted_B: npt.NDArray[np.int64]
    """Drafts verified in each row."""
    accepted_B: npt.NDArray[np.int64]
    """Drafts accepted in each row."""
    draft_seconds: float
    """Seconds spent drafting."""
    verify_seconds: float
    """Seconds of everything else in the round."""
    backlog: int = 0
    """Tokens, over all rows, that the drafter had to catch up on first."""


class DraftLength(Protocol):
    """Chooses k."""

    def choose(self, rows: int, *, backlog: int = 0, remaining: float = math.inf) -> int:
        """Drafts per row for a round of `rows` live rows; 0 is a plain step.

        `backlog`: tokens, over all rows, that the drafter would first have to catch up on; `remaining`: mean tokens
        that the rows may still generate, over which that pays back.
        """
        ...

    def record(self, outcome: RoundOutcome) -> None:
        """Learn from a round."""
        ...

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable state."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        ...


class FixedLength:
    """Always k; reproducible because it reads no clock."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, rows: int, *, backlog: int = 0, remaining: float = math.inf) -> int:
        """k, whatever the load."""
        return self._num_drafts

    def record(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, object]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to restore."""


class GoodputLength:
    """argmax over k of expected committed tokens / forecast seconds, with k = 0 among the choices.

    A new choice must beat the present one by 3 %. While off, one round in at least 60 probes, preferably in the tail
    of a batch where it costs least, so that an improving drafter is noticed.
    """

    def __init__(self, max_length: int, costs: CostProfile | None = None) -> None:
        self.acceptance = AcceptanceStats(max_length)
        self.costs = costs or CostProfile()
        self._max_length = max_length
        self._current = 0
        self._rounds_off = _PROBE_AFTER
        self._most_rows = 0

    def choose(self, rows: int, *, backlog: int = 0, remaining: float = math.inf) -> int:
        """k for the next round."""
        if self.costs.forward.is_empty:
            return 0
        if self._probe_is_due(rows):
            self._rounds_off = 0
            self._most_rows = 0
            return min(3, self._max_length)
        tokens_K = self.acceptance.expected_committed()
        seconds_K = self._round_seconds(rows, tokens_K, backlog, remaining)
        best = int(best_draft_length(tokens_K, seconds_K[:, None])[0])
        goodput_K = tokens_K / seconds_K
        if goodput_K[best] > _HYSTERESIS * goodput_K[self._current]:
            self._current = best
        return self._current

    def forecast(self, rows: int, *, backlog: int = 0, remaining: float = math.inf) -> npt.NDArray[np.float64]:
        """f64[K+1]: tokens per second for k = 0..K at this load, catching up spread over the rounds that remain."""
        tokens_K = self.acceptance.expected_committed()
        return np.asarray(rows * tokens_K / self._round_seconds(rows, tokens_K, backlog, remaining))

    def _round_seconds(
        self, rows: int, tokens_K: npt.NDArray[np.float64], backlog: int, remaining: float
    ) -> npt.NDArray[np.float64]:
        """f64[K+1]: forecast seconds of a round, its share of the catching up included."""
        seconds_K = np.array([self.costs.round_seconds(rows, k) for k in range(self._max_length + 1)])
        rounds_K = np.maximum(remaining / tokens_K, 1.0)
        seconds_K[1:] += self.costs.catch_up_seconds(backlog) / rounds_K[1:]
        return seconds_K

    def _probe_is_due(self, rows: int) -> bool:
        if self._current:
            return False
        self._rounds_off += 1
        self._most_rows = max(self._most_rows, rows)
        in_tail = 2 * rows <= self._most_rows or rows == 1
        return self._rounds_off > _PROBE_AT_LATEST or (self._rounds_off > _PROBE_AFTER and in_tail)

    def record(self, outcome: RoundOutcome) -> None:
        """Update acceptance and costs."""
        rows = int(outcome.drafted_B.shape[0])
        self.costs.record(rows, outcome.num_drafts, outcome.draft_seconds, outcome.verify_seconds, outcome.backlog)
        if outcome.num_drafts:
            self.acceptance.record(outcome.drafted_B, outcome.accepted_B)

    def state_dict(self) -> dict[str, object]:
        """Acceptance, present choice and probe clock; measured seconds are left behind with their machine."""
        return {
            "acceptance": self.acceptance.state_dict(),
            "current": self._current,
            "rounds_off": self._rounds_off,
            "most_rows": self._most_rows,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        acceptance, current = state["acceptance"], state["current"]
        rounds_off, most_rows = state["rounds_off"], state["most_rows"]
        assert isinstance(acceptance, dict) and isinstance(current, int)
        assert isinstance(rounds_off, int) and isinstance(most_rows, int)
        self.acceptance.load_state_dict(acceptance)
        self._current, self._rounds_off, self._most_rows = current, rounds_off, most_rows
