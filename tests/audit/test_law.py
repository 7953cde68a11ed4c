import math

import numpy as np
import pytest
import torch

from leadout.audit import law as law_module
from leadout.audit.law import log_full, make_law, penalised
from leadout.audit.synthetic import filtered
from leadout.audit.tolerances import tolerances_for
from leadout.records import SamplingParams

PROBS = np.asarray([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
EXACT = tolerances_for("float64")
ROUNDED = tolerances_for("bfloat16")


def make(probs, tolerances=EXACT, **settings):
    params = SamplingParams(**settings)
    logits_NV = torch.from_numpy(np.log(np.atleast_2d(probs)))
    return make_law(log_full(logits_NV, params), params, tolerances)


def restricted(law):
    return law.log_p_NV().exp()[0].numpy()


def test_without_filters_the_law_is_the_tempered_softmax():
    expected = PROBS**2 / np.sum(PROBS**2)
    np.testing.assert_allclose(restricted(make(PROBS, temperature=0.5)), expected, atol=1e-12)


def test_top_p_then_min_p_follow_the_order_of_transformers():
    law = make(PROBS, top_p=0.69, min_p=0.3)
    np.testing.assert_allclose(restricted(law), [0.5 / 0.7, 0.2 / 0.7, 0, 0, 0, 0], atol=1e-9)


def test_top_k_keeps_the_surely_largest():
    np.testing.assert_allclose(restricted(make(PROBS, top_k=2)), [0.5 / 0.7, 0.2 / 0.7, 0, 0, 0, 0], atol=1e-9)


def test_ties_at_the_k_th_are_ambiguous_rather_than_inside_or_outside():
    law = make(PROBS, top_k=3)
    scores = np.log(PROBS)
    assert (scores >= float(law.inner_N)).tolist() == [True, True, False, False, False, False]
    assert (scores >= float(law.outer_N)).tolist() == [True, True, True, True, False, False]


def test_top_p_after_top_k_looks_at_the_renormalised_mass():
    law = make(PROBS, top_k=2, top_p=0.7)
    assert restricted(law).tolist() == [1.0, 0, 0, 0, 0, 0]
    law = make(PROBS, top_k=2, top_p=0.73)
    np.testing.assert_allclose(restricted(law)[:2], [5 / 7, 2 / 7], atol=1e-9)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.8, "temperature": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9}]
)
def test_bands_hold_every_support_that_rounding_can_make(settings):
    rng = np.random.default_rng(5)
    logits_NV = 2.0 * rng.standard_normal((400, 30))
    params = SamplingParams(**settings)
    law = make_law(log_full(torch.from_numpy(logits_NV), params), params, ROUNDED)
    moved_NV = logits_NV + rng.uniform(-0.04, 0.04, logits_NV.shape)
    scores_NV = log_full(torch.from_numpy(moved_NV), params).numpy()
    kept_NV = filtered(scores_NV, params) > 0
    inner_NV = (law.log_full_NV >= law.inner_N[:, None]).numpy()
    outer_NV = (law.log_full_NV >= law.outer_N[:, None]).numpy()
    assert not np.any(inner_NV & ~kept_NV)
    assert not np.any(kept_NV & ~outer_NV)
    assert inner_NV.sum() > 0.2 * kept_NV.sum()


def test_in_float64_the_band_is_the_support_away_from_ties():
    rng = np.random.default_rng(6)
    logits_NV = 2.0 * rng.standard_normal((200, 30))
    params = SamplingParams(top_p=0.8, temperature=0.7)
    law = make_law(log_full(torch.from_numpy(logits_NV), params), params, EXACT)
    exact_NV = filtered(log_full(torch.from_numpy(logits_NV), params).numpy(), params)
    same_N = np.all((law.log_p_NV().exp().numpy() > 0) == (exact_NV > 0), -1)
    assert same_N.mean() > 0.95
    np.testing.assert_allclose(law.log_p_NV().exp().numpy()[same_N], exact_NV[same_N], atol=1e-12)


def test_a_partial_selection_gives_the_edges_of_a_full_sort(monkeypatch):
    rng = np.random.default_rng(7)
    logits_NV = torch.from_numpy(rng.standard_normal((50, 200)))
    params = SamplingParams(top_p=0.7)
    whole = make_law(log_full(logits_NV, params), params, ROUNDED)
    monkeypatch.setattr(law_module, "NUM_CANDIDATES", (10, 40))
    partial = make_law(log_full(logits_NV, params), params, ROUNDED)
    assert torch.equal(whole.inner_N, partial.inner_N)
    assert torch.equal(whole.outer_N, partial.outer_N)


def test_greedy_is_a_certain_token_unless_rounding_could_change_the_argmax():
    clear = make([0.9, 0.05, 0.05], ROUNDED, temperature=0.0)
    assert restricted(clear).tolist() == [1.0, 0.0, 0.0]
    close = make([0.5, 0.45, 0.05], ROUNDED, temperature=0.0)
    assert math.isinf(float(close.inner_N))
    assert (np.log([0.5, 0.45, 0.05]) >= float(close.outer_N)).tolist() == [True, True, False]


def test_repetition_penalty_covers_prompt_and_the_output_before_the_position():
    logits_TV = torch.tensor([[2.0, -2.0, 2.0, -2.0]] * 3, dtype=torch.float64)
    params = SamplingParams(repetition_penalty=2.0)
    out_TV = penalised(logits_TV, np.asarray([0], np.int32), np.asarray([3, 2, 1], np.int32), params)
    assert out_TV.tolist() == [[1.0, -2.0, 2.0, -2.0], [1.0, -2.0, 2.0, -4.0], [1.0, -2.0, 1.0, -4.0]]


def test_presence_and_frequency_penalties_look_at_the_output_only():
    logits_TV = torch.zeros(1, 4, dtype=torch.float64)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    out_TV = penalised(logits_TV, np.asarray([0], np.int32), np.asarray([1, 1, 2, 3], np.int32), params, start=3)
    assert out_TV.tolist() == [[0.0, -1.0, -0.75, 0.0]]


def test_penalties_of_a_chunk_equal_those_of_the_whole():
    rng = np.random.default_rng(3)
    logits_TV = torch.from_numpy(rng.standard_normal((9, 6)))
    tokens_T = rng.integers(0, 6, 9).astype(np.int32)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1)
    prompt_P = np.asarray([2], np.int32)
    whole_TV = penalised(logits_TV, prompt_P, tokens_T, params)
    part_TV = penalised(logits_TV[4:7], prompt_P, tokens_T, params, start=4)
    assert torch.equal(whole_TV[4:7], part_TV)
