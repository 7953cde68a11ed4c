from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.draft_length.acceptance import AcceptanceStats


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_rates_are_conditional_on_the_position_being_reached():
    stats = AcceptanceStats(3, memory=1e12)
    for _ in range(10_000):
        stats.record(counts(3, 3, 3, 3), counts(3, 1, 1, 0))
    np.testing.assert_allclose(stats.rates(), [3 / 4, 1 / 3, 1.0], atol=1e-3)


def test_rows_that_drafted_less_count_only_where_they_drafted():
    stats = AcceptanceStats(3, memory=1e12)
    for _ in range(10_000):
        stats.record(counts(1, 2, 0), counts(1, 2, 0))
    np.testing.assert_allclose(stats.rates()[:2], [1.0, 1.0], atol=1e-3)
    assert stats.num_asked == pytest.approx(30_000)


def test_expected_tokens_of_a_round_are_one_and_the_chained_acceptances():
    stats = AcceptanceStats(3, memory=1e12)
    for _ in range(10_000):
        stats.record(counts(3, 3, 3, 3), counts(3, 1, 1, 0))
    np.testing.assert_allclose(stats.expected_committed(), [1.0, 1.75, 2.0, 2.25], atol=1e-3)


def test_before_anything_is_seen_a_low_rate_is_assumed():
    np.testing.assert_allclose(AcceptanceStats(3).rates(), [0.3, 0.3, 0.3])


def test_positions_never_seen_lean_on_the_one_before():
    stats = AcceptanceStats(3, memory=1e12)
    for _ in range(1000):
        stats.record(counts(1), counts(1))
    first, second, third = stats.rates()
    assert first > 0.99
    assert second == third == pytest.approx(first)


def test_old_rounds_are_forgotten_at_the_rate_of_the_memory():
    stats = AcceptanceStats(1, memory=100.0)
    for _ in range(2000):
        stats.record(counts(1), counts(1))
    for _ in range(100):
        stats.record(counts(1), counts(0))
    assert stats.rates()[0] == pytest.approx(np.exp(-1), abs=0.02)


def test_rows_without_drafts_lower_coverage_and_leave_acceptance_alone():
    stats = AcceptanceStats(2, memory=1e12)
    stats.record(counts(2, 2, 2, 2), counts(2, 1, 2, 0))
    before, covered = stats.rates(), stats.coverage
    stats.record(counts(0, 0, 0, 0), counts(0, 0, 0, 0), 2)
    np.testing.assert_array_equal(stats.rates(), before)
    assert (covered, stats.coverage) == (1.0, pytest.approx(8 / 12))


def test_expected_drafts_count_rows_that_found_fewer_than_were_wanted():
    stats = AcceptanceStats(3, memory=1e12)
    assert stats.expected_drafts().tolist() == [0.0, 1.0, 2.0, 3.0]
    stats.record(counts(1, 1, 3, 3), counts(0, 0, 0, 0), 3)
    np.testing.assert_allclose(stats.expected_drafts(), [0.0, 1.0, 1.75, 2.5])


def test_the_variance_of_a_round_is_that_of_what_it_commits():
    stats = AcceptanceStats(3, memory=1e12)
    for _ in range(10_000):
        stats.record(counts(3, 3, 3, 3, 0), counts(3, 1, 1, 0, 0), 3)
    wanted = [0.0, *(np.var(np.minimum([3, 1, 1, 0, 0], k)) for k in (1, 2, 3))]
    np.testing.assert_allclose(stats.committed_variance(), wanted, atol=1e-3)


def test_state_survives_json():
    stats, other = AcceptanceStats(3), AcceptanceStats(3)
    stats.record(counts(3, 2), counts(1, 2))
    other.load_state_dict(json.loads(json.dumps(stats.state_dict())))
    assert other.rates().tolist() == stats.rates().tolist()


def test_hope_lifts_rates_of_few_trials_more_than_rates_of_many():
    few, many = AcceptanceStats(1), AcceptanceStats(1)
    few.record(np.array([1, 1]), np.array([1, 0]))
    for _ in range(200):
        many.record(np.array([1, 1]), np.array([1, 0]))
    assert few.expected_committed()[1] == pytest.approx(1.0 + (1 + 4 * 0.3) / 6)
    assert few.expected_committed(1.0)[1] - few.expected_committed()[1] == pytest.approx(0.1967, abs=1e-4)
    assert many.expected_committed(1.0)[1] - many.expected_committed()[1] == pytest.approx(0.0265, abs=2e-3)


def test_what_was_seen_long_ago_counts_for_few_row_rounds_and_says_the_same():
    stats = AcceptanceStats(2)
    stats.record(np.full(1000, 2), np.repeat([0, 1], 500))
    before = stats.rates()[0]
    stats.limit(50.0)
    assert stats.num_asked == pytest.approx(50.0)
    assert stats.rates()[0] == pytest.approx(before, abs=0.03)
    stats.limit(80.0)
    assert stats.num_asked == pytest.approx(50.0), "never for more than it did"
