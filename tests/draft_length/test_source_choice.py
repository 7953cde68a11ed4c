from __future__ import annotations

import numpy as np

from leadout.draft_length.source_choice import SourceChoice


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def teach(choice: SourceChoice, *, looked_up: bool, matched: int, accepted: int, rounds: int = 50) -> None:
    for _ in range(rounds):
        choice.record(np.array([looked_up]), ints(matched), ints(3), ints(accepted))


def share_of_lookups(choice: SourceChoice, matched: int, rounds: int = 240) -> float:
    return float(np.mean([choice.choose(ints(matched), ints(3), ints(3))[0][0] for _ in range(rounds)]))


def test_rows_without_a_match_ask_the_model_and_idle_rows_nobody():
    looks_up, asks = SourceChoice(5).choose(ints(4, 0, 0), ints(3, 0, 0), ints(3, 3, 0))
    assert looks_up.tolist() == [True, False, False]
    assert asks.tolist() == [False, True, False]


def test_the_source_that_is_accepted_more_often_is_taken_with_rare_probes_of_the_other():
    choice = SourceChoice(5)
    teach(choice, looked_up=True, matched=1, accepted=0)
    teach(choice, looked_up=False, matched=1, accepted=2)
    teach(choice, looked_up=True, matched=8, accepted=3)
    teach(choice, looked_up=False, matched=8, accepted=1)
    assert 0.0 < share_of_lookups(choice, 1) < 0.1
    assert 0.9 < share_of_lookups(choice, 8) < 1.0


def test_a_short_lookup_is_weighed_by_what_it_can_earn():
    choice = SourceChoice(5)
    teach(choice, looked_up=True, matched=8, accepted=3)
    teach(choice, looked_up=False, matched=8, accepted=3)
    for _ in range(8):
        choice.choose(ints(8), ints(3), ints(3))
    looks_up, asks = choice.choose(ints(8), ints(1), ints(3))
    assert (looks_up.tolist(), asks.tolist()) == ([False], [True])


def test_a_model_that_costs_more_than_it_earns_is_left_out_where_others_look_up():
    choice = SourceChoice(5, clock=lambda: 0.0)
    teach(choice, looked_up=False, matched=0, accepted=1)
    choice.record_seconds(2, 10.0, 1.0)
    looks_up, asks = choice.choose(ints(9, 0), ints(3, 0), ints(3, 3))
    assert (looks_up.tolist(), asks.tolist()) == ([True, False], [False, False])
    cheap = SourceChoice(5, clock=lambda: 0.0)
    teach(cheap, looked_up=False, matched=0, accepted=1)
    cheap.record_seconds(2, 0.01, 1.0)
    assert cheap.choose(ints(9, 0), ints(3, 0), ints(3, 3))[1].tolist() == [False, True]


def test_without_a_clock_seconds_are_not_read():
    assert SourceChoice(5).now() is None
