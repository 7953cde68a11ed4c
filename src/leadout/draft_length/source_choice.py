"""Which drafts a row takes where two drafters could serve it: looked up for nothing, or made by a model.

For every length of match the acceptance of both sources is measured; a row takes the one with more expected tokens.
With a clock the round as a whole is weighed too: running the model must pay for its own seconds. Everything a choice
rests on is known before the tokens of the round are drawn: earlier tokens, acceptance of earlier rounds, load, time.

Axes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from leadout.draft_length.acceptance import AcceptanceStats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EDGES = np.array([1, 2, 3, 5, 9, 17])
"""A match of m tokens is of class `searchsorted(_EDGES, m, "right")`; class 0 has no match."""
_FIRST_TRIES = 8
"""Row-rounds of a class that look up before anything is measured."""
_PROBE_EVERY = 24
"""Every such row-round of a class takes the other source, so that neither measurement goes stale."""
_KEEP = 0.9
"""Weight of the past in measured seconds."""


class SourceChoice:
    """Chooses between looking up and drafting with the model, row by row."""

    def __init__(self, max_length: int, clock: Callable[[], float] | None = None) -> None:
        """`clock`: seconds; without one only acceptance decides, which makes choices reproducible."""
        self._clock = clock
        classes = len(_EDGES) + 1
        self._looked_up = [AcceptanceStats(max_length) for _ in range(classes)]
        self._model = [AcceptanceStats(max_length) for _ in range(classes)]
        self._seen = np.zeros(classes, np.int64)
        self._draft_seconds: dict[int, float] = {}
        self._verify_seconds: dict[int, float] = {}

    def choose(self, matched_B: Ints, counts_B: Ints, lengths_B: Ints) -> tuple[Bools, Bools]:
        """Rows that look up and rows that ask the model, both bool[B].

        `matched_B`: length of the match; `counts_B`: tokens found; `lengths_B`: tokens wanted.
        """
        class_B = np.searchsorted(_EDGES, np.where(counts_B > 0, matched_B, 0), "right")
        by_look_B = self._expected(self._looked_up, class_B, counts_B)
        by_model_B = self._expected(self._model, class_B, lengths_B)
        looks_up_B = np.zeros(len(class_B), bool)
        for row in np.flatnonzero(counts_B):
            kind = class_B[row]
            looks_up_B[row] = self._seen[kind] < _FIRST_TRIES or by_look_B[row] >= by_model_B[row]
            if self._seen[kind] % _PROBE_EVERY == _PROBE_EVERY - 1:
                looks_up_B[row] = not looks_up_B[row]
            self._seen[kind] += 1
        asks_B = (lengths_B > 0) & ~looks_up_B
        if asks_B.any() and counts_B.any() and not self._model_pays(asks_B, by_look_B, by_model_B):
            return counts_B > 0, np.zeros_like(asks_B)
        return looks_up_B, asks_B

    @staticmethod
    def _expected(stats: list[AcceptanceStats], class_B: Ints, lengths_B: Ints) -> npt.NDArray[np.float64]:
        """Expected tokens that each row commits, f64[B]."""
        table = {kind: stats[kind].expected_committed() for kind in set(class_B.tolist())}
        return np.array(
            [table[kind][min(k, len(table[kind]) - 1)] for kind, k in zip(class_B.tolist(), lengths_B.tolist())]
        )

    def _model_pays(
        self, asks_B: Bools, by_look_B: npt.NDArray[np.float64], by_model_B: npt.NDArray[np.float64]
    ) -> bool:
        """Whether the tokens that the model adds are worth its seconds; True where that is not known."""
        load = len(asks_B).bit_length()
        draft, verify = self._draft_seconds.get(load), self._verify_seconds.get(load)
        if draft is None or verify is None:
            return True
        with_model = np.where(asks_B, by_model_B, by_look_B).sum() / (verify + draft)
        return bool(with_model >= by_look_B.sum() / verify)

    def now(self) -> float | None:
        """The clock's time."""
        return None if self._clock is None else self._clock()

    def record_seconds(self, rows: int, draft: float | None, verify: float | None) -> None:
        """Take the seconds of the model's draft and of everything after it in one round."""
        for held, seconds in ((self._draft_seconds, draft), (self._verify_seconds, verify)):
            if seconds is not None:
                load = rows.bit_length()
                held[load] = _KEEP * held.get(load, seconds) + (1.0 - _KEEP) * seconds

    def record(self, looked_up_B: Bools, matched_B: Ints, drafted_B: Ints, accepted_B: Ints) -> None:
        """Take a round's outcome; `matched_B` as in `choose`."""
        class_B = np.searchsorted(_EDGES, matched_B, "right")
        for stats, chosen_B in ((self._looked_up, looked_up_B), (self._model, ~looked_up_B)):
            for kind in set(class_B[chosen_B & (drafted_B > 0)].tolist()):
                rows_B = chosen_B & (class_B == kind)
                stats[kind].record(drafted_B[rows_B], accepted_B[rows_B])

    def state_dict(self) -> dict[str, object]:
        """Acceptance by class; measured seconds are left behind with their machine."""
        return {
            "looked_up": [stats.state_dict() for stats in self._looked_up],
            "model": [stats.state_dict() for stats in self._model],
            "seen": self._seen.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        for stats, saved in ((self._looked_up, state["looked_up"]), (self._model, state["model"])):
            assert isinstance(saved, list)
            for each, row in zip(stats, saved, strict=True):
                each.load_state_dict(row)
        self._seen = np.asarray(state["seen"], np.int64)
