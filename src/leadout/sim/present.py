"""A projection as JSON, as a table for the terminal, and as the sentences around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from leadout.records import Stage
from leadout.sim.kernel_tables import Served
from leadout.sim.project import Projection
from leadout.sim.ranges import STAGE_ORDER, Range, verdict
from leadout.sim.scenario import Scenario

TABLE_NOTE = (
    "kernel times: aiconfigurator-core 0.12.0, vLLM 0.24.0 (A100: 0.14.0), NCCL 2.29.2; `fp8` rows stand for block-FP8"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A scenario, its plain twin, and how sure both are."""

    projection: Projection
    plain: Projection
    ranges: Mapping[str, Range]


def source_note(scenario: Scenario) -> str:
    """Where the seconds of rounds come from."""
    return TABLE_NOTE if scenario.profile is None else f"seconds of rounds and stages: profile {scenario.profile}"


def served_shares(projection: Projection) -> dict[Served, float]:
    """Share of one round's seconds that each path served."""
    total = sum(part.seconds for part in projection.breakdown)
    shares: dict[Served, float] = {}
    for part in projection.breakdown:
        shares[part.served] = shares.get(part.served, 0.0) + part.seconds / total
    return shares


def cost_lines(outcome: Outcome) -> list[str]:
    """Price of 100 steps, and where speculation breaks even."""
    projection, plain = outcome.projection, outcome.plain
    scenario = projection.scenario
    lines = []
    if scenario.price_per_gpu_hour is not None:
        hourly = scenario.price_per_gpu_hour * scenario.gpus
        cost, before = (100 * p.step_s / 3600 * hourly for p in (projection, plain))
        if scenario.speculation is None:
            lines.append(f"100 steps: {cost:,.2f}")
        else:
            lines.append(f"100 steps: {cost:,.2f} with speculation, {before:,.2f} plain, saved {before - cost:,.2f}")
    if scenario.speculation is not None:
        needed = outcome.ranges["round_cost"].value
        lines.append(
            f"break-even: acceptance length {needed:.2f} (now {projection.acceptance_length:.2f}); "
            f"a round costs {needed:.2f} plain steps"
        )
    return lines


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, JSON-serialisable."""
    projection, plain = outcome.projection, outcome.plain
    rows, context, k = projection.breakdown_at
    times, live = projection.live_rows
    price = projection.scenario.price_per_gpu_hour
    out: dict[str, Any] = {
        "scenario": projection.scenario.model_dump(mode="json"),
        "seconds": {stage.value: projection.seconds[stage] for stage in STAGE_ORDER},
        "exposed": {stage.value: projection.exposed[stage] for stage in STAGE_ORDER},
        "step_s": projection.step_s,
        "plain": {
            "seconds": {stage.value: plain.seconds[stage] for stage in STAGE_ORDER},
            "exposed": {stage.value: plain.exposed[stage] for stage in STAGE_ORDER},
            "step_s": plain.step_s,
        },
        "ranges": {name: asdict(item) for name, item in outcome.ranges.items()},
        "verdict": verdict(outcome.ranges["step_speedup"]) if projection.scenario.speculation else None,
        "acceptance_length": projection.acceptance_length,
        "mean_k": projection.mean_k,
        "round_seconds": projection.round_seconds,
        "tokens": projection.tokens,
        "tokens_per_gpu_second": projection.tokens_per_gpu_second,
        "mean_length": projection.mean_length,
        "max_length": projection.max_length,
        "mean_lag": projection.mean_lag,
        "prefill_s": projection.prefill_s,
        "recomputed_tokens": projection.recomputed_tokens,
        "busy_gpu_s": projection.busy_gpu_s,
        "idle_gpu_s": projection.idle_gpu_s,
        "memory": asdict(projection.memory) if projection.scenario.profile is None else None,
        "live_rows": {"seconds": times.tolist(), "rows": live.tolist()},
        "round": {
            "rows": rows,
            "mean_context": context,
            "k": k,
            "operators": [
                {"name": part.name, "seconds": part.seconds, "served": part.served.value}
                for part in projection.breakdown
            ],
        },
        "served": {path.value: share for path, share in served_shares(projection).items()},
        "sources": source_note(projection.scenario),
    }
    if price is not None:
        out["cost_per_100_steps"] = 100 * projection.step_s / 3600 * price * projection.scenario.gpus
    return out


def stage_table(outcome: Outcome) -> Table:
    """Seconds per stage, exposed seconds, plain beside it."""
    projection, plain = outcome.projection, outcome.plain
    speculative = projection.scenario.speculation is not None
    table = Table(title=projection.scenario.name, title_justify="left")
    table.add_column("stage")
    for name in ("seconds", "exposed", *(("plain seconds", "plain exposed") if speculative else ())):
        table.add_column(name, justify="right")
    for stage in STAGE_ORDER:
        cells = [f"{projection.seconds[stage]:.2f}", f"{projection.exposed[stage]:.2f}"]
        if speculative:
            cells += [f"{plain.seconds[stage]:.2f}", f"{plain.exposed[stage]:.2f}"]
        table.add_row(stage.value, *cells)
    cells = ["", f"{projection.step_s:.2f}", *(("", f"{plain.step_s:.2f}") if speculative else ())]
    table.add_section()
    table.add_row("step", *cells, style="bold")
    return table


def range_table(outcome: Outcome) -> Table:
    """Headlines with their ranges and what widens them."""
    table = Table(title="5-95 % range", title_justify="left")
    for name, justify in (("headline", "left"), ("value", "right"), ("range", "right"), ("widened most by", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    speculative = outcome.projection.scenario.speculation is not None
    for name, item in outcome.ranges.items():
        if not speculative and name not in ("step_s", "rollout_s"):
            continue
        unit = " s" if name.endswith("_s") else "x" if name.endswith("speedup") else ""
        widest = ", ".join(f"{field} ({spread:.2g}{unit})" for field, spread in item.widest)
        table.add_row(name, f"{item.value:.2f}{unit}", f"{item.low:.2f} - {item.high:.2f}{unit}", widest)
    return table


def round_table(projection: Projection) -> Table:
    """One round by operator."""
    rows, context, k = projection.breakdown_at
    table = Table(
        title=f"one round: {rows} rows, mean context {context:.0f}, k = {k}", title_justify="left", min_width=64
    )
    for name in ("operator", "ms", "served by"):
        table.add_column(name, justify="right" if name == "ms" else "left")
    for part in projection.breakdown:
        table.add_row(part.name, f"{part.seconds * 1e3:.3f}", part.served.value)
    return table


def _memory_lines(projection: Projection) -> list[str]:
    """The split of a GPU's memory; nothing for a calibrated machine, which is not checked for memory."""
    memory = projection.memory
    if projection.scenario.profile is not None:
        return []
    return [
        f"memory of a generating GPU: weights {memory.weights_bytes / 1e9:.1f} GB, drafter "
        f"{memory.drafter_bytes / 1e9:.1f}, learner {memory.learner_bytes / 1e9:.1f}, cache "
        f"{memory.cache_bytes / 1e9:.1f} GB = {memory.cache_tokens:,.0f} tokens"
    ]


