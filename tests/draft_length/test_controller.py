from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.draft_length.controller import FixedLength, GoodputLength, RoundOutcome
from leadout.draft_length.costs import CostProfile
from leadout.draft_length.load import Load
from tests.draft_length.machine import Machine, settle


@pytest.mark.parametrize("k", [0, 3])
def test_a_fixed_length_stays_whatever_happens(k):
    length = FixedLength(k)
    assert Machine(0.0).run(length, 4, 20) == [k] * 20
    assert length.state_dict() == {}


def test_the_length_with_the_best_goodput_is_found():
    machine = Machine(0.8)
    chosen = settle(machine, GoodputLength(6), 2)
    best = max(machine.goodput(2, k) for k in range(7))
    good = [k for k in chosen if machine.goodput(2, k) > 0.95 * best]
    assert len(good) >= 196, "all but the plain steps that keep the clock fresh"
    assert min(good) >= 3


@pytest.mark.parametrize(
    "machine",
    [Machine(0.02), Machine(0.4, per_token=2.0, step=1.0), Machine(0.5, draft=8.0)],
    ids=["never accepted", "costly positions", "costly drafts"],
)
def test_speculation_that_does_not_pay_stays_off_but_for_probes(machine):
    chosen = settle(machine, GoodputLength(5), 8)
    assert np.count_nonzero(chosen) <= 0.02 * len(chosen)


def test_full_batches_go_without_and_the_tail_of_few_rows_drafts():
    machine = Machine(0.6, step=10.0, per_token=3.0, draft=0.2)
    length = GoodputLength(5)
    for _ in range(20):
        machine.run(length, 32, 100)
        machine.run(length, 1, 40)
    assert np.count_nonzero(machine.run(length, 32, 100)) <= 2
    tail = machine.run(length, 1, 100)
    best = max(machine.goodput(1, k) for k in range(6))
    assert np.mean([machine.goodput(1, k) for k in tail]) > 0.96 * best


