"""Samples -> figures of a cell: tokens per second, acceptance, round cost, memory, ratios with intervals."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leadout.bench.contender import Sample
from leadout.bench.statistics import Ratio, Spread, ratio_of_medians
from leadout.bench.workload import Workload
from leadout.pipeline.rollout_metrics import acceptance_by_position

PLAIN = "plain"
"""Name of the contender that the others are compared with."""
AGAIN = "plain again"
"""The same once more in every turn: how far two equal contenders come out apart."""
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One contender in one cell."""

    name: str
    tokens_per_second: Spread
    seconds: tuple[float, ...]
    """Every sample, in the order measured."""
    peak_bytes: int
    """Peak resident memory of its process or processes, the most of all samples."""
    against_plain: Ratio | None = None
    """Tokens per second / those of plain; None for plain itself and where there is no plain."""
    round_cost: Ratio | None = None
    """Seconds of a round / seconds of a plain step, all rows live; None for peers and plain."""
    round_seconds: float | None = None
    """Median seconds of a round with all rows live."""
    acceptance_length: float | None = None
    """Tokens committed per drafted row-round, of the last sample measured alike; None where nothing was drafted."""
    acceptance_by_position: tuple[float, ...] = ()
    """Drafts accepted at position i / row-rounds that drafted at least i."""
    k_mean: float | None = None
    """Drafts per row-round, those with none counted as 0."""
    off_share: float | None = None
    """Share of row-rounds with nothing drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstBest:
    """`auto` against the best fixed k, which is chosen on the first half of the pairs and compared on the second."""

    best: str
    ratio: Ratio
    """Tokens per second of auto / of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload, all contenders."""

    name: str
    rows: int
    tokens: int
    """New tokens of one sample."""
    context: int
    """Tokens of the longest prompt."""
    lines: tuple[Line, ...]
    auto_against_best: AgainstBest | None = None

    def line(self, name: str) -> Line:
        """The contender of that name; raises KeyError."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(name)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return dataclasses.asdict(self)


def summarise(
    workload: Workload,
    samples: Mapping[str, Sequence[Sample]],
    *,
    fixed: Sequence[str] = (),
    apart: Sequence[str] = (),
) -> Cell:
    """The cell's figures.

    `fixed`: names of the contenders that `auto` is held against, plain among them. `apart`: names of those that do
    less than generate, and are not compared with plain.
    """
    plain = samples.get(PLAIN)
    auto = samples.get(AUTO)
    return Cell(
        name=workload.name,
        rows=workload.rows,
        tokens=workload.tokens,
        context=max(len(prompt.token_ids) for prompt in workload.prompts),
        lines=tuple(
            _line(name, each, None if name == PLAIN or name in apart else plain) for name, each in samples.items()
        ),
        auto_against_best=None if auto is None else against_best(auto, {name: samples[name] for name in fixed}),
    )


def _line(name: str, samples: Sequence[Sample], plain: Sequence[Sample] | None) -> Line:
    spec = _pooled([sample.spec for sample in samples])
    rounds = [sample.round_seconds for sample in samples if sample.round_seconds is not None]
    return Line(
        name=name,
        tokens_per_second=Spread.of([sample.tokens_per_second for sample in samples]),
        seconds=tuple(sample.seconds for sample in samples),
        peak_bytes=max(sample.peak_bytes for sample in samples),
        against_plain=None if plain is None else speedup(samples, plain),
        round_cost=None if plain is None or not spec.get("spec/num_drafts") else _round_cost(samples, plain),
        round_seconds=statistics.median(rounds) if rounds else None,
        acceptance_length=spec.get("spec/acceptance_length"),
        acceptance_by_position=tuple(acceptance_by_position(spec)),
        k_mean=spec.get("spec/k_mean"),
        off_share=spec.get("spec/off_share"),
    )


def _pooled(specs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over samples; they weigh alike, since each generates the same number of tokens."""
    names = {name: None for spec in specs for name in spec}
    return {name: statistics.fmean(spec[name] for spec in specs if name in spec) for name in names}


def speedup(samples: Sequence[Sample], base: Sequence[Sample]) -> Ratio:
    """Tokens per second / those of the base, by pairs."""
    return ratio_of_medians([each.tokens_per_second for each in samples], [each.tokens_per_second for each in base])


def _round_cost(samples: Sequence[Sample], plain: Sequence[Sample]) -> Ratio | None:
    pairs = [
        (ours.round_seconds, theirs.round_seconds)
        for ours, theirs in zip(samples, plain, strict=True)
        if ours.round_seconds is not None and theirs.round_seconds is not None
    ]
    if not pairs:
        return None
    return ratio_of_medians([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def against_best(auto: Sequence[Sample], fixed: Mapping[str, Sequence[Sample]]) -> AgainstBest | None:
    """Nothing without a fixed contender or with a single pair; odd counts leave the larger half to the comparison."""
    half = len(auto) // 2
    if not fixed or not half:
        return None
    best = max(fixed, key=lambda name: statistics.median(each.tokens_per_second for each in fixed[name][:half]))
    return AgainstBest(best=best, ratio=speedup(auto[half:], fixed[best][half:]))
