"""Whole audits of a synthetic policy: silent on correct generators, loud on every bias."""

from dataclasses import replace

import pytest

from leadout.audit.biased_rules import BIASED, greedy_point, point_mass, second_chance
from leadout.audit.judge import Demands, judge
from leadout.audit.synthetic import Setup
from leadout.audit.synthetic_audits import samples
from leadout.audit.verdict import Outcome
from leadout.records import SamplingParams

ANY = Demands(tokens=1, class_tokens=1, temperature_error=100.0)
SUBTLE = ("accept x 1.05", "shared draft noise", "temperature 0.7 in accept only")
CORRECT = {
    "sampled": Setup(),
    "point mass": Setup(rule=greedy_point, point_drafts=True),
    "filtered": Setup(params=SamplingParams(temperature=0.7, top_p=0.8)),
    "fp32": Setup(rounding=0.0),
}


def verdicts(setup, num_audits, seed, demands=ANY, precision="bfloat16"):
    return [judge(sample, "synthetic", precision, demands) for sample in samples(setup, num_audits, seed, precision)]


@pytest.mark.parametrize("name", CORRECT)
def test_five_hundred_audits_of_a_correct_generator_do_not_fail(name):
    setup = CORRECT[name]
    precision = "float32" if name == "fp32" else "bfloat16"
    found = verdicts(setup, 500, seed=20, precision=precision)
    assert sum(verdict.outcome is Outcome.FAIL for verdict in found) == 0


@pytest.mark.parametrize("name", sorted(set(BIASED) - set(SUBTLE)))
def test_a_biased_rule_fails_in_nineteen_of_twenty_seeds(name):
    found = verdicts(Setup(rule=BIASED[name], num_rollouts=250), 20, seed=30)
    assert sum(verdict.outcome is Outcome.FAIL for verdict in found) >= 19


@pytest.mark.parametrize("name", SUBTLE)
def test_a_subtle_rule_fails_in_a_larger_sample(name):
    found = verdicts(Setup(rule=BIASED[name], num_rollouts=4000), 3, seed=31)
    assert all(verdict.outcome is Outcome.FAIL for verdict in found)


@pytest.mark.parametrize(
    ("setup", "test"),
    [
        (Setup(stale_after_rejection=True), "T1"),
        (Setup(wrong_bonus=True), "T1"),
        (Setup(shared_noise=True), "T7"),
        (Setup(rule=second_chance, point_drafts=True), "T2"),
        (Setup(true_temperature=0.9), "T3"),
        (Setup(params=SamplingParams(temperature=0.7), true_temperature=1.0), "T6"),
    ],
    ids=["stale cache", "wrong bonus", "shared noise", "second chance", "temperature", "temperature ignored"],
)
def test_a_wrong_generator_is_caught_by_the_test_made_for_it(setup, test):
    found = verdicts(replace(setup, num_rollouts=250), 20, seed=40)
    assert sum(test in {result.test for result in verdict.failures} for verdict in found) >= 19


def test_a_stale_cache_shows_in_the_class_after_a_rejection_only():
    (verdict,) = verdicts(Setup(stale_after_rejection=True, num_rollouts=400), 1, seed=41)
    failed = {result.class_name for result in verdict.failures if result.test == "T1"}
    assert "j=1 after rejection" in failed
    assert not failed & {"first", "plain", "bonus", "j=1 after full acceptance", "j=2", "j=3"}


def test_a_token_outside_the_filters_is_caught_by_the_support_test():
    setup = Setup(params=SamplingParams(top_k=3), num_rollouts=400)
    params = replace(setup.params, top_k=8)
    (sample,) = samples(replace(setup, params=params), 1, seed=42)
    assert judge(sample, "x", "bfloat16", ANY).outcome is not Outcome.FAIL
    (narrow,) = samples(replace(setup, params=replace(setup.params, top_k=0, min_p=0.2)), 1, seed=42)
    assert narrow.outside == 0


def test_an_exact_rule_other_than_the_declared_one_is_named_as_such():
    (verdict,) = verdicts(Setup(rule=point_mass, num_rollouts=400), 1, seed=43)
    assert verdict.outcome is Outcome.FAIL
    assert {result.test for result in verdict.failures} == {"T4"}
    assert verdict.reason.startswith("lossless as far as T1 to T3 see, but not by the declared rule")


def test_an_untraced_exact_rule_passes_whatever_it_is():
    (verdict,) = verdicts(Setup(rule=point_mass, traced=False, num_rollouts=400), 1, seed=44)
    assert verdict.outcome is Outcome.PASS
    assert any("no trace" in line for line in verdict.unseen)


def test_a_drafter_unrelated_to_the_policy_passes():
    (verdict,) = verdicts(Setup(draft_noise=4.0, num_rollouts=400), 1, seed=45)
    assert verdict.outcome is Outcome.PASS


def test_a_small_sample_cannot_be_judged_and_says_what_is_missing():
    (verdict,) = verdicts(Setup(num_rollouts=30), 1, seed=46, demands=Demands())
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert verdict.exit_code == 3
    wanted = {short.class_name: short.needed for short in verdict.shortages}
    assert wanted["all"] == 5000 and wanted["bonus"] == 300
    assert verdict.reason.startswith("too few tokens:")


def test_a_sharp_policy_needs_more_tokens_than_a_flat_one():
    (flat,) = samples(Setup(num_rollouts=400), 1, seed=47)
    (sharp,) = samples(Setup(num_rollouts=400, sharpness=8.0), 1, seed=47)
    sizes = {}
    for name, sample in (("flat", flat), ("sharp", sharp)):
        verdict = judge(sample, name, "bfloat16", Demands(temperature_error=0.03))
        sizes[name] = max(short.needed for short in verdict.shortages if short.class_name == "all")
    assert sizes["sharp"] > 2 * sizes["flat"]


def test_detectable_biases_shrink_with_the_sample():
    (small,) = verdicts(Setup(num_rollouts=100), 1, seed=48)
    (large,) = verdicts(Setup(num_rollouts=1600), 1, seed=48)
    for before, after in zip(small.detectable, large.detectable, strict=True):
        assert after.smallest < before.smallest
