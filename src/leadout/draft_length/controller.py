"""How many tokens to draft in the next round: fixed, or the number with the best forecast goodput.

The engine asks before each round and reports after it. A choice may depend on acceptance history, load and clock,
never on the token about to be drawn or on rejected drafts: either would bias what is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from leadout.draft_length.acceptance import AcceptanceStats
from leadout.draft_length.costs import CostProfile
from leadout.draft_length.exploring import OPTIMISM, worth_exploring
from leadout.draft_length.goodput import LEAST_GAIN, best_draft_length
from leadout.draft_length.load import Load
from leadout.draft_length.probing import Probing
from leadout.draft_length.ragged import Endings, waiting_factor

_HYSTERESIS, _HYSTERESIS_LENGTHS = 1.03, 1.01
"""A new choice must be better by this factor; less from one length to another, where nothing has to catch up."""
_KNOWN = 8.0
"""Row-rounds asked after which a length is tried for the doubt about its cost."""
_REFRESH_AFTER, _REFRESH_NARROW_AFTER, _NARROW = 64, 16, 1.15
"""Rounds of drafting after which a plain step keeps its time fresh; sooner where drafts gain less than the last."""
_DECIDE_EVERY, _DECIDE_EVERY_OFF = 4, 32
"""Rounds between decisions while the rows stay the same; one costs a fraction of a millisecond."""
_MEASURE_EVERY_OFF = 16
"""Plain steps are many while off: two in so many are enough, and the arithmetic is what a resting drafter costs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next round drafts."""

    num_drafts: int
    """Drafts per row; 0 is a plain step."""
    num_rows: int
    """How many of the live rows, the first ones, draft; the others go on plainly. A probe takes few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What a finished round reports."""

    num_drafts: int
    """k that was asked for; 0 for a plain step."""
    num_asked: int
    """Rows that were asked to draft, the first ones; 0 for a plain step."""
    drafted_B: npt.NDArray[np.int64]
    """Drafts verified in each row."""
    accepted_B: npt.NDArray[np.int64]
    """Drafts accepted in each row."""
    draft_seconds: float
    """Seconds spent drafting."""
    verify_seconds: float
    """Seconds of everything else in the round."""
    backlog: int = 0
    """Tokens, over the rows asked, that the drafter had to catch up on first."""
    ended: int = 0
    """Rows that this round ended."""
    ended_at_limit: int = 0
    """Those of them that had no tokens left."""
    ended_rounds: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = ()
    """Drafts verified and accepted in each round of their life."""


class DraftLength(Protocol):
    """Chooses k."""

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        """Drafts for a round of `rows` live rows; `load` says more of them, and is called only where that matters."""
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

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        """k, whatever the load."""
        return Choice(self._num_drafts, rows)

    def record(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, object]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to restore."""


