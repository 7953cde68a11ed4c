"""How each cell of the comparison of drafters is measured; all of it by the project's own training, engine and bench.

Axes: N rollouts, R rounds of one rollout.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.drafter_bench import Bench
from benchmarks.drafter_cells import MIDDLE_LENGTH, Cell, Drafter
from benchmarks.drafter_store import Acceptance, Speed, Training
from leadout.bench.calibration import RoundTimes
from leadout.bench.contender import interleave
from leadout.bench.native import NativeContender
from leadout.bench.results import AUTO, summarise
from leadout.bench.statistics import Ratio
from leadout.bench.workload import Workload
from leadout.build.bench import own_contenders
from leadout.build.bench_machine import DrafterChoice
from leadout.build.data import sampling_params
from leadout.build.draft_plan import DraftPlan
from leadout.build.draft_training import LENGTH, train_draft
from leadout.build.generator import make_generator
from leadout.config import Dataset, Draft, HeadMethod, RolloutSection, SpeculativeConfig
from leadout.models.cut_layers import write_cut_model
from leadout.models.loading import resolve
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.pipeline.rollout_metrics import committed_per_round, speculation_metrics
from leadout.records import Rollout, SamplingParams
from leadout.rollout.engine import NativeGenerator

_GENERATIONS = 4
"""Rollouts of each prompt while drafters are trained, and in the epoch that history looks back on."""
_MEASUREMENTS = 4
"""Times that a training measures its drafter."""
_DRAFT_PAIRS = 3


def measure_training(bench: Bench, cell: Cell) -> Training:
    """Train a drafter offline, or go on where an earlier call stopped."""
    options, drafter = bench.options, cell.drafter
    assert drafter is not None and drafter.has_model, "a drafter that learns"
    out, start = bench.store.out / "drafters" / drafter.name, bench.store.out / "drafters" / "start"
    if drafter.method == "small_model" and not start.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        write_cut_model(resolve(options.model), options.layers, start)
    count: int = cell.settings["rollouts"]
    batch = min(64, -(-count // _GENERATIONS) * _GENERATIONS)
    reduced = drafter.method in ("eagle3", "parallel")
    plan = DraftPlan(
        model=options.model,
        data=training_data(bench, drafter, count),
        num_rollouts=count,
        passes=options.passes,
        num_generations=_GENERATIONS,
        batch=batch,
        measure_every=max(1, -(-count // batch) * options.passes // _MEASUREMENTS),
        held_out=24,
        max_completion_length=options.completion_length,
        num_drafts=MIDDLE_LENGTH,
        method=cast(HeadMethod, drafter.method),
        draft=Draft(
            loss_fn=drafter.loss, vocab_size=options.vocab_size if reduced else None, ttt_steps=options.ttt_steps
        ),
        init=start if drafter.method == "small_model" else None,
        seed=drafter.seed,
        dtype=cast(Any, options.dtype),
    )
    best = train_draft(plan, out, bench.console)
    last = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return Training(
        folder=out.absolute(),
        rollouts=count,
        rollout_seconds=last["seconds/rollout"],
        train_seconds=last["seconds/train"],
        expected_length=best[LENGTH],
    )


def training_data(bench: Bench, drafter: Drafter, count: int) -> dict[str, Dataset]:
    """As many rows of each set, so that a mix is even."""
    options = bench.options
    arithmetic = {"arithmetic": bench.arithmetic("train", count)}
    if drafter.domain == "arithmetic":
        return arithmetic
    if drafter.domain == "mixed":
        rows = Dataset(path=options.gsm8k_train, prompt_key="question", answer_key=None, num_rows=count)
        return {**arithmetic, "gsm8k": rows}
    assert options.other is not None, "the cell needs it"
    path, _, key = options.other.rpartition("@")
    return {"other": Dataset(path=Path(path), prompt_key=key, answer_key=None, num_rows=count)}


def measure_acceptance(bench: Bench, cell: Cell) -> Acceptance:
    """Rollouts of the workload's prompts at temperature 1; history has seen an epoch of the same prompts before."""
    drafter = cell.drafter
    assert drafter is not None, "a drafter is measured"
    speculation = SpeculativeConfig(
        method=drafter.method,
        model=bench.folder(drafter),
        num_speculative_tokens=cell.length,
        draft_sample_method="greedy" if cell.greedy else "probabilistic",
    )
    generator, params = _engine(bench, cell, speculation)
    if speculation.looks_back:
        state = generator.state_dict()
        own, before = state["history"], _epoch_before(bench, cell)
        assert isinstance(own, dict), "a drafter that looks back remembers"
        remembered = {**own, "history": before} if "history" in own else before
        generator.load_state_dict({**state, "history": remembered})
    return accepted(generate(generator, make_requests(bench.prompts(cell.workload), params, 1)))


