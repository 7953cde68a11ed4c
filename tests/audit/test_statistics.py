"""Each test by itself: exact null laws by enumeration, and the bias it is made for."""

import math

import numpy as np
import torch
from scipy.stats import kstwo

from leadout.audit.floor import Curve, displacement, grid, in_order
from leadout.audit.law import log_full, make_law
from leadout.audit.measure import measure_tokens
from leadout.audit.t1_pit import id_uniform, ordered_uniform
from leadout.audit.t2_ratio import log_ratio
from leadout.audit.t3_tilt import TILTS, alternative_log_e, tilt_log_e, tilt_terms
from leadout.audit.t4_rule import accept_probability, impossible_corrections, origin_weights
from leadout.audit.t6_logprobs import error_findings
from leadout.audit.t7_dependence import LagSums, SiblingSums, sibling_finding
from leadout.audit.tails import (
    BET_THETAS,
    bernstein_p_value,
    bet_log_e,
    bet_terms,
    holm,
    ks_distance,
    ks_p_value,
    ks_radius,
)
from leadout.audit.tolerances import tolerances_for
from leadout.records import SamplingParams

P = np.asarray([0.3, 0.25, 0.25, 0.15, 0.05, 0.0])
Q = np.asarray([0.1, 0.4, 0.0, 0.2, 0.2, 0.1])


def every_token(p_V):
    """One row per token of the vocabulary."""
    size = len(p_V)
    return torch.from_numpy(np.tile(p_V, (size, 1))), torch.arange(size)