class GoodputLength:
    """argmax over k of expected committed tokens / forecast seconds, with k = 0 among the choices.

    Seconds count the waiting for rows that end later. Drafting must gain 2 %, and a new choice must beat the present
    one by 3 %, one length another by 1 %. While off, a few rows probe every 60th round in the tail of a batch, where it
    costs least, else every 100th, less often after probes that speak against it, and soon again after a good one, so
    that an improving drafter is noticed (`leadout.draft_length.probing`); while on, every 64th round is plain, every
    16th where drafts gain little. Until a drafter is known at all, probes follow each other within a few rounds.
    """

    def __init__(self, max_length: int, costs: CostProfile | None = None) -> None:
        self.acceptance = AcceptanceStats(max_length)
        self.costs = costs or CostProfile()
        self._max_length = max_length
        self._current = 0
        self._probing = Probing()
        self._rounds_on = 0
        self._before: int | None = None
        """While a k is tried for the doubt about its cost, the one it has to beat."""
        self._tried_for = 1
        """Rounds after which a try is judged."""
        self._gain = math.inf
        """Forecast goodput over that of plain steps, at the latest decision."""
        self._since_look = 0
        """Rounds since a k was tried for the doubt about its cost."""
        self._endings = Endings()
        self._known_rows = 0
        """Rows whose plain step was found to be well known; it stays so."""
        self._decided: tuple[int, int] = (0, 0)
        """Rows of the latest decision and rounds since."""

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        """Drafts for the next round."""
        if rows != self._known_rows and not self.costs.is_frozen and not self.costs.forward.knows(rows):
            return Choice(0, rows)
        if self._current:
            # One round to see what it costs is not speculation that has started.
            if self._before is None:
                self._probing.rest()
        elif self._probing.is_due(rows, self._max_length, self.acceptance, self.costs, load):
            return Choice(*self._probing.shape(rows, self._max_length, self.acceptance))
        elif rows == self._decided[0] and self._decided[1] < _DECIDE_EVERY_OFF and self._before is None:
            # Most rounds of a resting drafter end here; with cold caches every line counts.
            self._rounds_on = 0
            self._decided = rows, self._decided[1] + 1
            self._since_look += 1
            return Choice(0, rows)
        self._rounds_on = self._rounds_on + 1 if self._current else 0
        refresh = _REFRESH_AFTER if self._gain > _NARROW else _REFRESH_NARROW_AFTER
        if self._rounds_on > refresh and not self.costs.is_frozen:
            self._rounds_on = 0
            return Choice(0, rows)
        decided_for, age = self._decided
        is_due = age >= (_DECIDE_EVERY if self._current else _DECIDE_EVERY_OFF)
        # A try is judged when its rounds are over, also where rows end meanwhile.
        if is_due or (rows != decided_for and self._before is None):
            now = load()
            self._decide(rows, now)
            # A first round that pays for catching up says little of the drafts themselves.
            age = 0 if self._before is None else _DECIDE_EVERY - max(self._tried_for, 2 if now.backlog else 1)
        self._decided = rows, age + 1
        self._since_look += 1
        return Choice(self._current, rows)

    def _decide(self, rows: int, load: Load) -> None:
        """Set the present k, and whether that is a try of a size whose cost is in doubt."""
        tokens_K, verified_K = self._expected()
        seconds_K = self._round_seconds(rows, verified_K, tokens_K, load)
        seconds_K[1:] *= LEAST_GAIN
        best = int(best_draft_length(tokens_K, seconds_K[:, None])[0])
        goodput_K = tokens_K / seconds_K
        if self._before is not None:
            # A try makes no incumbent: of two lengths just measured the better one stays, and drafting takes its 3 %.
            if not self._before or goodput_K[self._current] <= goodput_K[self._before]:
                self._current = self._before
            self._before = None
        self._gain = LEAST_GAIN * float(goodput_K[self._current] / goodput_K[0])
        if goodput_K[best] > self._margin(best) * goodput_K[self._current]:
            self._current = best
            return
        if self.costs.is_frozen or self.acceptance.num_asked < _KNOWN:
            return
        hoped_K = self._expected(OPTIMISM)[0]
        hoped_K[self._current] = tokens_K[self._current]
        catch_up = self.costs.catch_up_seconds(load.backlog)
        tried, rounds = worth_exploring(
            self.costs, rows, self._current, self._since_look, hoped_K, verified_K, seconds_K, catch_up
        )
        if tried != self._current:
            self._before, self._current, self._since_look, self._tried_for = self._current, tried, 0, rounds

    def _margin(self, best: int) -> float:
        return _HYSTERESIS_LENGTHS if best and self._current else _HYSTERESIS

    def forecast(self, rows: int, load: Load) -> npt.NDArray[np.float64]:
        """f64[K+1]: tokens per second for k = 0..K at this load, catching up spread over the rounds that remain.

        The seconds are those of one pace of the machine, not of this minute: only ratios have a meaning.
        """
        tokens_K, verified_K = self._expected()
        seconds_K = self._round_seconds(rows, verified_K, tokens_K, load)
        return np.asarray(rows * tokens_K / seconds_K)

    def _expected(self, optimism: float = 0.0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """f64[K+1] each: tokens that a row commits, and tokens of it in the pass."""
        coverage = self.acceptance.coverage
        tokens_K = 1.0 + coverage * (self.acceptance.expected_committed(optimism) - 1.0)
        return tokens_K, 1.0 + coverage * self.acceptance.expected_drafts()

    def _round_seconds(
        self, rows: int, verified_K: npt.NDArray[np.float64], tokens_K: npt.NDArray[np.float64], load: Load
    ) -> npt.NDArray[np.float64]:
        """f64[K+1]: forecast seconds of a round, its share of catching up and of waiting for other rows included."""
        seconds_K = np.array(self.costs.rounds_seconds(rows, (rows * verified_K).tolist()))
        rounds_K = np.maximum(load.remaining / tokens_K, 1.0)
        seconds_K[1:] += self.costs.catch_up_seconds(load.backlog) / rounds_K[1:]
        uneven_K = self.acceptance.committed_variance()
        to_limit, share = rows * self._endings.share_at_limit, self.costs.fixed_share(rows)
        unequal = self._endings.unequal(self.acceptance.coverage)
        return seconds_K * waiting_factor(to_limit, share, load.spread, load.remaining, tokens_K, uneven_K, unequal)

    def record(self, outcome: RoundOutcome) -> None:
        """Update acceptance and costs."""
        asked, rows = outcome.num_asked, len(outcome.drafted_B)
        if outcome.ended:
            self._endings.record(outcome.ended, outcome.ended_at_limit)
            mean_K, variance_K = self.acceptance.accepted_moments()
            for drafted_R, accepted_R in outcome.ended_rounds:
                self._endings.record_row(drafted_R, accepted_R, mean_K, variance_K)
        rests = not asked and not self._current and self._probing.rounds_off % _MEASURE_EVERY_OFF > 1
        if rests and (rows == self._known_rows or self.costs.knows_plain(rows)):
            self._known_rows = rows
            self.costs.skip()
            return
        self.costs.record(
            int(rows + outcome.drafted_B.sum()),
            outcome.num_drafts,
            outcome.draft_seconds,
            outcome.verify_seconds,
            asked=asked,
            backlog=outcome.backlog,
        )
        if asked:
            if not self._current:
                accepted = outcome.accepted_B[:asked]
                self._probing.record(rows, accepted, outcome.num_drafts, self.costs, self.acceptance)
            self.acceptance.record(outcome.drafted_B[:asked], outcome.accepted_B[:asked], outcome.num_drafts)

    def state_dict(self) -> dict[str, object]:
        """Acceptance, present choice and clocks in rounds; measured seconds are left behind with their machine."""
        return {
            "acceptance": self.acceptance.state_dict(),
            "current": self._current,
            "before": self._before,
            "since_look": self._since_look,
            "rounds_on": self._rounds_on,
            **self._probing.state(),
            "decided": list(self._decided),
            "endings": self._endings.state(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        acceptance, decided, endings = state["acceptance"], state["decided"], state["endings"]
        assert isinstance(acceptance, dict) and isinstance(decided, list) and isinstance(endings, list)
        self.acceptance.load_state_dict(acceptance)
        self._current, self._rounds_on = (int(str(state[name])) for name in ("current", "rounds_on"))
        self._probing.restore(state)
        self._decided = int(decided[0]), int(decided[1])
        before, self._since_look = state["before"], int(str(state["since_look"]))
        self._before = None if before is None else int(str(before))
        self._endings.restore(endings)
