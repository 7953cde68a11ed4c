"""How a run closes: where its seconds went, and what speculation was worth, measured on the last step's prompts.

The last step's prompts are generated again with the present weights, plainly and with speculation in turn (A B A B),
for the full batch and for few rows. What comes out is reported as it is, ratios below 1 included.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leadout.interfaces import Generator
from leadout.metrics import wall_seconds
from leadout.pipeline.generate import generate
from leadout.pipeline.rollout_metrics import acceptance_by_position, committed_per_round, speculation_metrics
from leadout.records import Request, Rollout, Stage

PLAIN = "plain"
"""Name of the variant that all others are compared with."""

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the comparison."""

    name: str
    """As printed."""
    variant: str
    """Which generator is compared with the plain one."""
    rows: int | None = None
    """Rollouts generated at once; None: all of the step."""
    pairs: int = 3
    """Measured pairs, plain then speculative; few rows need more of them for a steady median."""


CASES = (
    Case(name="full batch, auto", variant="auto", pairs=3),
    Case(name="4 rows, k=3", variant="k=3", rows=4, pairs=5),
    Case(name="1 row, k=3", variant="k=3", rows=1, pairs=7),
)
"""What a run is closed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Speculative against plain generation of the same prompts."""

    name: str
    """The case's name."""
    variant: str
    """The generator compared with the plain one."""
    rows: int
    """Rollouts generated at once."""
    pairs: int
    """Measured pairs."""
    plain_tokens_per_second: float
    """Median over the pairs."""
    tokens_per_second: float
    """Median over the pairs, with speculation."""
    speedup: float
    """Ratio of the two medians; below 1 speculation was slower."""
    acceptance_length: float | None
    """Tokens committed per drafted row-round; None when nothing was drafted."""
    acceptance_rate_by_position: tuple[float, ...]
    """Accepted at position i / row-rounds that drafted at least i."""
    off_share: float
    """Share of row-rounds with nothing drafted."""
    round_cost: float | None
    """Time of a round in plain steps = tokens committed per row-round / speedup; None without rounds.

    Where every row-round drafts, that is acceptance_length / speedup.
    """
    step_speedup: float
    """What the speedup makes of the whole step; see `step_speedup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The closing table of a run."""

    steps: int
    """Steps the seconds are averaged over."""
    stage_seconds: Mapping[Stage, float]
    """Mean seconds by which each stage made a step longer."""
    comparisons: tuple[Comparison, ...]
    """One per case."""
    drafter_seconds: float = 0.0
    """Mean seconds that the learner spent on the drafter; part of its stages."""

    def to_json(self) -> dict[str, object]:
        """Plain values, for closing.json."""
        return dataclasses.asdict(self)


def step_speedup(
    stage_seconds: Mapping[Stage, float], speedup: float, run_speedup: float, hidden: float = 0.0
) -> float:
    """Whole-step speedup over plain generation, by Amdahl's law.

    With `total` the mean seconds of a step, `rollout` those of its rollout stage as the run was made, and
    `run_speedup` the generation speedup of the run's own generator (1 if it generated plainly), a step takes

        plain       = total - rollout + rollout * run_speedup
        speculative = total - rollout + rollout * run_speedup / speedup

    seconds, and the result is plain / speculative. All other stages count as the run had them; if the drafter was
    trained, its training is in both. Where stages overlap, `stage_seconds` are those that nothing hid, `hidden` more of
    generation ran beside them, and what the run's other stages hid then they would hide of any generation.
    """
    exposed = stage_seconds[Stage.ROLLOUT]
    rollout, others = exposed + hidden, sum(stage_seconds.values()) - exposed
    plain = others + max(rollout * run_speedup - hidden, 0.0)
    faster = others + max(rollout * run_speedup / speedup - hidden, 0.0)
    return plain / faster if faster > 0.0 else 1.0


def mean_stage_seconds(rows: Sequence[Mapping[str, float]]) -> dict[Stage, float]:
    """Mean seconds by which a stage made the steps of these rows of metrics.jsonl longer; 0 without rows."""
    return {stage: statistics.fmean([wall_seconds(row, stage) for row in rows]) if rows else 0.0 for stage in Stage}


def mean_hidden_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Mean seconds of generation that other stages hid; 0 where none overlap."""
    name = f"seconds/{Stage.ROLLOUT}"
    return statistics.fmean([row.get(name, 0.0) - wall_seconds(row, Stage.ROLLOUT) for row in rows]) if rows else 0.0


def mean_drafter_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Mean of `seconds/drafter`; 0 where no drafter learns."""
    return statistics.fmean([row.get("seconds/drafter", 0.0) for row in rows]) if rows else 0.0