@pytest.mark.parametrize("accept", [0.0, 0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("per_token", [0.02, 0.5, 3.0])
def test_learning_included_it_is_hardly_slower_than_the_best_fixed_length(accept, rows, per_token):
    machine, length = Machine(accept, per_token=per_token), GoodputLength(5)
    machine.run(length, rows, 1500)
    best = max(machine.goodput(rows, k) for k in range(6))
    assert machine.tokens / machine.clock > 0.93 * best, "a gain below 7 % may be left alone"
    assert machine.tokens / machine.clock > 0.98 * machine.goodput(rows, 0)


def test_nothing_is_drafted_before_a_plain_step_was_measured():
    assert GoodputLength(5).choose(4).num_drafts == 0


def test_speculation_goes_off_when_the_drafter_has_become_useless():
    machine, length = Machine(0.85), GoodputLength(5)
    assert np.mean(settle(machine, length, 4)) > 2
    machine.accept = 0.0
    assert np.mean(np.array(settle(machine, length, 4)) > 0) < 0.1


def test_a_gain_below_five_percent_does_not_start_drafting():
    length = GoodputLength(1, CostProfile({1: 1.0, 2: 1.25}, {1: 1e-6}, frozen=True))
    length._probing.rounds_off = 0
    gain = length.forecast(1, Load())[1] / length.forecast(1, Load())[0]
    assert 1.03 < gain < 1.02 * 1.03
    assert length.choose(1).num_drafts == 0
    cheaper = GoodputLength(1, CostProfile({1: 1.0, 2: 1.2}, {1: 1e-6}, frozen=True))
    cheaper._probing.rounds_off = 0
    assert cheaper.choose(1).num_drafts == 1


def ended(rows: int, at_limit: int) -> RoundOutcome:
    """A plain step that ends all rows."""
    nothing = np.zeros(rows, np.int64)
    return RoundOutcome(
        num_drafts=0,
        num_asked=0,
        drafted_B=nothing,
        accepted_B=nothing,
        draft_seconds=0.0,
        verify_seconds=1.0,
        ended=rows,
        ended_at_limit=at_limit,
    )


def test_where_rows_of_equal_length_wait_for_the_slowest_a_small_gain_is_left_alone():
    costs = CostProfile({1: 1.0, 4: 1.05, 8: 1.17}, {1: 1e-6, 4: 1e-6}, frozen=True)

    def chosen(at_limit: int, spread: float) -> int:
        length = GoodputLength(1, costs)
        length._probing.rounds_off = 0
        for _ in range(200):
            length.record(ended(4, at_limit))
            length.acceptance.record(np.array([1, 1, 1, 1]), np.array([1, 0, 0, 0]), 1)
        return length.choose(4, lambda: Load(remaining=32.0, spread=spread)).num_drafts

    assert chosen(at_limit=4, spread=0.0) == 0
    assert chosen(at_limit=4, spread=1.0) == 1, "lengths differ anyway"
    assert chosen(at_limit=0, spread=0.0) == 1, "rows end anywhere, by themselves"
    assert chosen(at_limit=4, spread=np.inf) == 1, "others wait for their places"


def test_catching_up_is_charged_over_the_rounds_that_remain():
    costs = CostProfile({1: 1.0, 100: 1.0}, {1: 0.001}, frozen=True)
    length = GoodputLength(1, costs)
    length._probing.rounds_off = 0
    assert length.choose(1, lambda: Load(backlog=100, remaining=1.0)).num_drafts == 1
    forecast = length.forecast(1, Load(backlog=100, remaining=13.0))
    assert forecast[1] == pytest.approx(1.3 / (1.001 + 0.1 / 10))
    assert forecast[0] == pytest.approx(1.0)


def test_state_survives_json_and_goes_on_with_the_same_choices():
    costs = CostProfile({1: 10.0, 64: 16.0}, {1: 0.5}, frozen=True)
    machine, length = Machine(0.5), GoodputLength(5, costs)
    machine.run(length, 2, 137)
    other = GoodputLength(5, costs)
    other.load_state_dict(json.loads(json.dumps(length.state_dict())))
    twin = Machine(0.5)
    twin.rng.bit_generator.state = machine.rng.bit_generator.state
    assert machine.run(length, 2, 300) == twin.run(other, 2, 300)
    assert other.state_dict() == length.state_dict()


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_hardly_lose_stay_off_though_the_machine_is_now_fast_now_slow(seed):
    machine = Machine(0.77, step=4.0, per_token=1.8)
    assert machine.goodput(16, 1) < 0.96 * machine.goodput(16, 0)
    machine.minutes, machine.wander = np.random.default_rng(seed), 0.05
    length = GoodputLength(5)
    for _ in range(30):
        machine.run(length, 16, 30)
        machine.run(length, 5, 10)
    machine.tokens, machine.clock, seconds = 0, 0.0, 0.0
    for _ in range(30):
        for rows, rounds in ((16, 30), (5, 10)):
            before = machine.tokens
            machine.run(length, rows, rounds)
            seconds += (machine.tokens - before) / machine.goodput(rows, 0)
    assert seconds / machine.clock > 0.98


@pytest.mark.parametrize("dearer", [3.0, 10.0])
def test_a_first_round_with_drafts_that_took_ages_is_not_believed_for_long(dearer):
    machine, length = Machine(0.85), GoodputLength(5)
    for _ in range(30):
        length.record(plain_step(machine))
    length.record(dear_round(machine, 3, dearer=dearer))
    machine.run(length, 4, 1000)
    assert np.mean(machine.run(length, 4, 200)) > 2


def test_a_length_that_came_out_dear_once_is_tried_again():
    machine = Machine(0.85)
    length = GoodputLength(5)
    length.record(plain_step(machine))
    for _ in range(12):
        length.record(dear_round(machine, 3))
        length.record(dear_round(machine, 5))
    for _ in range(40):
        length.record(dear_round(machine, 1, dearer=1.0))
    machine.run(length, 4, 3000)
    assert np.mean(machine.run(length, 4, 200)) > 2


def plain_step(machine: Machine) -> RoundOutcome:
    return dear_round(machine, 0, dearer=1.0)


def dear_round(machine: Machine, k: int, dearer: float = 1.7) -> RoundOutcome:
    """A round of four rows, all drafts accepted, whose pass took longer than it should."""
    return RoundOutcome(
        num_drafts=k,
        num_asked=4 if k else 0,
        drafted_B=np.full(4, k),
        accepted_B=np.full(4, k),
        draft_seconds=k * machine.draft,
        verify_seconds=dearer * (machine.step + machine.per_token * 4 * (1 + k)),
    )


@pytest.mark.parametrize("slow", [14.0, 18.0, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_length_first_measured_in_a_slow_moment_is_found_all_the_same(slow, seed):
    machine, length = Machine(0.77, per_token=0.3), GoodputLength(4)
    machine.rng = np.random.default_rng(seed)
    machine.run(length, 1, 8)
    for _ in range(40):
        # Only longer drafts meet the slow moment.
        machine.step = slow if length._current > 1 else 10.0
        machine.round(length, 1)
    machine.step = 10.0
    machine.run(length, 1, 600)
    assert np.mean(machine.run(length, 1, 60)) > 2
