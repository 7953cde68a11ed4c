"""From submitted requests to rows with a filled cache: the waiting line and the prefills under way.

While most rows are decoding, prompts are filled in small chunks between their rounds, so that a long prompt never stops
them; otherwise in large ones.

Axes: G prompts of a pass, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from leadout.records import Request, Rollout, RolloutId
from leadout.rollout.parts import EngineParts
from leadout.rollout.prefill import Cohort, Filling, cohorts, passes
from leadout.rollout.rows import unstarted

_MOSTLY = 0.75
"""Share of rows decoding from which prompts are filled in small chunks."""


class Admission:
    """Requests that are not decoding yet."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._waiting: deque[Request] = deque()
        self._filling: deque[Filling] = deque()

    def __bool__(self) -> bool:
        """Whether anything is left to admit."""
        return bool(self._waiting or self._filling)

    def ids(self) -> set[RolloutId]:
        """Of every request held."""
        waiting = {request.rollout_id for request in self._waiting}
        return waiting | {request.rollout_id for request in self._requests_filling()}

    def _requests_filling(self) -> Iterable[Request]:
        return (request for filling in self._filling for cohort in filling.batch for request in cohort.requests)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue at the end."""
        self._waiting.extend(requests)

    def add_first(self, requests: Iterable[Request]) -> None:
        """Queue before all others, in this order."""
        self._waiting.extendleft(reversed(list(requests)))

    def advance(self, num_live: int) -> list[tuple[list[Cohort], torch.Tensor]]:
        """Take slots for waiting requests and fill: one small chunk where that would hold up `num_live` rows.

        A batch mostly empty is filled first, since decoding few rows costs as much as decoding many. Returns the passes
        that are complete with the logits [G, V] of their cohorts' first tokens.
        """
        free = min(self._parts.kv.num_free, len(self._waiting))
        if free:
            requests = [self._waiting.popleft() for _ in range(free)]
            taken = cohorts(requests, self._parts.kv.allocate(free))
            self._filling.extend(Filling(self._parts, batch) for batch in passes(taken, self._parts.prefill_tokens))
        done: list[tuple[list[Cohort], torch.Tensor]] = []
        while self._filling:
            rows_filling = sum(len(filling.slots) for filling in self._filling)
            busy = num_live >= _MOSTLY * (num_live + rows_filling)
            logits_GV = self._filling[0].run(self._parts.prefill_chunk if busy else self._parts.prefill_tokens)
            if logits_GV is not None:
                num_live += len(self._filling[0].slots)
                done.append((self._filling.popleft().batch, logits_GV))
            if busy:
                break
        return done

    def cancel(self, wanted: set[RolloutId]) -> list[Rollout]:
        """Drop these requests; what they have."""
        if any(request.rollout_id in wanted for request in self._requests_filling()):
            self.start_over()
        dropped = [unstarted(request) for request in self._waiting if request.rollout_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.rollout_id not in wanted)
        return dropped

    def start_over(self) -> None:
        """Give up the prefills under way, for instance because weights change; their requests wait again."""
        self.add_first(list(self._requests_filling()))
        for filling in self._filling:
            self._parts.kv.release(filling.slots)
        self._filling.clear()
