"""Emitted laws of one verified position by enumeration: biased rules leave the policy, harmless ones do not."""

import numpy as np
import pytest
from scipy.stats import chisquare

from leadout.audit import biased_rules as rules

P = np.asarray([0.3, 0.2, 0.3, 0.2])
Q = np.asarray([0.1, 0.5, 0.2, 0.2])


def emitted(p_V, q_V, accept_V, correction_DV):
    """sum over drafts of q(d) [accept(d) at d + (1 - accept(d)) correction(. | d)]."""
    return q_V * accept_V + (q_V * (1 - accept_V)) @ correction_DV


def rows(law_V):
    return np.tile(law_V / law_V.sum(), (law_V.size, 1))


def without_draft(p_V):
    table_DV = np.tile(p_V, (p_V.size, 1))
    np.fill_diagonal(table_DV, 0.0)
    return table_DV / table_DV.sum(-1, keepdims=True)


def ratio(p_V, q_V):
    return np.minimum(1.0, p_V / q_V)


def residual(p_V, q_V):
    return np.maximum(p_V - q_V, 0.0)


def shared_uniform_law(p_V, q_V):
    """Given rejection the number lies in (m, 1) instead of (0, 1): the correction is the residual's upper tail."""
    edges_V = np.concatenate(([0.0], np.cumsum(residual(p_V, q_V) / residual(p_V, q_V).sum())))
    accept_V = ratio(p_V, q_V)
    law_V = q_V * accept_V
    for draft in range(p_V.size):
        above = np.maximum(edges_V, accept_V[draft])
        law_V = law_V + q_V[draft] * np.diff(above)
    return law_V


def greedy_law(p_V, q_V):
    draft = int(np.argmax(q_V))
    accept = min(1.0, p_V[draft] / q_V[draft])
    law_V = (1 - accept) * residual(p_V, q_V) / residual(p_V, q_V).sum()
    law_V[draft] += accept
    return law_V


def cold_law(p_V, q_V):
    cold_V = p_V ** (1 / 0.7) / np.sum(p_V ** (1 / 0.7))
    return emitted(p_V, q_V, ratio(cold_V, q_V), rows(residual(p_V, q_V)))


def confidence_law(p_V, q_V, threshold=rules.CONFIDENCE):
    kept_V = np.where(q_V >= threshold, q_V, 0.0)
    accepted_V = kept_V * ratio(p_V, q_V)
    corrected = kept_V.sum() - accepted_V.sum()
    return accepted_V + corrected * residual(p_V, q_V) / residual(p_V, q_V).sum() + (1 - kept_V.sum()) * p_V


def second_chance_law(p_V, q_V):
    law_V = (1 - p_V[np.argmax(q_V)]) * p_V
    law_V[np.argmax(q_V)] += p_V[np.argmax(q_V)]
    return law_V


LAWS = {
    "shared_uniform": shared_uniform_law,
    "point_accept_soft_residual": lambda p, q: emitted(p, q, p, rows(residual(p, q))),
    "soft_accept_point_residual": lambda p, q: emitted(p, q, ratio(p, q), without_draft(p)),
    "policy_residual": lambda p, q: emitted(p, q, ratio(p, q), rows(p)),
    "greedy_draft_soft_q": greedy_law,
    "accept_too_often": lambda p, q: emitted(p, q, np.minimum(1.0, 1.05 * p / q), rows(residual(p, q))),
    "cold_accept": cold_law,
    "own_confidence": confidence_law,
    "second_chance": second_chance_law,
}
HARMLESS = {
    "exact": lambda p, q: emitted(p, q, ratio(p, q), rows(residual(p, q))),
    "point_mass": lambda p, q: emitted(p, q, p, without_draft(p)),
}


def distance(law_V, p_V):
    return 0.5 * np.abs(law_V - p_V).sum()


@pytest.mark.parametrize("name", LAWS)
def test_a_biased_rule_leaves_the_policy(name):
    law_V = LAWS[name](P, Q)
    assert abs(law_V.sum() - 1.0) < 1e-12
    assert distance(law_V, P) > 0.005


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_rule_emits_the_policy_exactly(name):
    rng = np.random.default_rng(1)
    for _ in range(50):
        p_V, q_V = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
        assert distance(HARMLESS[name](p_V, q_V), p_V) < 1e-12


@pytest.mark.parametrize("name", [*LAWS, *HARMLESS])
def test_a_rule_emits_its_enumerated_law(name):
    size = 200_000
    outcome = getattr(rules, name)(np.tile(P, (size, 1)), np.tile(Q, (size, 1)), np.random.default_rng(3))
    counts_V = np.bincount(outcome.token_B, minlength=P.size)
    expected_V = {**LAWS, **HARMLESS}[name](P, Q) * size
    possible_V = expected_V > 0
    assert counts_V[~possible_V].sum() == 0
    assert chisquare(counts_V[possible_V], expected_V[possible_V]).pvalue > 1e-6


def test_a_sampled_draft_verified_as_point_mass_is_kept_less_often():
    p_B4, q_B4 = np.tile(P, (50_000, 1)), np.tile(Q, (50_000, 1))
    exact = rules.exact(p_B4, q_B4, np.random.default_rng(1)).accepted_B.mean()
    point = rules.point_mass(p_B4, q_B4, np.random.default_rng(1)).accepted_B.mean()
    assert abs(exact - np.minimum(P, Q).sum()) < 0.01
    assert abs(point - np.sum(P * Q)) < 0.01


def test_cutting_a_draft_by_its_own_confidence_is_biased():
    law_V = confidence_law(np.asarray([0.5, 0.3, 0.2]), np.asarray([0.2, 0.3, 0.5]), threshold=0.3)
    np.testing.assert_allclose(law_V, [0.4, 0.36, 0.24], atol=1e-12)


def test_draft_noise_used_again_for_the_correction_is_biased():
    size = 400_000
    outcome = rules.shared_draft_noise(np.tile(P, (size, 1)), np.tile(Q, (size, 1)), np.random.default_rng(5))
    counts_V = np.bincount(outcome.token_B, minlength=P.size)
    assert chisquare(counts_V, P * size).pvalue < 1e-12
