from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.models.native.library import native_library
from leadout.models.randomness import philox4x32
from leadout.models.sampling import Law, ParamsBatch, filter_sorted, tempered_weights
from leadout.records import SamplingParams
from tests.models.native.models import needs_kernels

pytestmark = needs_kernels


def padded(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Random logits of rows that lie whole blocks of 512 apart."""
    stride = -(-vocab_size // 512) * 512
    logits_XV = torch.full((rows, stride), 99.0)
    logits_XV[:, :vocab_size] = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return logits_XV[:, :vocab_size]


@pytest.mark.parametrize("vocab_size", [512, 700, 2049])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_law_is_that_of_the_torch_operators(vocab_size: int, temperature: float) -> None:
    logits_XV = padded(6, vocab_size)
    params = ParamsBatch.of([SamplingParams(temperature=temperature)] * 6)
    expected = Law.from_weights(tempered_weights(logits_XV.double(), params))
    found = Law.from_logits(logits_XV, params)
    torch.testing.assert_close(found.weights_XV.double(), expected.weights_XV, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found.block_sums_XC.double(), expected.block_sums_XC, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found.total_X, expected.total_X, rtol=1e-5, atol=0)


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits_XV = padded(1, 1500)
    logits_XV[0, [700, 40, 1300]] = 50.0
    law = Law.from_logits(logits_XV, ParamsBatch.of([SamplingParams(temperature=0.0)]))
    assert law.weights_XV.nonzero().tolist() == [[0, 40]]


def test_each_row_has_its_own_temperature_for_all_its_positions() -> None:
    logits_XV = padded(4, 600)
    params = ParamsBatch.of([SamplingParams(temperature=1.0), SamplingParams(temperature=0.5)])
    expected = torch.stack([logits_XV[0], logits_XV[1], logits_XV[2] * 2, logits_XV[3] * 2]).softmax(-1)
    torch.testing.assert_close(Law.from_logits(logits_XV, params, 2).probs(600), expected)


@pytest.mark.parametrize("vocab_size", [512, 1300])
def test_draws_are_those_of_the_torch_operators(vocab_size: int) -> None:
    law = Law.from_logits(padded(1, vocab_size), ParamsBatch.of([SamplingParams()]))
    wide = Law(law.weights_XV.double(), law.block_sums_XC.double(), law.total_X)
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    found = torch.cat([law.draw(u[None]) for u in grid])
    expected = torch.cat([wide.draw(u[None]) for u in grid])
    assert torch.equal(found, expected)


def test_a_token_of_zero_weight_is_never_drawn() -> None:
    weights = torch.zeros(2, 1024)
    weights[0, 3] = weights[1, 700] = 1e-30
    law = Law.from_weights(weights)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        assert law.draw(torch.full((2,), uniform, dtype=torch.float64)).tolist() == [3, 700]


@pytest.mark.parametrize("reduced", [True, False])
def test_corrections_follow_the_positive_part_of_p_minus_q(reduced: bool) -> None:
    library = native_library()
    assert library is not None
    law = Law.from_logits(padded(3, 1024), ParamsBatch.of([SamplingParams()] * 3))
    ids_D = torch.randperm(1024, generator=torch.Generator().manual_seed(1))[:300] if reduced else None
    q_YD = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).softmax(-1)
    full_V = torch.zeros(1024)
    full_V[ids_D if ids_D is not None else slice(300)] = q_YD[1]
    rest_V = (law.probs(1024)[2] - full_V).clamp_min(0)
    expected = Law.from_weights(rest_V[None].double())
    for uniform in np.linspace(0.0005, 0.9995, 400):
        u = torch.tensor([uniform, uniform], dtype=torch.float64)
        found = library.draw_next(
            law.weights_XV, law.block_sums_XC, law.total_X, np.array([0, 2]), np.array([-1, 1]), q_YD, ids_D, 1e-7, u
        )
        assert found[0] == law.rows(torch.tensor([0])).draw(u[:1])
        assert found[1] == expected.draw(u[1:])


def test_where_nothing_is_left_of_p_the_correction_is_drawn_from_p() -> None:
    library = native_library()
    assert library is not None
    law = Law.from_logits(padded(1, 512), ParamsBatch.of([SamplingParams()]))
    for uniform in (0.1, 0.5, 0.9):
        u = torch.tensor([uniform], dtype=torch.float64)
        found = library.draw_next(
            law.weights_XV,
            law.block_sums_XC,
            law.total_X,
            np.array([0]),
            np.array([0]),
            law.probs(512),
            None,
            1e-7,
            u,
        )
        assert found == law.draw(u)


def test_uniforms_are_the_bits_of_the_numpy_philox() -> None:
    library = native_library()
    assert library is not None
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 2**32, 200, dtype=np.uint64) for _ in range(4)]
    seed = rng.integers(0, 2**64, 200, dtype=np.uint64)
    low, high = seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32)
    word0, word1, _, _ = philox4x32(tuple(words), (low, high))
    expected = ((word0 << np.uint64(21)) | (word1 >> np.uint64(11))).astype(np.float64) * 2.0**-53
    position, second, sibling, draw = words
    assert np.array_equal(library.uniforms(seed, position, second, sibling, draw), expected)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 7},
        {"top_k": 700},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_k": 5000},
    ],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_the_tokens_that_sorting_keeps(params: dict[str, float], ties: bool) -> None:
    library = native_library()
    assert library is not None
    logits = torch.randn(12, 1300, generator=torch.Generator().manual_seed(6)) * 3
    if ties:
        logits = logits.round()
    batch = ParamsBatch.of([SamplingParams(**params)] * 12)
    weights = tempered_weights(logits, batch)
    kept = library.filtered(weights, batch.top_k_X, batch.top_p_X, batch.min_p_X)
    torch.testing.assert_close(kept, filter_sorted(weights, batch), rtol=0, atol=0)


def test_each_row_is_filtered_by_its_own_settings() -> None:
    library = native_library()
    assert library is not None
    weights = torch.rand(3, 600, generator=torch.Generator().manual_seed(7))
    rows = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(min_p=0.5)]
    batch = ParamsBatch.of(rows)
    kept = library.filtered(weights, batch.top_k_X, batch.top_p_X, batch.min_p_X)
    assert [int(row.count_nonzero()) for row in kept] == [600, 3, int((weights[2] >= 0.5 * weights[2].max()).sum())]
