"""`leadout simulate --paper`: the reference paper's tables beside ours, preset by preset.

Says of each figure whether it was fitted, assumed or predicted. 235B projections: the paper's simulator is closed; ours
is shown with balanced routing and no host time (what the closed one looks like) and with its own defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from leadout.records import Stage
from leadout.sim.asynchronous import flow_seconds, run_timeline
from leadout.sim.paper import (
    NGRAM,
    PLAIN_S,
    PRESETS,
    SEPARATES,
    SPEEDUP,
    STAGES,
    STAGES_SPEC,
    VARIANTS,
    WORKLOADS,
    Fit,
    PaperRuns,
    fit,
    scenario,
)
from leadout.sim.paper_scale import BLIND, Compare, blind_round_cost, projections_235b
from leadout.sim.project import project
from leadout.sim.scenario import parse
from leadout.sim.setup import Workbench, prepare

TRAIN_SIDE = {"plain": (64.6, 2 * 31.4 + 2.1), "speculative": (59.9, 2 * 30.5 + 1.6)}
"""Asynchronous run: (measured step minus exposed generation, twice the synchronous train stage plus its refit)."""
ASYNC_STEP = {"plain": 75.0, "speculative": 60.5}


def fitted_presets() -> dict[str, Fit]:
    """All presets with their constants."""
    runs = PaperRuns()
    fits = {"roofline": fit(PRESETS["roofline"], PaperRuns(roofline=True))}
    return fits | {name: fit(PRESETS[name], runs) for name in ("h3", "h5")}


def held_out(runs: PaperRuns) -> dict[str, list[Compare]]:
    """Refits without the k = 5 speedups, and on RL-Zero alone (both plain times kept)."""
    out: dict[str, list[Compare]] = {}
    for name in ("h3", "h5"):
        for label, hidden in (
            ("k = 5 held out", [cell for cell in SPEEDUP if cell[1] == 5]),
            ("RL-Think held out", [cell for cell in SPEEDUP if cell[0] == "Think"]),
        ):
            found = fit(PRESETS[name], runs, [cell for cell in SPEEDUP if cell not in hidden])
            out[f"{PRESETS[name].name}, {label}"] = [
                Compare(name=f"RL-{w} k={k}", paper=SPEEDUP[w, k], ours=found.speedup[w, k], role="predicted")
                for w, k in hidden
            ]
    return out


def generation_rows(found: Fit) -> list[Compare]:
    """Generation seconds and speedups under a preset."""
    role = "fitted" if found.targets else "predicted"
    rows = [Compare(name=f"RL-{w} plain, s", paper=PLAIN_S[w], ours=found.plain[w], role=role) for w in WORKLOADS]
    return rows + [
        Compare(name=f"RL-{w} k={k}, speedup", paper=SPEEDUP[w, k], ours=found.speedup[w, k], role=role)
        for w, k in SPEEDUP
    ]


def variant_rows(found: Fit, runs: PaperRuns) -> list[Compare]:
    """Drafts of other quality at k = 3: only the acceptance length changes; n-gram with ragged drafts."""
    rows = []
    for name, *figures in VARIANTS:
        for workload, (length, speedup) in zip(("Zero", "Think"), (figures[:2], figures[2:]), strict=True):
            seconds = runs.seconds(workload, 3, found.engine, length)
            rows.append(
                Compare(
                    name=f"{name} RL-{workload} (length {length})",
                    paper=speedup,
                    ours=found.plain[workload] / seconds,
                    role="predicted",
                )
            )
    return rows


def ngram_rows(found: Fit) -> list[Compare]:
    """N-gram drafts: k = 5 assumed (not published), ragged, so outside the graph and in the prefill kernel."""
    rows = []
    for workload, (length, speedup) in NGRAM.items():
        base = scenario(workload, found.engine)
        section = {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "acceptance": {"mean_length": length, "at_k": 5},
        }
        drafted = parse({**base.model_dump(), "speculation": section})
        ours = found.plain[workload] / project(drafted, Workbench()).rollout_s
        rows.append(Compare(name=f"n-gram RL-{workload}", paper=speedup, ours=ours, role="predicted, k assumed"))
    return rows


def table_one(found: Fit, runs: PaperRuns) -> list[Compare]:
    """Table 1: stages of plain and k = 3 steps. MFU .33 with padded sequences is what the train stage implies."""
    rows = []
    for workload in WORKLOADS:
        projected = project(scenario(workload, found.engine), Workbench()).seconds
        for measured, k in ((STAGES[workload], 0), (STAGES_SPEC[workload], 3)):
            ours = {stage.value: projected[stage] for stage in Stage}
            ours["rollout"] = runs.seconds(workload, k, found.engine)
            for stage, seconds in measured.items():
                role = {"rollout": "fitted", "train": "MFU read off it", "data": "assumed"}.get(stage, "predicted")
                label = "plain" if k == 0 else "k=3"
                rows.append(
                    Compare(name=f"RL-{workload} {label} {stage}, s", paper=seconds, ours=ours[stage], role=role)
                )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRun:
    """The asynchronous run at one concurrency."""

    name: str
    plain_s: float
    speculative_s: float


def async_runs(found: Fit) -> list[AsyncRun]:
    """RL-Think on 12 + 4 nodes, lag 1, with the train side as measured.

    From one batch at a time, drained, to lag + 1 batches always at work with rows replaced one by one (no tail).
    """
    steps: dict[str, dict[str, float]] = {"drained": {}, "whole": {}, "flow": {}}
    for kind, k in (("plain", 0), ("speculative", 3)):
        base = scenario("Think", {**found.engine}, k=k)
        for mode, method in (("drained", "copy"), ("whole", "in_flight")):
            setup = prepare(
                parse(
                    {
                        **base.model_dump(),
                        "gpus": 64,
                        "generation": {"gpus": 48},
                        "refit": {"method": method, "fixed_s": 0.0},
                        "pipeline": {"mode": "async", "max_staleness": 1},
                    }
                )
            )
            steps[mode][kind] = run_timeline(setup, TRAIN_SIDE[kind][1], 0.0).step_s
        steps["flow"][kind] = max(TRAIN_SIDE[kind][1], flow_seconds(setup, 2))
    names = {
        "drained": "one batch at a time, drained",
        "whole": "two batches, admitted whole",
        "flow": "two batches, rows replaced one by one",
    }
    return [AsyncRun(name=names[m], plain_s=s["plain"], speculative_s=s["speculative"]) for m, s in steps.items()]


def compare_table(title: str, rows: Iterable[Compare]) -> Table:
    """Paper beside ours."""
    table = Table(title=title, title_justify="left")
    for name in ("figure", "paper", "ours", "error", "role"):
        table.add_column(name, justify="left" if name in ("figure", "role") else "right")
    for row in rows:
        table.add_row(row.name, f"{row.paper:.2f}", f"{row.ours:.2f}", f"{row.error:+.1%}", row.role)
    return table


def constants_line(found: Fit) -> str:
    """How many constants were fitted to how many numbers, and their values."""
    if not found.constants:
        return "nothing fitted"
    values = ", ".join(f"{name} {value:.3g}" for name, value in found.constants.items())
    return f"{len(found.constants)} constants fitted to {found.targets} numbers: {values}"


def paper_report() -> tuple[Group, dict[str, object]]:
    """Everything, for the terminal and as JSON."""
    runs, fits = PaperRuns(), fitted_presets()
    parts: list[Table | Text] = []
    data: dict[str, object] = {}

    def add(title: str, rows: list[Compare], note: str = "") -> None:
        parts.append(compare_table(title, rows))
        if note:
            parts.append(Text(note))
        data[title] = {"rows": [_as_dict(row) for row in rows], "note": note}

    for found in fits.values():
        worst = f"worst speedup error {found.worst_speedup():.1%}, plain {found.worst_plain():.1%}"
        add(
            f"Generation, {found.preset.name}",
            generation_rows(found),
            f"{found.preset.says}; {constants_line(found)}; {worst}",
        )
    wrong = [k for w, k in SPEEDUP if k == 5 and fits["roofline"].speedup[w, k] > SPEEDUP[w, k] * 1.5]
    parts.append(Text(f"pure roofline fails at k = 5 in {len(wrong)} of 2 workloads: it calls k = 5 better than k = 3"))
    for title, rows in held_out(runs).items():
        add(title, rows)
    parts.append(Text(SEPARATES))
    for name in ("h3", "h5"):
        add(f"Table 1, {PRESETS[name].name}", table_one(fits[name], runs))
        add(f"Tables 3-5, {PRESETS[name].name}", [*variant_rows(fits[name], runs), *ngram_rows(fits[name])])
    _add_async(parts, data, fits)
    add("235B, balanced routing and no host time", projections_235b(closed=True))
    add("235B, default engine and routing", projections_235b(closed=False))
    value, low, high = blind_round_cost()
    line = (
        f"blind round cost, 8B on H100, k = 3, nothing fitted: {value:.2f} ({low:.2f} - {high:.2f}); published {BLIND}"
    )
    parts.append(Text(line))
    data["blind"] = {"value": value, "low": low, "high": high, "published": list(BLIND)}
    parts.append(Text(ASSUMED))
    data["assumed"] = ASSUMED
    return Group(*parts), data


ASSUMED = (
    "Assumed: 2,048 rollouts of at most 8,192 tokens, 64 rows a GPU, length laws (the two means were chosen among "
    "some 30 combinations after seeing the targets), prompt 150 tokens, kernels of vLLM 0.24 for an older engine; "
    "acceptance lengths are the paper's. 235B: TP8, lengths, split and draft shape."
)


def _add_async(parts: list[Table | Text], data: dict[str, object], fits: Mapping[str, Fit]) -> None:
    rows = [
        Compare(name=f"train side, {name}, s", paper=measured, ours=ours, role="2 x synchronous")
        for name, (measured, ours) in TRAIN_SIDE.items()
    ]
    for name in ("h3", "h5"):
        runs = async_runs(fits[name])
        for run in runs:
            for kind, ours in (("plain", run.plain_s), ("speculative", run.speculative_s)):
                label = f"step, {kind}, {PRESETS[name].name}, {run.name}, s"
                rows.append(Compare(name=label, paper=ASYNC_STEP[kind], ours=ours, role="predicted"))
        spread = sorted(run.plain_s for run in runs)
        parts.append(Text(f"{PRESETS[name].name}: plain step between {spread[0]:.1f} and {spread[-1]:.1f} s (75.0)"))
    parts.append(compare_table("Asynchronous run", rows))
    data["Asynchronous run"] = {"rows": [_as_dict(row) for row in rows], "note": ""}


def _as_dict(row: Compare) -> dict[str, object]:
    return {"name": row.name, "paper": row.paper, "ours": row.ours, "error": row.error, "role": row.role}
