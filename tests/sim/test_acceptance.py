"""Acceptance laws in every form in which they are logged."""

from __future__ import annotations

import pytest

from leadout.errors import ConfigError
from leadout.sim.acceptance import AcceptanceLaw, from_conditional, from_cumulative, from_mean_length


@pytest.mark.parametrize(
    ("rate", "decay", "lengths"),
    [(0.882, 0.988, (3.32, 4.35, 5.06)), (0.768, 0.972, (2.77, 3.23, 3.48))],
)
def test_two_numbers_give_the_published_lengths(rate, decay, lengths):
    law = AcceptanceLaw(rates=(rate,), decay=decay)
    for k, length in zip((3, 5, 7), lengths, strict=True):
        assert law.length(k) == pytest.approx(length, abs=0.025)


def test_cumulative_rates_add_up_to_the_length():
    law = from_cumulative([0.886, 0.770, 0.663])
    assert law.length(3) == pytest.approx(3.319, abs=1e-9)
    assert law.conditional(2)[1] == pytest.approx(0.770 / 0.886)


def test_increasing_cumulative_rates_are_refused():
    with pytest.raises(ConfigError, match="must not increase"):
        from_cumulative([0.7, 0.8])


def test_a_mean_length_gives_the_constant_rate_that_makes_it():
    assert from_mean_length(2.77, 3).length(3) == pytest.approx(2.77, abs=1e-12)


def test_an_impossible_mean_length_is_refused():
    with pytest.raises(ConfigError, match=r"\[1, k \+ 1\]"):
        from_mean_length(4.5, 3)


def test_rates_fall_with_the_age_of_the_drafter():
    law = from_conditional([0.8], drift=0.1)
    assert law.conditional(2, age=2.0).tolist() == pytest.approx([0.648, 0.648])
    assert law.length(0) == 1.0
