"""Measured cells of the comparison of drafters -> Markdown. Loads no model.

What is not measured is a dash, and listed at the end with the command that measures it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.drafter_cells import (
    MIDDLE_LENGTH,
    POLICIES,
    WORKLOADS,
    Cell,
    Drafter,
    Options,
    acceptance_name,
    cells,
    drafters,
)
from benchmarks.drafter_store import Acceptance, Online, Speed, Store, Training, Tuned
from leadout.bench.render import ratio
from leadout.bench.statistics import Ratio

NONE = "–"
_TITLES = {"arithmetic": "arithmetic", "gsm8k": "GSM8K"}
_MOSTLY = 0.9
_WINDOWS = 4


def render(options: Options, store: Store) -> str:
    """All tables."""
    rows = drafters(options)
    main = [row for row in rows if row.part == "main"]
    parts = [_policies(store)]
    for policy in POLICIES:
        parts += [_lengths(options, store, main, policy), _positions(options, store, main, policy)]
    parts += [
        _sampled(store, [row for row in main if row.has_model]),
        _speeds(options, store, main),
        _domains(options, store),
        _losses(options, store, rows),
        _online(options, store, rows),
        _missing(options, store),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A heading, a table, and a sentence below it."""
    lines = [f"### {title}", "", _row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
    return "\n".join([*lines, *(["", note] if note else [])])


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _read(
    store: Store, drafter: str, workload: str, policy: str, length: int = MIDDLE_LENGTH, *, greedy: bool = False
) -> Acceptance | None:
    name = acceptance_name(drafter, workload, policy, length, greedy=greedy)
    return store.read(Acceptance, f"acceptance/{name}")


def _length(found: Acceptance | None) -> str:
    """With the share of rounds that drafted, where it is far from all."""
    if found is None:
        return NONE
    if found.length is None:
        return "no drafts"
    share = "" if found.drafted >= _MOSTLY else f" ({found.drafted:.0%})"
    return f"{found.length:.2f}{share}"


def _policies(store: Store) -> str:
    tuned = store.read(Tuned, "policy/tuned")
    if tuned is None:
        return ""
    if tuned.updates is None:
        return f"Tuned policy: given, {tuned.folder}."
    ends = [
        f"{name} {pair[0]:.2f} to {pair[1]:.2f}"
        for name, pair in (("reward", tuned.rewards), ("entropy in nats", tuned.entropies))
        if pair is not None
    ]
    return f"Tuned policy: {tuned.updates} updates on arithmetic; {', '.join(ends) or 'nothing measured'}."


def _lengths(options: Options, store: Store, rows: Sequence[Drafter], policy: str) -> str:
    header = ["drafter", *(f"{_TITLES[workload]}, k = {k}" for workload in WORKLOADS for k in options.lengths)]
    found = {
        (row.name, workload, k): _read(store, row.name, workload, policy, k)
        for row in rows
        for workload in WORKLOADS
        for k in options.lengths
    }
    errors = [each.error for each in found.values() if each is not None and each.error is not None]
    note = (
        f"Tokens per round that drafted; in brackets the share of rounds, where it is under {_MOSTLY:.0%}. "
        f"{options.prompts} prompts, up to {options.completion_length} tokens each, temperature 1, sampled drafts."
    )
    if errors:
        note += f" Standard errors up to {max(errors):.3f}, median {statistics.median(errors):.3f}."
    body = [
        [row.name, *(_length(found[row.name, workload, k]) for workload in WORKLOADS for k in options.lengths)]
        for row in rows
    ]
    return table(f"Acceptance length, {policy} policy", header, body, note)


def _positions(options: Options, store: Store, rows: Sequence[Drafter], policy: str) -> str:
    most = max(options.lengths)
    header = ["drafter", *(_TITLES[workload] for workload in WORKLOADS)]

    def rates(drafter: Drafter, workload: str) -> str:
        found = _read(store, drafter.name, workload, policy, most)
        return NONE if found is None else " ".join(f"{rate:.2f}" for rate in found.rates) or "no drafts"

    body = [[row.name, *(rates(row, workload) for workload in WORKLOADS)] for row in rows]
    note = f"Accepted at positions 1 to {most}, where all before were accepted; k = {most}."
    return table(f"Acceptance by position, {policy} policy", header, body, note)


def _sampled(store: Store, rows: Sequence[Drafter]) -> str:
    places = [(workload, policy) for policy in POLICIES for workload in WORKLOADS]
    header = ["drafter", *(f"{_TITLES[workload]}, {policy}" for workload, policy in places)]
    body = [
        [
            row.name,
            *(
                " / ".join(_length(_read(store, row.name, w, p, greedy=greedy)) for greedy in (False, True))
                for w, p in places
            ),
        ]
        for row in rows
    ]
    return table(
        "Sampled against greedy drafts", header, body, f"Acceptance length, sampled / greedy, k = {MIDDLE_LENGTH}."
    )


def _speeds(options: Options, store: Store, rows: Sequence[Drafter]) -> str:
    header = ["drafter", "training, min", "expected length"]
    for count in options.batches:
        header += [f"batch {count}: draft / round cost", f"k = {MIDDLE_LENGTH}", "auto"]
    body = []
    for row in rows:
        line = [row.name, *_training(store, row)]
        for count in options.batches:
            speed = store.read(Speed, f"speed/{row.name}.batch{count}")
            if speed is None:
                line += [NONE] * 3
                continue
            draft = NONE if speed.draft_cost is None else f"{speed.draft_cost:.2f}"
            line += [f"{draft} / {_ratio(speed.round_cost)}"]
            line += [_ratio(speed.speedup.get(name)) for name in (f"k={MIDDLE_LENGTH}", "auto")]
        body.append(line)
    note = (
        f"Costs of k = {MIDDLE_LENGTH} in plain steps of the same batch; the draft's is part of the round's. Speedup "
        f"over plain decoding in tokens per second, {options.pairs} turns of each, 95 % intervals; arithmetic prompts, "
        f"raw policy, {options.new_tokens} tokens a row. Minutes: rollouts / learning, {options.rollouts:,} rollouts, "
        f"{options.passes} passes; the expected length is that of held-out rollouts of the same data."
    )
    return table("Cost and speed", header, body, note)


def _training(store: Store, row: Drafter) -> tuple[str, str]:
    if row.domain is None:
        return "given" if row.folder is not None else "none", ""
    training = store.read(Training, f"train/{row.name}")
    if training is None:
        return NONE, NONE
    minutes = f"{training.rollout_seconds / 60:.1f} / {training.train_seconds / 60:.1f}"
    return minutes, f"{training.expected_length:.2f}"


def _ratio(value: Ratio | None) -> str:
    return NONE if value is None else ratio(value)


def _domains(options: Options, store: Store) -> str:
    rows = [("eagle3-arithmetic", "arithmetic"), ("eagle3", "arithmetic and GSM8K"), ("eagle3-other", "other domain")]
    places = [(workload, policy) for policy in POLICIES for workload in WORKLOADS]
    header = ["trained on", *(f"{_TITLES[workload]}, {policy}" for workload, policy in places)]
    body = [[title, *(_length(_read(store, name, w, p)) for w, p in places)] for name, title in rows]
    note = f"EAGLE-3 heads, {options.rollouts:,} rollouts each; acceptance length, k = {MIDDLE_LENGTH}, sampled."
    if options.other is not None:
        note += f" Other domain: {options.other.rpartition('/')[2]}."
    return table("In-domain against other-domain start", header, body, note)


def _losses(options: Options, store: Store, rows: Sequence[Drafter]) -> str:
    header = ["loss", *(f"{_TITLES[w]}, {what}" for w in WORKLOADS for what in ("by seed", "mean ± sd"))]
    body = []
    for loss in options.losses:
        line = [f"`{loss}`"]
        for workload in WORKLOADS:
            named = [row.name for row in rows if row.part == "loss" and row.loss == loss]
            found = [_read(store, name, workload, "raw") for name in named]
            values = [each.length for each in found if each is not None and each.length is not None]
            line.append(", ".join(_length(each) for each in found))
            # A mean over some of the seeds would look like that over all.
            whole = len(values) == len(named) > 1
            line.append(f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}" if whole else NONE)
        body.append(line)
    note = (
        f"EAGLE-3 heads, {options.loss_rollouts:,} rollouts each; seeds {', '.join(map(str, options.seeds))} of "
        f"prompts, rollouts and start; acceptance length, k = {MIDDLE_LENGTH}, sampled, raw policy."
    )
    return table("Losses", header, body, note)


def _online(options: Options, store: Store, rows: Sequence[Drafter]) -> str:
    planned = [cell for cell in cells(options) if cell.stage == "online"]
    edges = [round(i * options.updates / _WINDOWS) for i in range(_WINDOWS + 1)]
    windows = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    body = []
    for cell in planned:
        found = store.read(Online, f"online/{cell.name}")
        parts = [() if found is None else found.lengths[a:b] for a, b in [*windows, (0, options.updates)]]
        body.append([cell.name.replace(".", ", "), *(_mean(part) for part in parts)])
    header = ["head", *(f"steps {a + 1} to {b}" for a, b in windows), "all"]
    note = (
        f"Mean acceptance length of the steps, k = {MIDDLE_LENGTH}; {options.step_prompts} prompts x "
        f"{options.generations} completions x {options.step_tokens} tokens of arithmetic a step. Both runs of a head "
        "begin with the same one."
    )
    return table(f"Frozen against online, {options.updates} policy updates", header, body, note)


def _mean(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{statistics.fmean(there):.2f}" if there else NONE


def _missing(options: Options, store: Store) -> str:
    left = [cell for cell in cells(options) if not store.path(cell).is_file()]
    if not left:
        return ""
    return "\n".join(
        [f"### Not measured yet: {len(left)}", "", *(_missing_line(cell, options, store) for cell in left)]
    )


def _missing_line(cell: Cell, options: Options, store: Store) -> str:
    first = [need for need in cell.needs if not store.has(need)]
    after = f" (after {' and '.join(first)})" if first else ""
    return f"- {cell.stage} {cell.name}{after}: `{cell.command(store.out, options)}`"
