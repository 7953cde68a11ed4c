"""The reference paper's numbers: fitted, held out, failing on purpose, blind."""

from __future__ import annotations

import pytest

from leadout.sim.paper import PRESETS, SPEEDUP, Fit, PaperRuns, fit
from leadout.sim.paper_report import ASYNC_STEP, TRAIN_SIDE, async_runs, constants_line, generation_rows
from leadout.sim.paper_scale import BLIND, blind_round_cost


@pytest.fixture(scope="module")
def runs() -> PaperRuns:
    return PaperRuns()


@pytest.fixture(scope="module")
def fits(runs: PaperRuns) -> dict[str, Fit]:
    return {name: fit(PRESETS[name], runs) for name in ("h3", "h5")}


@pytest.mark.parametrize("name", ["h3", "h5"])
def test_one_set_of_engine_constants_explains_both_workloads(fits, name):
    assert fits[name].worst_speedup() < 0.10
    assert fits[name].worst_plain() < 0.15
    assert constants_line(fits[name]).startswith("5 constants fitted to 8 numbers")


def test_the_pure_roofline_fails_at_five_drafts():
    found = fit(PRESETS["roofline"], PaperRuns(roofline=True))
    for workload in ("Think", "Zero"):
        assert found.speedup[workload, 5] > 1.5 * SPEEDUP[workload, 5]
        assert found.speedup[workload, 5] > found.speedup[workload, 3]
    assert {row.role for row in generation_rows(found)} == {"predicted"}


@pytest.mark.parametrize(("name", "bound"), [("h3", 0.15), ("h5", 0.20)])
def test_five_drafts_are_predicted_from_three_and_seven(runs, name, bound):
    found = fit(PRESETS[name], runs, [cell for cell in SPEEDUP if cell[1] != 5])
    for workload in ("Think", "Zero"):
        assert found.speedup[workload, 5] == pytest.approx(SPEEDUP[workload, 5], rel=bound)


def test_the_thinking_runs_are_predicted_from_the_base_models(runs):
    found = fit(PRESETS["h3"], runs, [cell for cell in SPEEDUP if cell[0] == "Zero"])
    for k in (3, 5, 7):
        assert found.speedup["Think", k] == pytest.approx(SPEEDUP["Think", k], rel=0.20)


def test_the_asynchronous_run_lies_within_its_range_of_concurrency(fits):
    for measured, ours in TRAIN_SIDE.values():
        assert ours == pytest.approx(measured, rel=0.06)
    drained, _, flow = async_runs(fits["h3"])
    assert flow.plain_s <= ASYNC_STEP["plain"] <= drained.plain_s
    assert flow.speculative_s == pytest.approx(ASYNC_STEP["speculative"], rel=0.10)


def test_the_blind_round_cost_on_h100_holds_both_published_ones():
    value, low, high = blind_round_cost()
    assert low <= min(BLIND) <= value <= max(BLIND) <= high
