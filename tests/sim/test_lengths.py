"""Length laws: mean after the cut, tails, files, common random numbers."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.errors import ConfigError, DataError
from leadout.sim.lengths import LengthLaw, cut_mean, expected_max, read_lengths


def test_the_mean_after_the_cut_is_the_one_asked_for():
    law = LengthLaw(mean=5698, cv=0.55, cap=8192)
    drawn = law.draw(4000, 8, seed=1)
    assert drawn.mean() == pytest.approx(5698, rel=0.01)
    assert drawn.max() == 8192


def test_quantiles_follow_a_measured_reasoning_model():
    law = LengthLaw(mean=8113, cv=0.52, cap=32768)
    p50, p90 = law.quantile(np.array([0.5, 0.9]))
    assert p50 == pytest.approx(7697, rel=0.07)
    assert p90 == pytest.approx(13582, rel=0.05)


def test_rollouts_of_one_prompt_are_as_alike_as_asked():
    law = LengthLaw(mean=1000, cv=0.8, cap=10**9, group_correlation=0.6)
    logs = np.log(law.draw(4000, 2, seed=2))
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.6, abs=0.03)


def test_the_longest_of_many_matches_the_corrected_quantile():
    law = LengthLaw(mean=1000.0, cv=0.55, cap=10**9)
    assert expected_max(law, 512) / 1000.0 == pytest.approx(4.16, abs=0.05)


def test_draws_depend_on_the_seed_only():
    law = LengthLaw(mean=500, cv=1.0, cap=4096)
    assert np.array_equal(law.draw(4, 4, 7), law.draw(4, 4, 7))
    assert not np.array_equal(law.draw(4, 4, 7), law.draw(4, 4, 8))


def test_lengths_are_read_from_rollout_rows(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"token_ids": [1, 2, 3]}\n{"completion_length": 9}\n12\n')
    assert read_lengths(path).tolist() == [3.0, 9.0, 12.0]


def test_a_row_without_a_length_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        read_lengths(path)


@pytest.mark.parametrize("bad", [{"mean": 9000}, {"cv": -0.1}, {"cap": 0}, {"group_correlation": 1.5}])
def test_inconsistent_laws_are_refused(bad):
    with pytest.raises(ConfigError, match="lengths"):
        LengthLaw(**{"mean": 4000.0, "cv": 0.5, "cap": 8192, **bad})


@pytest.mark.parametrize(("mean", "cv", "cap"), [(4000.0, 10.0, 8192), (8191.0, 0.55, 8192), (10.0, 6.0, 10**6)])
def test_the_mean_is_solved_for_wide_laws_and_near_the_cap(mean, cv, cap):
    law = LengthLaw(mean=mean, cv=cv, cap=cap)
    assert cut_mean(law.mu, law.sigma, cap) == pytest.approx(mean, rel=1e-9)


def test_rollouts_of_one_length_may_be_as_long_as_the_cap():
    assert LengthLaw(mean=4096, cv=0.0, cap=4096).draw(2, 2, seed=0).tolist() == [[4096.0, 4096.0], [4096.0, 4096.0]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"mean": 8192.0}, r"must be < cap = 8192 where cv > 0, got 8192.0 with cv 0.5"),
        ({"cv": 55.0}, r"lengths.cv must be <= 10 \(a share of the mean, not percent\), got 55.0"),
        ({"cv": 1e200}, r"lengths.cv must be <= 10"),
        ({"cv": float("nan")}, r"cv >= 0"),
    ],
)
def test_a_law_that_cannot_have_its_mean_is_refused_in_one_line(bad, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LengthLaw(**{"mean": 4000.0, "cv": 0.5, "cap": 8192, **bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row", ['{"length": -5}', '{"length": NaN}', '{"length": true}', "Infinity", "0", '"a\\nb"', '{"token_ids": []}']
)
def test_a_length_that_is_none_is_one_line_with_the_file(tmp_path, row):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"length": 7}}\n{row}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: expected a positive number") as caught:
        read_lengths(path)
    assert "\n" not in str(caught.value)


def test_a_file_of_lengths_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bad\.jsonl is not a UTF-8 text file"):
        read_lengths(path)
