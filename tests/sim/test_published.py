"""Published inter-token, serving and step times, nothing fitted to the last two."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from leadout.sim.nemo import ROWS, Row, scenario
from leadout.sim.project import Projection, project
from leadout.sim.published import published_report
from leadout.sim.sections import Engine
from leadout.sim.validation import inter_token_points, serving_points

DATA = os.environ.get("LEADOUT_DATA")


def test_nine_inter_token_points_lie_within_twelve_percent():
    points = inter_token_points()
    errors = np.array([point.error for point in points])
    assert len(points) == 9
    assert float(np.abs(errors).max()) < 0.12
    assert abs(float(errors.mean())) < 0.05
    assert all(point.kernels is not None and point.kernels < point.predicted for point in points)


@pytest.mark.skipif(DATA is None, reason="LEADOUT_DATA is not set")
def test_serving_rows_lie_within_twenty_percent_in_the_median():
    points = serving_points(Path(str(DATA)) / "perf" / "aic_silicon_e2e.jsonl")
    errors = np.abs([point.error for point in points])
    assert len(points) > 750
    assert float(np.median(errors)) < 0.20


def row(gpu: str, gpus: int, generating: int | None = None) -> Row:
    return next(r for r in ROWS if (r.gpu, r.gpus, r.generating) == (gpu, gpus, generating))


def step(gpu: str, gpus: int, generating: int | None = None) -> tuple[float, Projection]:
    projection = project(scenario(row(gpu, gpus, generating)))
    return projection.step_s, projection


def test_the_235b_on_h100_is_predicted_and_so_is_its_scaling():
    small, large = step("H100", 128)[0], step("H100", 256)[0]
    assert small == pytest.approx(395, rel=0.20)
    assert large == pytest.approx(312, rel=0.20)
    assert large / small == pytest.approx(0.79, abs=0.10)


def test_one_off_is_faster_than_synchronous_on_256_h100():
    assert step("H100", 256, 128)[0] < step("H100", 256)[0]


def test_twice_the_gb200_gains_less_than_1_4_on_a_tail_bound_rollout():
    assert step("GB200", 64)[0] / step("GB200", 128)[0] < 1.4


def test_every_row_of_the_table_is_printed_and_nothing_is_fitted():
    _, data = published_report()
    assert {"kernels", "inter_token", "nemo"} == set(data)
    assert [item["name"] for item in data["nemo"]] == [r.name for r in ROWS]
    assert all(scenario(r).training.mfu is None and scenario(r).engine == Engine() for r in ROWS)