def _engine(bench: Bench, cell: Cell, speculation: SpeculativeConfig) -> tuple[NativeGenerator, SamplingParams]:
    """An engine that drafts so, and how the cell samples."""
    options, machine = bench.options, bench.machine(cell.policy)
    section = RolloutSection(
        temperature=1.0,
        max_completion_length=options.completion_length,
        dtype=cast(Any, options.dtype),
        speculative_config=speculation,
    )
    kind = speculation.draft_head
    head = None if kind is None else machine.head(speculation.model, kind)
    generator = make_generator(machine.decoder, machine.codec, section, num_rows=options.rows, head=head)
    return generator, sampling_params(section, machine.codec, 0)


def _epoch_before(bench: Bench, cell: Cell) -> object:
    """What `history` remembers of an epoch of the same prompts; generated once for all its cells."""
    key = cell.workload, cell.policy
    if key not in bench.epochs:
        generator, params = _engine(bench, cell, SpeculativeConfig(method="history", num_speculative_tokens=1))
        prompts = bench.prompts(cell.workload)
        generate(generator, make_requests(prompts, params, _GENERATIONS, first_draw=len(prompts)))
        bench.epochs[key] = generator.state_dict()["history"]
    return bench.epochs[key]


def accepted(rollouts: Sequence[Rollout]) -> Acceptance:
    """The figures of some rollouts; the last round of a rollout whose room ends has nothing to draft for."""
    spec = speculation_metrics(rollouts)
    drafted = [rollout.rounds.drafted for rollout in rollouts]
    drafted_R = np.concatenate(drafted).astype(int)
    accepted_R = np.concatenate([rollout.rounds.accepted for rollout in rollouts]).astype(int)
    verified = [
        int(np.sum((drafted_R >= i) & (accepted_R >= i - 1))) for i in range(1, 1 + int(drafted_R.max(initial=0)))
    ]
    rates = tuple(float(np.sum(accepted_R >= i) / count) for i, count in enumerate(verified, 1) if count)
    without_room = sum(bool(r.is_truncated and len(d) and d[-1] == 0) for r, d in zip(rollouts, drafted, strict=True))
    length = spec.get("spec/acceptance_length")
    return Acceptance(
        length=length,
        error=None if length is None else _standard_error(rollouts, length),
        drafted=float(np.sum(drafted_R > 0) / max(1, len(drafted_R) - without_room)),
        rates=rates,
        rounds=len(drafted_R),
        tokens=sum(rollout.length for rollout in rollouts),
    )


def _standard_error(rollouts: Sequence[Rollout], length: float) -> float:
    """Of the ratio tokens / rounds over independent rollouts (Cochran, Sampling Techniques, 6.4)."""
    on = [rollout.rounds.drafted > 0 for rollout in rollouts]
    tokens_N = np.array([committed_per_round(r)[o].sum() for r, o in zip(rollouts, on, strict=True)], float)
    rounds_N = np.array([o.sum() for o in on], float)
    spread = float(np.sum((tokens_N - length * rounds_N) ** 2))
    return float(np.sqrt(spread * len(rollouts) / max(1, len(rollouts) - 1)) / rounds_N.sum())


def measure_speed(bench: Bench, cell: Cell) -> Speed:
    """Plain, k = 3 and auto in turn on held-out arithmetic prompts; then the time spent drafting, beside plain."""
    drafter, options = cell.drafter, bench.options
    assert drafter is not None, "a drafter is measured"
    machine = bench.machine("raw")
    prompts = bench.prompts("arithmetic")
    workload = Workload(
        name=cell.name,
        prompts=tuple(prompts[i % len(prompts)] for i in range(cell.rows)),
        lengths=(options.new_tokens,) * cell.rows,
    )
    choice = DrafterChoice(method=drafter.method, draft=bench.folder(drafter))
    contenders = own_contenders(machine, choice, workload, (MIDDLE_LENGTH, AUTO))
    names = [each.name for each in contenders]
    samples = interleave(contenders, workload, options.pairs, lambda _: None)
    measured = summarise(workload, samples, fixed=[name for name in names if name != AUTO])
    speedup: dict[str, Ratio] = {}
    for name in names[1:]:
        ratio = measured.line(name).against_plain
        assert ratio is not None, "plain is among them"
        speedup[name] = ratio
    return Speed(
        speedup=speedup,
        round_cost=measured.line(f"k={MIDDLE_LENGTH}").round_cost,
        draft_cost=_draft_cost(contenders[0], contenders[1], workload),
    )


def _draft_cost(plain: NativeContender, drafting: NativeContender, workload: Workload) -> float | None:
    times = {each.name: RoundTimes() for each in (plain, drafting)}
    for pair in range(_DRAFT_PAIRS):
        for each in (plain, drafting):
            times[each.name].add(each.timed_rounds(workload, pair)[0], workload.rows)
    drafts, steps = times[drafting.name].draft, times[plain.name].whole
    return statistics.median(drafts) / statistics.median(steps) if drafts and steps else None
