from __future__ import annotations

import math

import numpy as np
import pytest

from leadout.draft_length.ragged import Endings, waiting_factor

TOKENS, VARIANCE = np.array([1.0, 1.7]), np.array([0.0, 0.21])


@pytest.mark.parametrize("rows", [2, 4, 16, 64])
@pytest.mark.parametrize("length", [24, 96])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_the_factor_is_that_of_simulated_batches(rows, length, spread):
    rng, fixed_share = np.random.default_rng(0), 0.7
    lengths_GB = np.maximum(np.round(length * (1.0 + spread * rng.normal(size=(4000, rows)))), 1)

    def seconds(rounds_GB: np.ndarray) -> float:
        each = (1.0 - fixed_share) / rows
        return float((fixed_share * rounds_GB.max(1) + each * rounds_GB.sum(1)).mean() / rounds_GB.mean())

    committed_GBR = 1 + (rng.random((4000, rows, 2 * length)) < 0.7)
    reached_GBR = committed_GBR.cumsum(2)
    drafted_GB = (reached_GBR < lengths_GB[:, :, None]).sum(2) + 1
    factor = waiting_factor(rows, fixed_share, spread, float(length), TOKENS, VARIANCE, 1.0)
    assert factor[0] == 1.0
    assert factor[1] == pytest.approx(seconds(drafted_GB) / seconds(lengths_GB), abs=0.015)


@pytest.mark.parametrize(("rows", "spread", "remaining"), [(1, 0.0, 20.0), (4, math.inf, 20.0), (4, 0.0, math.inf)])
def test_nothing_is_lost_by_one_row_or_where_waiting_does_not_matter(rows, spread, remaining):
    assert waiting_factor(rows, 0.9, spread, remaining, TOKENS, VARIANCE).tolist() == [1.0, 1.0]


def test_the_share_of_rows_that_end_at_their_limit_is_that_of_the_last_few_hundred():
    endings = Endings()
    assert endings.share_at_limit == 0.0
    for _ in range(2000):
        endings.record(4, 4)
    assert endings.share_at_limit == pytest.approx(1.0, abs=1e-3)
    for _ in range(2000):
        endings.record(4, 1)
    assert endings.share_at_limit == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_how_unequally_rows_were_drafted_is_what_simulated_rows_say(spread):
    """Rows whose own rate of acceptance differs have more unequal rounds than independent drafts would."""
    rng, rounds, rate = np.random.default_rng(0), 20, 0.7
    mean, variance = np.array([0.0, rate]), np.array([0.0, rate * (1 - rate)])
    endings, found = Endings(), []
    assert endings.unequal(1.0) == pytest.approx(1.5)
    for row in range(2000):
        own = rate + spread * (1 if row % 2 else -1)
        accepted = (rng.random(rounds) < own).astype(np.int64)
        endings.record_row(np.ones(rounds, np.int64), accepted, mean, variance)
        found.append(endings.unequal(1.0))
    expected = math.sqrt(1 + (rounds - 1) * spread**2 / variance[1])
    assert np.mean(found[200:]) == pytest.approx(expected, rel=0.08)
    assert endings.unequal(0.4) == max(1.5, endings.unequal(1.0))


def test_rows_that_hardly_drafted_say_nothing_of_how_unequal_they_are():
    endings, few = Endings(), np.array([1, 0, 0, 1, 1, 0])
    endings.record_row(few, few, np.array([0.0, 0.2]), np.array([0.0, 0.16]))
    assert endings.unequal(1.0) == pytest.approx(1.5)


def test_endings_go_on_from_their_state():
    one, other = Endings(), Endings()
    one.record(8, 3)
    one.record_row(np.ones(9, np.int64), np.ones(9, np.int64), np.array([0.0, 0.5]), np.array([0.0, 0.25]))
    other.restore(one.state())
    assert other.unequal(1.0) == one.unequal(1.0) > 1.5
    assert other.share_at_limit == one.share_at_limit == pytest.approx(3 / (8 + 4 * math.exp(-8 / 256)))
