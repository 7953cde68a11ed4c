"""Seconds of one replica's rollouts under a draft length that is fixed or chosen by goodput.

With `auto` the draft length is the one the engine's controller picks: the largest expected tokens a second at the rows
and context in front of it, k = 0 included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from leadout.draft_length.goodput import best_draft_length
from leadout.sim.acceptance import AcceptanceLaw
from leadout.sim.drain import Intervals
from leadout.sim.kernel_tables import Floats
from leadout.sim.step_model import Ints, Part, StepTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What one replica did, interval by interval."""

    intervals: Intervals
    decode_s_N: Floats
    prefill_s_N: Floats
    k_N: Ints
    length_N: Floats
    """Acceptance length of each interval."""

    @property
    def seconds(self) -> float:
        """From the first prefill to the last token."""
        return float(self.decode_s_N.sum() + self.prefill_s_N.sum())

    @property
    def prefill_seconds(self) -> float:
        """Of which prefill."""
        return float(self.prefill_s_N.sum())

    @property
    def tokens(self) -> float:
        """Tokens made by rounds."""
        return float((self.intervals.rows_N * self.intervals.span_N).sum())

    @property
    def rounds(self) -> float:
        """Rounds of the replica."""
        return float((self.intervals.span_N / self.length_N).sum())


class RoundModel(Protocol):
    """What makes step tables: kernels and engine terms, or a calibrated machine."""

    def table(self, k: int, max_batch: int) -> StepTable:
        """Rounds with k drafts a row for 1..max_batch rows."""
        ...

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Seconds of prefilling that many tokens of that many prompts."""
        ...

    def breakdown(self, k: int, batch: int, context: float) -> list[Part]:
        """One round by operator, with the path that served each."""
        ...


@dataclass(slots=True, kw_only=True)
class Tables:
    """Step tables of one model, made once for each draft length."""

    model: RoundModel
    max_batch: int
    made: dict[int, StepTable]
    prefills: dict[tuple[int, float], float]

    def of(self, k: int) -> StepTable:
        """The table for k drafts."""
        if k not in self.made:
            self.made[k] = self.model.table(k, self.max_batch)
        return self.made[k]

    def prefill(self, prompts: int, tokens: float) -> float:
        """Seconds of prefilling that many tokens of that many prompts."""
        key = (prompts, tokens)
        if key not in self.prefills:
            self.prefills[key] = self.model.prefill_seconds(prompts, tokens)
        return self.prefills[key]


def make_tables(model: RoundModel, max_batch: int) -> Tables:
    """Empty cache of step tables."""
    return Tables(model=model, max_batch=max_batch, made={}, prefills={})


def generate(
    intervals: Intervals, tables: Tables, law: AcceptanceLaw | None, k: int | tuple[int, ...], age: float = 0.0
) -> Generation:
    """Integrate a replica's intervals; `k` is one draft length or the candidates `auto` chooses from."""
    choices = (k,) if isinstance(k, int) else k
    rows = np.minimum(intervals.rows_N, tables.max_batch)
    mean = intervals.context_N / intervals.rows_N
    lengths = [1.0 if c == 0 or law is None else law.length(c, age) for c in choices]
    if len(choices) == 1:
        pick = np.zeros(len(rows), dtype=np.int64)
    else:
        seconds = np.stack([tables.of(c).at(rows, mean) for c in choices])
        pick = best_draft_length(np.array(lengths), seconds)
    decode = np.zeros(len(rows))
    length = np.array(lengths)[pick]
    for i, choice in enumerate(choices):
        chosen = pick == i
        if chosen.any():
            rounds = intervals.span_N[chosen] / lengths[i]
            decode[chosen] = tables.of(choice).integrate(rows[chosen], mean[chosen], lengths[i], rounds)
    prefill = np.zeros(len(rows))
    for n in np.flatnonzero(intervals.prefill_rows_N):
        prompts = int(intervals.prefill_rows_N[n])
        prefill[n] = tables.prefill(prompts, float(intervals.prefill_tokens_N[n]))
    return Generation(
        intervals=intervals, decode_s_N=decode, prefill_s_N=prefill, k_N=np.array(choices)[pick], length_N=length
    )