def render(outcome: Outcome) -> Group:
    """The whole answer for a terminal."""
    projection = outcome.projection
    lines = [
        f"rollouts: {projection.tokens:,.0f} tokens, mean {projection.mean_length:.0f}, longest "
        f"{projection.max_length:.0f}; acceptance length {projection.acceptance_length:.2f}, mean k "
        f"{projection.mean_k:.2f}; {projection.tokens_per_gpu_second:,.0f} tokens/s/GPU over the step",
        *_memory_lines(projection),
        f"GPU-seconds: {projection.busy_gpu_s:,.0f} busy, {projection.idle_gpu_s:,.0f} idle",
        *cost_lines(outcome),
    ]
    if projection.scenario.speculation is not None:
        lines.append(f"speculation against plain, whole step: {verdict(outcome.ranges['step_speedup'])}")
    if projection.recomputed_tokens:
        lines.append(f"preemption: {projection.recomputed_tokens:,.0f} tokens prefilled again a step")
    shares = ", ".join(f"{path.value} {share:.0%}" for path, share in served_shares(projection).items())
    lines += [f"round served by: {shares}", source_note(projection.scenario)]
    return Group(stage_table(outcome), range_table(outcome), round_table(projection), *(Text(line) for line in lines))


def exposed_order(projection: Projection) -> list[tuple[Stage, float]]:
    """Stages by what they add to the step."""
    return sorted(projection.exposed.items(), key=lambda pair: -pair[1])