def pick_rows(requests: Sequence[Request], rows: int | None, repetition: int) -> list[Request]:
    """`rows` of the requests, of as many different prompts as there are, others in each repetition; None: all."""
    if rows is None or rows >= len(requests):
        return list(requests)
    spread = sorted(requests, key=lambda request: (request.rollout_id.sibling, request.rollout_id.draw))
    return [spread[(repetition * rows + i) % len(spread)] for i in range(rows)]


def compare(
    case: Case,
    plain: Generator,
    other: Generator,
    requests: Sequence[Request],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Comparison, list[Rollout]]:
    """Generate plainly and with `other` in turn; the step speedup is left at 1. Also returns `other`'s rollouts.

    Both sides of a pair continue the same prompts under the same seed, each pair has its own seed, so that differing
    lengths average out. One short unmeasured pair comes first.
    """
    speeds: dict[str, list[float]] = {PLAIN: [], case.variant: []}
    drafted: list[Rollout] = []
    for generator in (plain, other):
        generate(generator, _reseeded(pick_rows(requests, case.rows, 0), 0, _WARM_UP_TOKENS))
    for pair in range(case.pairs):
        chosen = _reseeded(pick_rows(requests, case.rows, pair), pair + 1)
        for name, generator in ((PLAIN, plain), (case.variant, other)):
            begin = now()
            rollouts = generate(generator, chosen)
            speeds[name].append(sum(rollout.length for rollout in rollouts) / max(now() - begin, 1e-9))
            if generator is other:
                drafted += rollouts
    plain_speed, speed = statistics.median(speeds[PLAIN]), statistics.median(speeds[case.variant])
    speedup = speed / plain_speed if plain_speed > 0.0 and speed > 0.0 else 1.0
    spec = speculation_metrics(drafted)
    per_round = _tokens_per_round(drafted)
    comparison = Comparison(
        name=case.name,
        variant=case.variant,
        rows=len(pick_rows(requests, case.rows, 0)),
        pairs=case.pairs,
        plain_tokens_per_second=plain_speed,
        tokens_per_second=speed,
        speedup=speedup,
        acceptance_length=spec.get("spec/acceptance_length"),
        acceptance_rate_by_position=tuple(acceptance_by_position(spec)),
        off_share=spec.get("spec/off_share", 1.0),
        round_cost=None if per_round is None else per_round / speedup,
        step_speedup=1.0,
    )
    return comparison, drafted


def close_run(
    *,
    variants: Mapping[str, Generator],
    requests: Sequence[Request],
    rows: Sequence[Mapping[str, float]],
    run_variant: str,
    cases: Sequence[Case] = CASES,
    now: Callable[[], float] = time.perf_counter,
) -> Closing:
    """Measure the closing table.

    Args:
        variants: generators by name, "plain" among them, which all hold the present weights.
        requests: the last step's.
        rows: the run's rows of metrics.jsonl, for the seconds per stage.
        run_variant: which variant made the run's rollouts; the first full-batch case of it tells how much faster
            than plain the run's own rollout stage was.
        cases: the comparisons to make; cases whose variant is not there are left out.
        now: seconds from a fixed origin.

    """
    measured = [
        compare(case, variants[PLAIN], variants[case.variant], requests, now)[0]
        for case in cases
        if case.variant in variants
    ]
    full = [each.speedup for each in measured if each.variant == run_variant and each.rows == len(requests)]
    run_speedup = full[0] if full else 1.0
    seconds, hidden = mean_stage_seconds(rows), mean_hidden_seconds(rows)
    return Closing(
        steps=len(rows),
        stage_seconds=seconds,
        comparisons=tuple(
            dataclasses.replace(each, step_speedup=step_speedup(seconds, each.speedup, run_speedup, hidden))
            for each in measured
        ),
        drafter_seconds=mean_drafter_seconds(rows),
    )


def _reseeded(requests: Sequence[Request], offset: int, max_new_tokens: int | None = None) -> list[Request]:
    return [
        dataclasses.replace(
            request,
            params=dataclasses.replace(
                request.params,
                seed=request.params.seed + 1 + offset,
                max_new_tokens=min(request.params.max_new_tokens, max_new_tokens or request.params.max_new_tokens),
                trace=False,
            ),
        )
        for request in requests
    ]


def _tokens_per_round(rollouts: Sequence[Rollout]) -> float | None:
    rounds = sum(len(rollout.rounds.drafted) for rollout in rollouts)
    return sum(int(committed_per_round(rollout).sum()) for rollout in rollouts) / rounds if rounds else None
