"""The search for placement, draft length and lag."""

from __future__ import annotations

import pytest

from leadout.errors import CapacityError
from leadout.sim.plan import conclusion, plan, plan_json
from leadout.sim.ranges import NO_DIFFERENCE
from tests.sim.scenarios import small


def test_the_recommendation_comes_with_a_runner_up_and_reasons():
    found = plan(small(), max_lag=1)
    assert found.best.step_s <= 1.3 * found.tried[0].step_s
    assert found.runner_up.label != found.best.label
    assert len(found.reasons) >= 3
    low, high = found.ratio[1], found.ratio[2]
    assert (NO_DIFFERENCE in conclusion(found)) == (low <= 1.0 <= high)
    assert plan_json(found)["recommended"]


def test_a_difference_the_model_cannot_see_goes_to_the_simpler_choice():
    found = plan(small(), max_lag=1)
    if NO_DIFFERENCE in conclusion(found):
        assert found.best.complexity <= found.runner_up.complexity


def test_nothing_that_fits_is_an_error():
    with pytest.raises(CapacityError, match="no layout of Qwen3-235B-A22B fits 8 GPUs"):
        plan(small("model=Qwen3-235B-A22B"))
