"""Measured rounds -> the profile of this machine that the simulator and the choice of draft lengths read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from leadout.bench.native import TimedLength
from leadout.sim.profile import Linear, RoundGrid

MEASURED_DRAFTS = (0, 1, 3, 5)
"""k that are run; 2 and 4 lie on the line between their neighbours, since every draft adds the same work."""


@dataclass(slots=True, kw_only=True)
class RoundTimes:
    """Every timed round of one shape."""

    whole: list[float] = field(default_factory=list)
    """Seconds from the end of the round before."""
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    def add(self, timer: TimedLength, rows: int) -> None:
        """The rounds of a run with all rows live, without the first, in which a drafter reads the prompt."""
        self.whole += timer.seconds(rows)
        later = [each for each in timer.rounds[1:] if each.rows == rows]
        self.draft += [each.draft_seconds for each in later]
        self.verify += [each.verify_seconds for each in later]


Shape = tuple[int, int, int]
"""k, rows, context at the middle of the run."""


def round_grids(method: str, times: Mapping[Shape, RoundTimes]) -> tuple[RoundGrid, ...]:
    """Grids of every k from 0 to the largest measured; k = 0 belongs to no method."""
    measured = sorted({k for k, _, _ in times})
    rows = tuple(sorted({rows for _, rows, _ in times}))
    contexts = tuple(sorted({context for _, _, context in times}))
    seconds = np.array([[[statistics.median(times[k, r, c].whole) for c in contexts] for r in rows] for k in measured])
    grids = []
    for k in range(measured[-1] + 1):
        flat = [np.interp(k, measured, column) for column in seconds.reshape(len(measured), -1).T]
        lines = np.reshape(flat, (len(rows), len(contexts)))
        grids.append(
            RoundGrid(
                method=method if k else "none",
                k=k,
                rows=rows,
                contexts=tuple(float(context) for context in contexts),
                seconds=tuple(tuple(float(value) for value in line) for line in lines),
            )
        )
    return tuple(grids)


def forward_curve(times: Mapping[Shape, RoundTimes]) -> dict[int, float]:
    """Seconds of a round without its drafting, by tokens in the pass, at the shortest context."""
    least = min(context for _, _, context in times)
    found: dict[int, list[float]] = {}
    for (k, rows, context), each in times.items():
        if context == least:
            found.setdefault(rows * (k + 1), []).append(statistics.median(each.verify))
    return {tokens: statistics.fmean(values) for tokens, values in sorted(found.items())}


def draft_curve(times: Mapping[Shape, RoundTimes]) -> dict[int, float]:
    """Seconds of one draft position, by rows, at the shortest context."""
    least = min(context for _, _, context in times)
    found: dict[int, list[float]] = {}
    for (k, rows, context), each in times.items():
        if k and context == least:
            found.setdefault(rows, []).append(statistics.median(each.draft) / k)
    return {rows: statistics.fmean(values) for rows, values in sorted(found.items())}


def fit_line(tokens: Sequence[float], seconds: Sequence[float]) -> Linear:
    """fixed + per token by least squares, neither below zero."""
    factors = np.stack([np.ones(len(tokens)), np.asarray(tokens, np.float64)], 1)
    (fixed, slope), _ = nnls(factors, np.asarray(seconds, np.float64))
    return Linear(fixed_s=float(fixed), seconds_per_token=float(slope))
