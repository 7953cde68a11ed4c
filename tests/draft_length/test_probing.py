from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from leadout.draft_length.controller import Choice, GoodputLength
from leadout.draft_length.load import Load
from tests.draft_length.machine import Machine


def test_probes_are_at_most_two_in_a_hundred_rounds_at_any_load():
    for rows in (1, 8):
        chosen = Machine(0.0, draft=5.0).run(GoodputLength(5), rows, 5000)
        assert 0 < np.count_nonzero(chosen[200:]) <= 0.02 * 4800


class CountsProbes(GoodputLength):
    """Of many rows a probe asks a few, anything else all of them."""

    probes = 0

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        choice = super().choose(rows, load)
        self.probes += choice.num_rows < rows
        return choice


@pytest.mark.parametrize(("rows", "accept", "per_token"), [(16, 0.6, 0.6), (32, 0.77, 1.0), (64, 0.77, 0.9)])
def test_a_good_drafter_whose_drafts_are_too_dear_is_probed_as_rarely_as_a_bad_one(rows, accept, per_token):
    machine, length = Machine(accept, step=6.0, per_token=per_token, draft=1.0), CountsProbes(7)
    machine.run(length, rows, 500)
    length.probes, machine.clock, machine.tokens = 0, 0.0, 0
    machine.run(length, rows, 5000)
    assert 0 < length.probes <= 0.02 * 5000
    assert machine.tokens / machine.clock > 0.99 * machine.goodput(rows, 0)


@pytest.mark.parametrize("draft", [5.0, 20.0])
def test_probes_cost_at_most_one_percent_of_the_time_however_dear_drafts_are(draft):
    machine = Machine(0.0, draft=draft)
    length = GoodputLength(5)
    machine.run(length, 1, 200)
    machine.clock = 0.0
    machine.run(length, 1, 20_000)
    plain = 20_000 * machine.seconds(1, 0)
    assert plain < machine.clock < 1.012 * plain


def test_speculation_comes_on_when_the_drafter_has_improved():
    machine, length = Machine(0.02), GoodputLength(5)
    machine.run(length, 2, 2000)
    machine.accept = 0.85
    later = machine.run(length, 2, 20_000)
    assert np.mean(np.array(later[-500:]) > 0) > 0.95


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_becomes_good_while_it_rests_is_drafting_within_1200_rounds(rows, looks_up, seed):
    machine, length = Machine(0.05, draft=1.5, per_token=0.5), GoodputLength(5)
    machine.rng = np.random.default_rng(seed)
    if looks_up:
        machine.accept, machine.finds = 0.75, 0.05
    machine.run(length, rows, 3000)
    for done in range(400):
        share = 0.05 + 0.7 * done / 400
        machine.accept, machine.finds = (0.75, share) if looks_up else (share, 1.0)
        machine.round(length, rows)
    machine.run(length, rows, 800)
    assert np.mean(np.array(machine.run(length, rows, 200)) > 0) > 0.9