def test_u_cuts_the_unit_interval_into_one_piece_per_token_of_its_probability():
    p_NV, token_N = every_token(P)
    low_N = ordered_uniform(p_NV, p_NV, token_N, torch.zeros(6, dtype=torch.float64)).numpy()
    high_N = ordered_uniform(p_NV, p_NV, token_N, torch.ones(6, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(high_N - low_N, P, atol=1e-12)
    np.testing.assert_allclose(low_N, [0.0, 0.3, 0.55, 0.8, 0.95, 1.0], atol=1e-12)


def test_u_ordered_by_the_ratio_starts_with_tokens_the_draft_cannot_propose():
    p_NV, token_N = every_token(P)
    q_NV = torch.from_numpy(np.tile(Q, (6, 1)))
    key_NV = log_ratio(p_NV.log(), q_NV)
    low_N = ordered_uniform(key_NV, p_NV, token_N, torch.zeros(6, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(low_N, [0.25, 0.7, 0.0, 0.55, 0.95, 1.0], atol=1e-12)


def test_u_by_id_is_the_cumulative_law_of_unnormalised_weights():
    weight_NV = torch.from_numpy(np.tile(4.0 * P, (6, 1)))
    u_N = id_uniform(weight_NV, torch.arange(6), torch.full((6,), 0.5, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(u_N, np.cumsum(P) - 0.5 * P, atol=1e-12)


def test_tokens_of_the_policy_have_uniform_u():
    rng = np.random.default_rng(1)
    p_NV = torch.from_numpy(np.tile(P, (20_000, 1)))
    token_N = torch.from_numpy(rng.choice(6, 20_000, p=P))
    u_N = ordered_uniform(p_NV, p_NV, token_N, torch.from_numpy(rng.random(20_000))).numpy()
    assert kstwo.sf(ks_distance(u_N), u_N.size) > 1e-3


def test_dropping_the_tokens_that_end_rows_moves_u():
    rng = np.random.default_rng(2)
    token_N = rng.choice(6, 20_000, p=P)
    kept_N = torch.from_numpy(token_N[token_N != 0])
    p_NV = torch.from_numpy(np.tile(P, (kept_N.numel(), 1)))
    u_N = ordered_uniform(p_NV, p_NV, kept_N, torch.from_numpy(rng.random(kept_N.numel()))).numpy()
    assert ks_p_value(ks_distance(u_N), u_N.size, 0.005) < 1e-6


def test_every_tilt_has_mean_one_under_the_policy():
    p_NV, token_N = every_token(P[:5])
    log_p_NV = p_NV.log()
    terms_NL = tilt_terms(log_p_NV, p_NV, log_p_NV.gather(-1, token_N[:, None])[:, 0])
    np.testing.assert_allclose((P[:5, None] * terms_NL.exp().numpy()).sum(0), np.ones(len(TILTS)), atol=1e-12)


def test_a_tilt_is_the_likelihood_ratio_of_its_temperature():
    p_NV, token_N = every_token(P[:5])
    log_p_NV = p_NV.log()
    terms_NL = tilt_terms(log_p_NV, p_NV, log_p_NV.gather(-1, token_N[:, None])[:, 0]).numpy()
    for column, tilt in enumerate(TILTS):
        tempered_V = P[:5] ** (1 - tilt) / np.sum(P[:5] ** (1 - tilt))
        np.testing.assert_allclose(terms_NL[:, column], np.log(tempered_V / P[:5]), atol=1e-12)


def test_a_mixture_alternative_has_mean_one_and_finds_its_bias():
    biased_V = np.asarray([0.36, 0.25, 0.25, 0.1, 0.04])
    log_ratio_V = np.log(biased_V / P[:5])
    mean = sum(P[x] * math.exp(alternative_log_e(log_ratio_V[x : x + 1])) for x in range(5))
    assert abs(mean - 1.0) < 1e-12
    rng = np.random.default_rng(4)
    assert alternative_log_e(log_ratio_V[rng.choice(5, 5000, p=biased_V)]) > math.log(1e6)
    assert alternative_log_e(log_ratio_V[rng.choice(5, 5000, p=P[:5])]) < math.log(1e3)


def test_drift_makes_the_temperature_test_ignore_what_rounding_does():
    sums_L = np.asarray(TILTS) * 100.0
    assert tilt_log_e(sums_L, 1000, drift=0.0) > 1.0
    assert tilt_log_e(sums_L, 1000, drift=0.1) <= 0.0


def test_bets_have_mean_one_at_the_chance_and_less_inside_its_interval():
    for chance in (0.001, 0.3, 0.99):
        ends = np.full(2, chance)
        growth = np.exp(bet_terms(np.asarray([True, False]), ends, ends))
        np.testing.assert_allclose(chance * growth[0] + (1 - chance) * growth[1], np.ones(len(BET_THETAS)), atol=1e-12)
        wide = np.exp(bet_terms(np.asarray([True, False]), 0.5 * ends, np.minimum(1.5 * ends, 1.0)))
        assert np.all(chance * wide[0] + (1 - chance) * wide[1] <= 1.0 + 1e-12)


def test_bets_find_five_per_cent_too_many_hits():
    rng = np.random.default_rng(8)
    chance_N = np.full(20_000, 0.7)
    fair = bet_terms(rng.random(20_000) < 0.7, chance_N, chance_N).sum(0)
    biased = bet_terms(rng.random(20_000) < 0.735, chance_N, chance_N).sum(0)
    assert bet_log_e(fair, 20_000, 0.0) < 3.0
    assert bet_log_e(biased, 20_000, 0.0) > 20.0
    assert bet_log_e(biased, 20_000, 0.035) < 3.0


def test_the_parts_of_the_accept_rule_add_up_to_the_policy():
    p_NV, draft_N = every_token(P)
    q_NV = torch.from_numpy(np.tile(Q, (6, 1)))
    accept_N = accept_probability(p_NV[0], q_NV[0]).numpy()
    rejected_NV = origin_weights(p_NV, q_NV, draft_N, torch.zeros(6, dtype=torch.bool)).numpy()
    emitted_V = Q * accept_N + np.sum(Q * (1 - accept_N)) * rejected_NV[0] / rejected_NV[0].sum()
    np.testing.assert_allclose(emitted_V, P, atol=1e-12)
    accepted_NV = origin_weights(p_NV, q_NV, draft_N, torch.ones(6, dtype=torch.bool)).numpy()
    np.testing.assert_allclose(accepted_NV[0], Q * accept_N, atol=1e-12)


def test_corrections_of_a_point_mass_follow_the_policy_without_the_draft():
    p_NV, draft_N = every_token(P)
    weights_NV = origin_weights(p_NV, None, draft_N, torch.zeros(6, dtype=torch.bool)).numpy()
    np.testing.assert_allclose(weights_NV[1], [0.3, 0.0, 0.25, 0.15, 0.05, 0.0], atol=1e-12)


def test_a_correction_is_impossible_only_clearly_below_the_draft_law():
    p_D = torch.tensor([0.10, 0.10, 0.10, 0.10])
    q_D = torch.tensor([0.05, 0.12, 0.20, 0.20])
    accepted_D = torch.tensor([False, False, False, True])
    assert impossible_corrections(p_D, q_D, accepted_D).tolist() == [False, False, True, False]


def test_the_floor_is_the_exact_displacement_of_u():
    exact_V, rounded_V = np.asarray([0.6, 0.4]), np.asarray([0.5, 0.5])
    moved_G = displacement(torch.from_numpy(exact_V[None]), torch.from_numpy(rounded_V[None])).numpy()
    u_G = grid().numpy()
    expected_G = np.where(u_G <= 0.6, u_G * 0.5 / 0.6, 0.5 + (u_G - 0.6) * 0.5 / 0.4) - u_G
    np.testing.assert_allclose(moved_G, expected_G, atol=1e-12)


def test_equal_passes_have_no_floor():
    curve = Curve()
    p_NV = torch.from_numpy(np.tile(P, (3, 1)))
    curve.add(*in_order(p_NV, p_NV, p_NV))
    assert curve.distance < 1e-12 and curve.n == 3


def test_token_statistics_are_the_moments_of_the_law():
    params = SamplingParams()
    probs_V = P[:5]
    law = make_law(log_full(torch.from_numpy(np.log(probs_V))[None], params), params, tolerances_for("float64"))
    columns = measure_tokens(law, torch.tensor([3]), torch.tensor([0.5], dtype=torch.float64))
    log_p = np.log(probs_V)
    entropy = -np.sum(probs_V * log_p)
    assert math.isclose(columns.power2_N[0], np.sum(probs_V**2), rel_tol=1e-12)
    assert math.isclose(columns.power3_N[0], np.sum(probs_V**3), rel_tol=1e-12)
    assert math.isclose(columns.excess_N[0], -log_p[3] - entropy, rel_tol=1e-12)
    assert math.isclose(columns.variance_N[0], np.sum(probs_V * log_p**2) - entropy**2, rel_tol=1e-9)


def test_log_probability_errors_are_bounded_by_maximum_in_float32_and_by_rms_in_bf16():
    rng = np.random.default_rng(9)
    small_N = 0.05 * rng.standard_normal(5000)
    assert [f.statistic <= f.bound for f in error_findings("x", small_N, 0.05, math.inf)] == [True, True, True]
    rms, _, _ = error_findings("x", 6 * small_N, 0.05, math.inf)
    assert rms.statistic > rms.bound
    _, mean, _ = error_findings("x", small_N + 0.03, 0.05, math.inf)
    assert mean.statistic > mean.bound
    (largest,) = error_findings("x", small_N, 0.0, 2e-4)
    assert largest.statistic > largest.bound


def test_lag_products_have_mean_one_and_find_shared_noise():
    rng = np.random.default_rng(10)
    sums, same = LagSums(), LagSums()
    u_N = rng.random(20_000)
    sums.add(u_N, np.zeros(20_000, np.int64))
    same.add_pairs(u_N, u_N)
    assert sums.log_e() < 3.0
    assert same.log_e() > 1000.0
    assert sums.pairs == 19_999


def test_neighbours_of_different_rollouts_are_no_pair():
    sums = LagSums()
    sums.add(np.asarray([0.2, 0.4, np.nan, 0.7]), np.asarray([0, 0, 0, 1]))
    assert sums.pairs == 1


def test_sibling_coincidences_have_the_declared_mean_and_variance():
    p_V = np.asarray([0.5, 0.3, 0.2])
    rng = np.random.default_rng(12)
    draws_RG = rng.choice(3, (20_000, 4), p=p_V)
    pairs_R = sum((draws_RG[:, i] == draws_RG[:, j]) for i in range(4) for j in range(i))
    sums = SiblingSums()
    for token in (0, 0, 1, 0):
        sums.add(7, token, float(np.sum(p_V**2)), float(np.sum(p_V**3)))
    pairs, hits, expected, variance, largest = sums.moments()
    assert (pairs, hits) == (6, 3.0)
    assert abs(pairs_R.mean() - expected) < 5 * (variance / 20_000) ** 0.5
    assert abs(pairs_R.var() / variance - 1) < 0.05
    assert math.isclose(largest, 6 * (1 - np.sum(p_V**2)))


def test_identical_siblings_fail_and_a_single_sibling_says_nothing():
    sums = SiblingSums()
    assert sibling_finding(sums) is None
    for group in range(40):
        for _ in range(8):
            sums.add(group, group % 3, 0.38, 0.16)
    finding = sibling_finding(sums)
    assert finding is not None and finding.p_value < 1e-9


def test_the_ks_bound_is_never_below_the_exact_tail():
    for n in (5, 50, 5000):
        for distance in (0.5 / n**0.5, 1.0 / n**0.5, 2.5 / n**0.5):
            assert ks_p_value(distance, n, 0.0) >= kstwo.sf(distance, n) - 1e-12
    assert math.isclose(ks_p_value(ks_radius(1e-5, 300), 300, 0.0), 1e-5, rel_tol=1e-9)


def test_bernstein_bounds_a_binomial_tail():
    from scipy.stats import binom

    n, p = 400, 0.1
    for hits in (50, 60, 80, 120):
        bound = bernstein_p_value(hits - n * p, n * p * (1 - p), 1 - p)
        assert bound >= binom.sf(hits - 1, n, p)


def test_holm_stops_at_the_first_hypothesis_that_stands():
    assert holm([0.001, 0.2, 0.02, 0.013], 0.05) == [True, False, True, True]
    assert holm([0.03, 0.001, 0.04], 0.05) == [False, True, False]
    assert holm([], 0.05) == []


def test_bounds_of_log_probabilities_grow_as_the_temperature_falls():
    error_N = np.random.default_rng(0).normal(0.0, 0.05 / 0.3, 5_000) + 0.5 * (0.05 / 0.3) ** 2
    floor = 0.05 / 0.3
    assert [f.statistic <= f.bound for f in error_findings("x", error_N, floor, math.inf, 0.3)] == [True] * 3
    assert not all(f.statistic <= f.bound for f in error_findings("x", error_N, floor, math.inf, 1.0))
    (largest,) = error_findings("x", np.asarray([3e-4]), 0.0, 2e-4, 0.5)
    assert (largest.statistic, largest.bound) == (3e-4, 4e-4)


def test_bounds_of_log_probabilities_do_not_shrink_above_temperature_one():
    (largest,) = error_findings("x", np.asarray([1e-4]), 0.0, 2e-4, 2.0)
    assert largest.bound == 2e-4
