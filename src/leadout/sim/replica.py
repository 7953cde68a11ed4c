"""One generator replica in continuous time: rows of several batches at work, new ones admitted as slots free up.

Between events the rows at work are constant and their context grows linearly, so the next finish and the rounds done by
any time follow from the closed form of `StepTable`, evaluated here without arrays.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf, sqrt

from leadout.sim.acceptance import AcceptanceLaw
from leadout.sim.generate import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout to generate."""

    batch: int
    length: float
    prompt: float
    """Tokens of its prompt."""
    prefill: float
    """Of which to be computed (0 when a sibling did it)."""


class Pace:
    """Seconds and rounds at fixed rows, in plain floats."""

    def __init__(self, tables: Tables, law: AcceptanceLaw | None, k: int | tuple[int, ...], age: float) -> None:
        self._choices = (k,) if isinstance(k, int) else k
        self._lengths = [1.0 if c == 0 or law is None else law.length(c, age) for c in self._choices]
        self._tables = tables
        self._rows: dict[tuple[int, int], tuple[list[float], list[float]]] = {}

    def choose(self, rows: int, context: float) -> int:
        """Index of the draft length used with these rows and mean context."""
        if len(self._choices) == 1:
            return 0
        rates = [self._lengths[i] / self._value(rows, i, context) for i in range(len(self._choices))]
        return rates.index(max(rates))

    def length(self, choice: int) -> float:
        """Tokens a row gains in a round."""
        return self._lengths[choice]

    def draft_length(self, choice: int) -> int:
        """k of a choice."""
        return self._choices[choice]

    def seconds(self, rows: int, choice: int, context: float, rounds: float) -> float:
        """Seconds of `rounds` rounds from this mean context."""
        x, y = self._line(rows, choice)
        growth, total, done = self._lengths[choice], 0.0, 0.0
        i = self._segment(x, context)
        while done < rounds:
            edge = ceil((x[i + 1] - context) / growth) if i < len(x) - 2 else inf
            upto = max(min(edge, rounds), done)
            count = upto - done
            slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i])
            total += count * (y[i] + slope * (context + growth * (done + (count - 1) / 2) - x[i]))
            done = upto
            i += 1
        return total

    def rounds(self, rows: int, choice: int, context: float, seconds: float) -> float:
        """Rounds done in `seconds`: the inverse of `seconds`."""
        x, y = self._line(rows, choice)
        growth, done, left = self._lengths[choice], 0.0, seconds
        i = self._segment(x, context)
        while True:
            edge = ceil((x[i + 1] - context) / growth) if i < len(x) - 2 else inf
            slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i])
            first = y[i] + slope * (context + growth * done - x[i])
            bend = slope * growth
            linear = first - bend / 2
            count = left / first if bend == 0 else (sqrt(max(linear**2 + 2 * bend * left, 0.0)) - linear) / bend
            if done + count <= edge:
                return done + count
            step = max(edge - done, 0.0)
            left -= step * (first + bend * (step - 1) / 2)
            done += step
            i += 1

    def _segment(self, x: list[float], context: float) -> int:
        return min(max(bisect_right(x, context) - 1, 0), len(x) - 2)

    def _value(self, rows: int, choice: int, context: float) -> float:
        x, y = self._line(rows, choice)
        i = self._segment(x, context)
        return y[i] + (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (context - x[i])

    def _line(self, rows: int, choice: int) -> tuple[list[float], list[float]]:
        key = (rows, choice)
        if key not in self._rows:
            table = self._tables.of(self._choices[choice])
            self._rows[key] = (table.contexts[rows - 1].tolist(), table.seconds[rows - 1].tolist())
        return self._rows[key]


@dataclass(slots=True, kw_only=True)
class Replica:
    """State of one replica. Call `next_event`, then `advance` to a time no later than it."""

    pace: Pace
    tables: Tables
    slots: int
    now: float = 0.0
    busy: float = 0.0
    tokens: float = 0.0
    progress: float = 0.0
    context: float = 0.0
    choice: int = 0
    waiting: deque[Row] = field(default_factory=deque)
    heap: list[tuple[float, int, float, int]] = field(default_factory=list)
    """(progress at the end, ticket, context minus progress, batch)"""
    tickets: int = 0
    stalled: float = 0.0
    """Seconds of prefill still to be done before rounds go on."""

    def submit(self, rows: list[Row]) -> None:
        """Queue rows; they start as slots allow."""
        self.waiting.extend(rows)
        self._admit()

    def stall(self, seconds: float) -> None:
        """Stop rounds for this long (a weight update, a cache recomputed)."""
        self.stalled += seconds

    def next_event(self) -> float:
        """Time of the next finish; infinite when idle."""
        if not self.heap:
            return inf
        rows = len(self.heap)
        rounds = max(self.heap[0][0] - self.progress, 0.0) / self.pace.length(self.choice)
        return self.now + self.stalled + self.pace.seconds(rows, self.choice, self.context / rows, rounds)

    def finish(self, time: float) -> list[int]:
        """Advance to the next finish at `time`; the batches of the rows that ended."""
        gained = self.heap[0][0] - self.progress
        self._credit(time)
        self._gain(gained)
        done: list[int] = []
        while self.heap and self.heap[0][0] <= self.progress + 1e-9:
            _, _, born, batch = heapq.heappop(self.heap)
            self.context -= born + self.progress
            done.append(batch)
        self._admit()
        return done

    def advance(self, time: float) -> None:
        """Advance to `time`, before the next finish."""
        if not self.heap:
            self.now = max(self.now, time)
            return
        worked = time - self.now - self.stalled
        if worked < 0:
            self.stalled -= time - self.now
            self._credit(time, keep_stall=True)
            return
        rows = len(self.heap)
        rounds = self.pace.rounds(rows, self.choice, self.context / rows, worked)
        self._credit(time)
        self._gain(min(rounds * self.pace.length(self.choice), self.heap[0][0] - self.progress))

    def _credit(self, time: float, *, keep_stall: bool = False) -> None:
        self.busy += time - self.now
        self.now = time
        if not keep_stall:
            self.stalled = 0.0

    def _gain(self, tokens: float) -> None:
        self.progress += tokens
        self.tokens += tokens * len(self.heap)
        self.context += tokens * len(self.heap)

    def _admit(self) -> None:
        prompts, prefill = 0, 0.0
        while self.waiting and len(self.heap) < self.slots:
            row = self.waiting.popleft()
            if row.prefill > 0:
                prompts, prefill = prompts + 1, prefill + row.prefill
            start = row.prompt + 1.0
            end = self.progress + max(row.length - 1.0, 0.0)
            heapq.heappush(self.heap, (end, self.tickets, start - self.progress, row.batch))
            self.context += start
            self.tickets += 1
        if prompts:
            self.stalled += self.tables.prefill(prompts, prefill)
        if self.heap:
            self.choice = self.pace.choose(len(self.heap), self.context / len(self.heap))
