"""Is the drafter still in step with the policy? Acceptance by its age, and by the policy's entropy."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from leadout.report.charts import PALETTE, Picture, Rows, figure_of, picture_of

_AGE = "spec/acceptance_rate_age_"
_ENTROPY = "draft/expected_acceptance_rate_entropy_"


def age_chart(runs: Mapping[str, Rows]) -> Picture | None:
    """Mean acceptance rate against policy versions since the drafter last learnt; None where only one age is known."""
    figure, axes = figure_of(
        "policy versions since the drafter learnt (2 is 2 and 3, 4 is 4 to 7, …)", "acceptance rate"
    )
    curves = {name: mean_by_class(rows, _AGE) for name, rows in runs.items()}
    if all(len(curve) < 2 for curve in curves.values()):
        return None
    _draw(axes, curves)
    return picture_of("Acceptance by the drafter's age", figure)


def entropy_chart(runs: Mapping[str, Rows]) -> Picture | None:
    """Mean expected acceptance at the first position against the policy's entropy; None without data."""
    figure, axes = figure_of("entropy of the policy, nats (lower bound of the class)", "expected at position 1")
    curves = {name: mean_by_class(rows, _ENTROPY) for name, rows in runs.items()}
    if not any(curves.values()):
        return None
    _draw(axes, curves)
    return picture_of("Acceptance by the policy's entropy", figure)


def mean_by_class(rows: Rows, prefix: str) -> dict[float, float]:
    """Mean over steps of each metric that begins with `prefix`, by the number that ends its name, ascending."""
    found: dict[float, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix):
                found.setdefault(float(name.removeprefix(prefix)), []).append(value)
    return {number: sum(values) / len(values) for number, values in sorted(found.items())}


def _draw(axes: Axes, curves: Mapping[str, Mapping[float, float]]) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        if curve:
            places = [f"{each:g}" for each in curve]
            axes.plot(places, list(curve.values()), color=PALETTE[number % len(PALETTE)], label=name, marker="o")
    axes.set_ylim(bottom=0.0)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
