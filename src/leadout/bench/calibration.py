"""Measured rounds -> the profile of this machine that the simulator and the choice of draft lengths read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from leadout.bench.native import TimedLength
from leadout.sim.profile import DrafterTimes, Linear, RoundGrid

MEASURED_DRAFTS = (0, 1, 3, 5)
"""k that are run; 2 and 4 lie on the line between their neighbours, since every draft adds the same work."""


@dataclass(slots=True, kw_only=True)
class RoundTimes:
    """Every timed round of one shape."""

    whole: list[float] = field(default_factory=list)
    """Seconds from the end of the round before."""
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    first_draft: list[float] = field(default_factory=list)
    """Seconds of drafting in the first round of each run, in which the drafter reads the prompts."""
    prompts: int = 1
    """Different prompts of the rows."""
    prompt_tokens: int = 0
    """Tokens of those together."""

    def add(self, timer: TimedLength, rows: int) -> None:
        """The rounds of a run with all rows live; of the first only the drafting."""
        self.first_draft += [each.draft_seconds for each in timer.rounds[:1]]
        self.whole += timer.seconds(rows)
        later = [each for each in timer.rounds[1:] if each.rows == rows]
        self.draft += [each.draft_seconds for each in later]
        self.verify += [each.verify_seconds for each in later]

    def join(self, other: RoundTimes) -> None:
        """Take another run's rounds of the same shape in."""
        self.whole += other.whole
        self.draft += other.draft
        self.verify += other.verify
        self.first_draft += other.first_draft


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


def pass_curve(times: Mapping[Shape, RoundTimes], *, drafts: bool) -> dict[int, float]:
    """Seconds of plain rounds, or of rounds with drafts without the drafting; by tokens, at the shortest context."""
    least = min(context for _, _, context in times)
    found: dict[int, list[float]] = {}
    for (k, rows, context), each in times.items():
        if context == least and (k > 0) is drafts:
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


def drafter_times(times: Mapping[Shape, RoundTimes]) -> DrafterTimes:
    """What a drafter adds to the policy's part of a round."""
    return DrafterTimes(draft=draft_curve(times), verify=pass_curve(times, drafts=True), prompt=_prompt_line(times))


def _prompt_line(times: Mapping[Shape, RoundTimes]) -> Linear:
    """Per prompt + per token of it, through the medians of what first drafts took beyond the later ones."""
    found: dict[tuple[int, int], list[float]] = {}
    for (k, _, _), each in times.items():
        if k:
            usual = statistics.median(each.draft)
            extra = found.setdefault((each.prompts, each.prompt_tokens), [])
            extra += [max(first - usual, 0.0) for first in each.first_draft]
    factors = np.array(list(found), np.float64)
    (per_prompt, per_token), _ = nnls(factors, np.array([statistics.median(extra) for extra in found.values()]))
    return Linear(seconds_per_sample=float(per_prompt), seconds_per_token=float(per_token))


def fit_line(tokens: Sequence[float], seconds: Sequence[float], samples: Sequence[float] | None = None) -> Linear:
    """fixed + per token, and per sample where `samples` are counted, by least squares; none below zero."""
    columns = [np.ones(len(tokens)), np.asarray(tokens, np.float64)]
    if samples is not None:
        columns.append(np.asarray(samples, np.float64))
    (fixed, slope, *each), _ = nnls(np.stack(columns, 1), np.asarray(seconds, np.float64))
    return Linear(
        fixed_s=float(fixed), seconds_per_token=float(slope), seconds_per_sample=float(each[0]) if each else 0.0
    )
