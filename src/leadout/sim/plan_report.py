"""A recommendation as JSON and for the terminal: layouts tried, the winner, the runner-up, how sure the choice is."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from leadout.sim.plan import Candidate, Plan
from leadout.sim.ranges import NO_DIFFERENCE


def conclusion(found: Plan) -> str:
    """How sure the choice is."""
    middle, low, high = found.ratio
    if low <= 1.0 <= high:
        return f"runner-up against best: {middle:.2f}x the step ({low:.2f} - {high:.2f}): {NO_DIFFERENCE}"
    return f"runner-up against best: {middle:.2f}x the step ({low:.2f} - {high:.2f})"


def render_plan(found: Plan) -> Group:
    """The recommendation for a terminal."""
    table = Table(title="layouts tried, fastest first", title_justify="left")
    for name in ("step s", "rollout s", "tokens/s/GPU", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for item in found.tried[:10]:
        table.add_row(
            f"{item.step_s:.1f}",
            f"{item.projection.rollout_s:.1f}",
            f"{item.projection.tokens_per_gpu_second:,.0f}",
            item.label,
        )
    lines = [
        f"recommended: {found.best.label}: {found.best.step_s:.1f} s a step",
        f"runner-up:   {found.runner_up.label}: {found.runner_up.step_s:.1f} s a step",
        conclusion(found),
        *(f"- {reason}" for reason in found.reasons),
        f"{len(found.tried)} layouts projected, {found.refused} refused (memory, or do not divide the model)",
    ]
    return Group(table, *(Text(line) for line in lines))


def plan_json(found: Plan) -> dict[str, object]:
    """The recommendation, JSON-serialisable."""

    def one(item: Candidate) -> dict[str, object]:
        return {
            "label": item.label,
            "step_s": item.step_s,
            "rollout_s": item.projection.rollout_s,
            "scenario": item.scenario.model_dump(mode="json", exclude_defaults=True),
        }

    middle, low, high = found.ratio
    return {
        "recommended": one(found.best),
        "runner_up": one(found.runner_up),
        "ratio": {"middle": middle, "low": low, "high": high},
        "conclusion": conclusion(found),
        "reasons": list(found.reasons),
        "tried": [one(item) for item in found.tried],
        "refused": found.refused,
    }
