import io
import json

import pytest
from rich.console import Console

from leadout.clock import SimulatedClock
from leadout.pipeline.closing import (
    Case,
    Closing,
    close_run,
    compare,
    mean_drafter_seconds,
    mean_hidden_seconds,
    mean_stage_seconds,
    pick_rows,
    step_speedup,
)
from leadout.pipeline.closing_table import print_closing, stage_table
from leadout.pipeline.requests import make_requests
from leadout.records import Stage
from tests.fakes import FakeGenerator, make_params, make_prompt


def requests():
    return make_requests([make_prompt(i) for i in range(3)], make_params(max_new_tokens=40), 2, first_draw=5)


def seconds(rollout=6.0, train=4.0):
    return dict.fromkeys(Stage, 0.0) | {Stage.ROLLOUT: rollout, Stage.TRAIN: train}


def ids(chosen):
    return [tuple(request.rollout_id) for request in chosen]


def test_step_speedup_of_a_plain_run_is_amdahls_law():
    assert step_speedup(seconds(), speedup=2.0, run_speedup=1.0) == pytest.approx(10 / 7)


def test_step_speedup_of_a_speculative_run_is_against_the_plain_step_it_would_have_been():
    # the run's rollout of 6 s would have taken 12 s plainly
    assert step_speedup(seconds(), speedup=2.0, run_speedup=2.0) == pytest.approx(16 / 10)
    assert step_speedup(seconds(), speedup=1.0, run_speedup=2.0) == 1.0


def test_generation_that_other_stages_hid_is_worth_nothing_until_it_outlasts_them():
    # 4 s of other stages; 6 s waited for generation of 10 s, of which they hid 4. Plain generation takes 20 s.
    assert step_speedup(seconds(), speedup=2.0, run_speedup=2.0, hidden=4.0) == pytest.approx(20 / 10)
    waited = seconds() | {Stage.ROLLOUT: 0.0}
    assert step_speedup(waited, speedup=2.0, run_speedup=2.0, hidden=4.0) == pytest.approx(8 / 4)
    assert step_speedup(waited, speedup=4.0, run_speedup=1.0, hidden=4.0) == 1.0


def test_hidden_seconds_are_those_of_generation_that_nobody_waited_for():
    rows = [{"seconds/rollout": 5.0, "exposed/rollout": 2.0}, {"seconds/rollout": 3.0, "exposed/rollout": 3.0}]
    assert mean_hidden_seconds(rows) == 1.5
    assert mean_hidden_seconds([{"seconds/rollout": 5.0}]) == 0.0


def test_step_speedup_below_one_stays_below_one():
    assert step_speedup(seconds(), speedup=0.5, run_speedup=1.0) == pytest.approx(10 / 16)


def test_mean_seconds_are_over_all_rows():
    rows = [{"seconds/rollout": 1.0, "seconds/train": 2.0}, {"seconds/rollout": 3.0, "seconds/train": 2.0}]
    assert mean_stage_seconds(rows) == seconds(rollout=2.0, train=2.0)
    assert sum(mean_stage_seconds([]).values()) == 0.0


def test_what_the_drafter_takes_of_the_train_stage_stands_below_the_stages():
    rows = [{"seconds/train": 4.0, "seconds/drafter": 1.0}, {"seconds/train": 4.0, "seconds/drafter": 2.0}]
    assert (mean_drafter_seconds(rows), mean_drafter_seconds([])) == (1.5, 0.0)
    closing = Closing(steps=2, stage_seconds=seconds(rollout=2.0), comparisons=(), drafter_seconds=1.5)
    table = stage_table(closing)
    assert list(table.columns[0].cells)[-2:] == ["of it for the drafter", "step"]
    assert list(table.columns[2].cells)[-2:] == ["25.0%", "100.0%"]


def test_few_rows_are_spread_over_prompts_and_change_with_the_repetition():
    assert ids(pick_rows(requests(), 2, 0)) == [(5, 0), (6, 0)]
    assert ids(pick_rows(requests(), 2, 1)) == [(7, 0), (5, 1)]
    assert ids(pick_rows(requests(), 4, 1)) == [(6, 1), (7, 1), (5, 0), (6, 0)]
    assert ids(pick_rows(requests(), None, 3)) == ids(requests())


