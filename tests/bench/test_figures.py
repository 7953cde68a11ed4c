from __future__ import annotations

import numpy as np
import pytest

from leadout.bench.contender import interleave
from leadout.bench.results import against_best, summarise
from leadout.bench.statistics import Spread, ratio_of_medians
from leadout.bench.workload import cut_prompts, long_tail, long_tail_lengths
from leadout.errors import ConfigError
from tests.bench.fakes import ScriptedContender, sample, workload


def test_a_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)


def test_a_ratio_is_of_medians_and_its_interval_draws_pairs():
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratio = ratio_of_medians([2.0 * value for value in base], base)
    # Whatever pairs are drawn, twice as much stays twice as much; drawn apart, it would not.
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 5)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        top, bottom = rng.lognormal(0.0, 0.1, 25), rng.lognormal(0.0, 0.1, 25)
        ratio = ratio_of_medians(top.tolist(), bottom.tolist(), seed=trial)
        covered += ratio.lower_end <= 1.0 <= ratio.upper_end
    assert 85 <= covered <= 100


def test_of_a_machine_at_two_speeds_the_ratios_within_pairs_see_only_the_contenders():
    # Three slow turns of six and a sample that a change of speed divides: equal contenders, apart by medians.
    base, again = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.8, 2.0, 2.0, 2.0]
    ratio = ratio_of_medians(again, base)
    assert (ratio.value, ratio.of_pairs) == (pytest.approx(1.9 / 1.5), 1.0)


def test_one_pair_has_no_interval():
    ratio = ratio_of_medians([3.0], [2.0])
    assert (ratio.value, ratio.low, ratio.high, ratio.lower_end) == (1.5, None, None, 1.5)


def test_contenders_run_in_turn_after_warm_ups_that_do_not_count():
    log: list[tuple[str, int]] = []
    a = ScriptedContender("a", [9.0, 1.0, 2.0], log)
    b = ScriptedContender("b", [9.0, 9.0, 3.0, 4.0], log, warm_ups=2)
    samples = interleave([a, b], workload(), 2, lambda line: None)
    assert log == [("a", 0), ("b", 0), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert [each.seconds for each in samples["a"]] == [1.0, 2.0]
    assert [each.seconds for each in samples["b"]] == [3.0, 4.0]


def test_a_cell_holds_speed_round_cost_and_acceptance():
    plain = [sample(2.0, round_seconds=0.1, num_drafts=0.0) for _ in range(3)]
    fast = [
        sample(1.0, round_seconds=0.15, num_drafts=4.0, acceptance_length=length, acceptance_rate_pos_1=0.5)
        for length in (2.0, 2.5, 3.0)
    ]
    cell = summarise(workload(), {"plain": plain, "k=3": fast}, fixed=["plain", "k=3"])
    line = cell.line("k=3")
    assert line.tokens_per_second.median == 20.0
    assert line.against_plain is not None and line.against_plain.value == 2.0
    assert line.round_cost is not None and line.round_cost.value == pytest.approx(1.5)
    assert line.acceptance_length == 2.5
    assert line.acceptance_by_position == (0.5,)
    assert cell.line("plain").against_plain is None
    assert cell.auto_against_best is None


def test_the_best_fixed_length_is_chosen_on_one_half_and_compared_on_the_other():
    auto = [sample(1.0)] * 4
    # k=1 wins the first half only: chosen there, it is slower where it is compared.
    fixed = {"plain": [sample(1.5)] * 4, "k=1": [sample(0.9), sample(0.9), sample(2.0), sample(2.0)]}
    found = against_best(auto, fixed)
    assert found is not None
    assert (found.best, found.ratio.value, found.ratio.pairs) == ("k=1", 2.0, 2)


def test_prompts_are_different_of_one_length_and_end_where_a_text_ends():
    texts = [np.array([10 * i + j for j in range(3 + i)], np.int32) for i in range(4)]
    prompts = cut_prompts(texts, 10, 6)
    assert [len(prompt.token_ids) for prompt in prompts] == [6] * 10
    assert len({tuple(prompt.token_ids.tolist()) for prompt in prompts}) == 10
    assert prompts[0].token_ids[-1] == texts[0][-1]
    assert prompts[5].token_ids[-1] == texts[1][-1]


def test_texts_that_end_alike_still_give_different_prompts():
    prompts = cut_prompts([np.array([7, 8, 9], np.int32)] * 3, 9, 2)
    assert [prompt.token_ids.tolist() for prompt in prompts[:5]] == [[8, 9], [7, 9], [9, 9], [7, 7], [8, 7]]
    with pytest.raises(ConfigError, match="2 tokens do not give 10 different"):
        cut_prompts([np.array([7, 8, 9], np.int32)] * 3, 10, 2)


def test_prompts_that_cannot_all_differ_are_refused():
    texts = [np.array([1, 2, 3], np.int32)] * 2
    with pytest.raises(ConfigError, match="1 tokens do not give 8 different prompts"):
        cut_prompts(texts, 8, 1)


def test_long_tail_rows_are_siblings_of_the_prompts():
    prompts = cut_prompts([np.arange(9, dtype=np.int32), np.arange(20, 31, dtype=np.int32)], 8, 4)
    workload = long_tail(prompts)
    assert workload.lengths == long_tail_lengths()
    assert [prompt.id for prompt in workload.prompts] == [f"bench/{row // 8}" for row in range(64)]


def test_long_tail_lengths_are_fixed_and_their_longest_row_is_many_medians_long():
    lengths = long_tail_lengths()
    assert lengths == long_tail_lengths()
    assert len(lengths) == 64
    assert 25 <= np.median(lengths) <= 40
    assert 4 * np.median(lengths) <= max(lengths) <= 256
