import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from leadout.models import sampling
from leadout.models.sampling import Law, ParamsBatch, filter_weights, penalise, tempered_weights
from leadout.records import SamplingParams


def law_of(logits, **params) -> torch.Tensor:
    batch = ParamsBatch.of([SamplingParams(**params)] * logits.shape[0])
    weights = tempered_weights(logits.clone(), batch)
    return Law.from_weights(filter_weights(weights, batch)).probs(logits.shape[-1])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.999},
    ],
)
def test_filters_give_the_law_of_transformers(params):
    logits = torch.randn(40, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(None, logits.clone()).softmax(-1)
    torch.testing.assert_close(law_of(logits, **params), expected, rtol=0, atol=1e-12)


def test_top_p_comes_before_min_p():
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]], dtype=torch.float64).log()
    expected = torch.tensor([[5 / 7, 2 / 7, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(law_of(logits, top_p=0.7, min_p=0.3), expected)


def test_ties_at_the_kth_are_kept_and_ties_of_top_p_go_by_id():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    assert (law_of(logits, top_k=2) > 0).tolist() == [[False, True, True, True, True]]
    top_mass = float(logits.softmax(-1)[0, 1]) + 1.5 * float(logits.softmax(-1)[0, 2])
    assert (law_of(logits, top_p=top_mass) > 0).tolist() == [[False, True, True, True, False]]


def test_a_small_sorting_window_gives_the_same_law(monkeypatch):
    logits = torch.randn(30, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    settings = [{"top_p": 0.9}, {"top_k": 60}, {"top_k": 60, "top_p": 0.5}, {"top_p": 0.02}]
    expected = [law_of(logits, **params) for params in settings]
    monkeypatch.setattr(sampling, "_WINDOW", 8)
    for params, law in zip(settings, expected):
        torch.testing.assert_close(law_of(logits, **params), law, rtol=0, atol=0)


def test_rows_of_one_batch_keep_their_own_parameters():
    logits = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=3),
    ]
    batch = ParamsBatch.of(rows)
    mixed = Law.from_weights(filter_weights(tempered_weights(logits.clone(), batch), batch)).probs(50)
    for index, row in enumerate(rows):
        alone = law_of(logits[index : index + 1], temperature=row.temperature, top_k=row.top_k)
        torch.testing.assert_close(mixed[index : index + 1], alone)


def test_greedy_takes_the_lowest_id_among_ties():
    probs = law_of(torch.tensor([[1.0, 2.0, 2.0], [5.0, 5.0, 5.0]]), temperature=0.0)
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([[1, 5, 5], [2, 2, 2], [7, 8, 9]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter_(1, ids, True)
    batch = ParamsBatch.of([SamplingParams(repetition_penalty=1.3)] * 3)
    torch.testing.assert_close(penalise(logits, seen, torch.zeros(3, 20, dtype=torch.int16), batch), expected)


def test_presence_and_frequency_penalties_count_the_output():
    batch = ParamsBatch.of([SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)])
    counts = torch.tensor([[0, 1, 3]], dtype=torch.int16)
    out = penalise(torch.zeros(1, 3, dtype=torch.float64), counts > 0, counts, batch)
    assert out.tolist() == [[0.0, -0.75, -1.25]]


@pytest.mark.parametrize("vocab_size", [5, 512, 513, 1300])
def test_draws_follow_the_law(vocab_size):
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4))
    logits[0, vocab_size // 2 :] -= 3
    law = Law.from_weights(tempered_weights(logits.clone(), ParamsBatch.of([SamplingParams()])))
    uniforms = torch.from_numpy((np.arange(200_000) + 0.5) / 200_000)
    big = Law(law.weights_XV.expand(4000, -1), law.block_sums_XC.expand(4000, -1), law.total_X.expand(4000))
    drawn = torch.cat([big.draw(part) for part in uniforms.split(4000)])
    counts = np.bincount(drawn.numpy(), minlength=vocab_size)
    expected = law.probs(vocab_size)[0].double().numpy() * 200_000
    # A grid of uniforms hits every token as often as its probability says, up to one at each edge.
    assert np.abs(counts - expected).max() < 2.5


def test_a_draw_is_the_token_whose_slice_holds_the_uniform():
    law = Law.from_weights(torch.tensor([[0.2, 0.0, 0.3, 0.5]], dtype=torch.float64).repeat(6, 1))
    uniforms = torch.tensor([0.0, 0.1999, 0.2001, 0.4999, 0.5001, 1 - 2.0**-53], dtype=torch.float64)
    assert law.draw(uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_zero_weight_is_never_drawn():
    weights = torch.zeros(2, 1024)
    weights[0, 3] = weights[1, 700] = 1e-30
    law = Law.from_weights(weights)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        assert law.draw(torch.full((2,), uniform, dtype=torch.float64)).tolist() == [3, 700]


def test_logprob_is_the_log_of_the_probability():
    logits = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    law = Law.from_weights(tempered_weights(logits.clone(), ParamsBatch.of([SamplingParams(temperature=0.6)] * 2)))
    ids = torch.tensor([4, 20])
    expected = (logits / 0.6).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(law.logprob(ids), expected, rtol=0, atol=1e-12)