def generators(plain_cost=1.0, cost=1.25, accept=1.0, k=3):
    clock = SimulatedClock()
    plain = FakeGenerator(k=0, clock=clock, seconds_per_round=plain_cost)
    return clock, plain, FakeGenerator(k=k, accept=accept, clock=clock, seconds_per_round=cost)


def test_a_pair_continues_the_same_prompts_under_the_same_seed_in_turn():
    clock, plain, other = generators()
    compare(Case(name="x", variant="k=3", rows=2, pairs=3), plain, other, requests(), clock.now)
    asked = [[(r.prompt.id, r.rollout_id, r.params) for r in generator.submitted] for generator in (plain, other)]
    assert asked[0] == asked[1]
    seeds = [params.seed for _, _, params in asked[0]]
    assert seeds == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len({params.max_new_tokens for _, _, params in asked[0]}) == 2


def test_round_cost_is_the_time_of_a_round_in_plain_steps():
    clock, plain, other = generators(cost=1.25)
    comparison, rollouts = compare(Case(name="x", variant="k=3", pairs=9), plain, other, requests(), clock.now)
    # both sides draw the same lengths, so time per round is all that differs, up to the prefill's free token
    assert comparison.round_cost == pytest.approx(1.25, rel=0.05)
    assert comparison.acceptance_rate_by_position[0] > comparison.acceptance_rate_by_position[2]
    assert len(rollouts) == 54


def test_drafts_that_are_never_accepted_are_reported_as_slower():
    clock, plain, other = generators(cost=1.5, accept=0.0)
    comparison, _ = compare(Case(name="x", variant="k=3", pairs=3), plain, other, requests(), clock.now)
    assert comparison.speedup == pytest.approx(1 / 1.5)
    assert comparison.acceptance_length == 1.0
    assert comparison.acceptance_rate_by_position == (0.0, 0.0, 0.0)


def test_a_variant_that_stays_off_has_no_acceptance_and_the_cost_of_a_plain_step():
    clock, plain, other = generators(cost=1.0, k=0)
    comparison, _ = compare(Case(name="x", variant="auto", pairs=3), plain, other, requests(), clock.now)
    assert (comparison.acceptance_length, comparison.acceptance_rate_by_position) == (None, ())
    assert (comparison.off_share, comparison.speedup, comparison.round_cost) == (1.0, 1.0, 1.0)


def closed():
    clock, plain, fast = generators(cost=1.0)
    _, _, slow = generators(accept=0.0)
    slow.clock, slow.seconds_per_round = clock, 2.0
    rows = [{"seconds/rollout": 6.0, "seconds/train": 4.0}]
    cases = (Case(name="full batch, auto", variant="auto"), Case(name="1 row, k=3", variant="k=3", rows=1))
    return close_run(
        variants={"plain": plain, "auto": fast, "k=3": slow},
        requests=requests(),
        rows=rows,
        run_variant="auto",
        cases=cases,
        now=clock.now,
    )


def test_the_whole_step_follows_from_the_runs_own_generator():
    full, single = closed().comparisons
    assert full.speedup > 1.5
    assert full.step_speedup == pytest.approx((4 + 6 * full.speedup) / 10)
    assert single.speedup == pytest.approx(0.5)
    assert single.step_speedup < 1.0


def test_cases_without_their_variant_are_left_out():
    clock, plain, _ = generators()
    closing = close_run(variants={"plain": plain}, requests=requests(), rows=[], run_variant="plain", now=clock.now)
    assert closing.comparisons == ()


def test_a_closing_is_plain_json():
    text = json.loads(json.dumps(closed().to_json()))
    assert text["stage_seconds"]["rollout"] == 6.0
    assert text["comparisons"][1]["name"] == "1 row, k=3"


def test_the_table_prints_stages_first_and_ratios_as_they_are():
    screen = io.StringIO()
    print_closing(Console(file=screen, width=120), closed())
    text = screen.getvalue()
    assert text.index("rollout") < text.index("full batch, auto") < text.index("1 row, k=3")
    assert "60.0%" in text and "0.50x" in text
