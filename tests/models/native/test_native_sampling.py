from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from leadout.audit.fault_rules import shared_accept_rule, shared_draft_rule
from leadout.errors import ModelError
from leadout.interfaces import Draft, DraftProbs
from leadout.models.native.library import native_library
from leadout.models.native.rows import copy_rows
from leadout.models.randomness import philox4x32
from leadout.models.sampling import Law, ParamsBatch, filter_sorted, tempered_weights
from leadout.records import SamplingParams
from leadout.rollout.accept import AcceptRule, verify
from leadout.rollout.numbers import RoundNumbers
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


def judged_round(reduced: bool, rows: int = 3000, drafts: int = 3) -> tuple[Law, Draft, RoundNumbers]:
    """Rows with drafts from q, each of its own length; every position has a law of its own and a q near it."""
    generator = torch.Generator().manual_seed(2)
    ids_D = torch.randperm(700, generator=generator)[:300] if reduced else None
    logits_XV = padded(rows * (drafts + 1), 700)
    own_XD = logits_XV if ids_D is None else logits_XV[:, ids_D]
    near_XD = own_XD + 0.7 * torch.randn(own_XD.shape, generator=generator)
    q_BKD = near_XD.softmax(-1).view(rows, drafts + 1, -1)[:, :drafts].contiguous()
    columns_BK = torch.multinomial(q_BKD.flatten(0, 1), 1, generator=generator).view(rows, drafts)
    draft = Draft(
        tokens_BK=columns_BK if ids_D is None else ids_D[columns_BK],
        counts_B=np.arange(rows) % (drafts + 1),
        probs=DraftProbs(values_BKV=q_BKD, columns_BK=columns_BK, token_ids_V=ids_D),
    )
    keys = np.zeros(rows, np.uint64), np.arange(rows), np.zeros(rows, np.int64), np.full(rows, 5)
    law = Law.from_logits(logits_XV, ParamsBatch.of([SamplingParams()] * rows), drafts + 1)
    return law, draft, RoundNumbers(*keys, torch.device("cpu"), width=drafts + 3)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_judged_round_is_that_of_the_torch_operators(reduced: bool) -> None:
    law, draft, numbers = judged_round(reduced)
    wide = Law(law.weights_XV.double(), law.block_sums_XC.double(), law.total_X)
    found, expected = verify(law, draft, numbers), verify(wide, draft, numbers)
    rejected = expected.accepted_B < draft.counts_B
    assert 300 < rejected.sum() < 2700 and (draft.counts_B == 0).sum() == 750
    assert (found.accepted_B == expected.accepted_B).all()
    # float32 sums move a border between two tokens now and then.
    assert (found.next_B != expected.next_B).sum() <= 3


def test_where_nothing_is_left_of_p_the_correction_is_drawn_from_p() -> None:
    library = native_library()
    assert library is not None
    law = Law.from_logits(padded(1, 512).repeat(2, 1), ParamsBatch.of([SamplingParams()] * 2))
    q_11V, token_11 = law.probs(512)[None, :1], torch.zeros(1, 1, dtype=torch.int64)
    for uniform in (0.1, 0.5, 0.9):
        never, draw = np.full((1, 2), 1.1), np.full((1, 2), uniform)
        kept_1, next_1 = library.judge(
            (law.weights_XV, law.block_sums_XC, law.total_X),
            *(token_11, np.ones(1, np.int64), q_11V, token_11, None),
            (never, draw, never),
            1e-7,
        )
        assert kept_1.tolist() == [0]
        assert next_1 == law.rows(torch.tensor([0])).draw(torch.tensor([uniform], dtype=torch.float64))


@pytest.mark.parametrize("token_k", [0, 1, 2])
def test_a_law_that_is_not_finite_stops_the_round_where_it_was_drafted_from(token_k: int) -> None:
    law, draft, numbers = judged_round(reduced=True, rows=4)
    assert draft.probs is not None and draft.counts_B.tolist() == [0, 1, 2, 3]
    draft.probs.values_BKV[2, token_k, 250] = torch.nan
    wide = Law(law.weights_XV.double(), law.block_sums_XC.double(), law.total_X)
    for each in (law, wide):
        if token_k == 2:
            assert verify(each, draft, numbers).accepted_B[0] == 0
        else:
            with pytest.raises(ModelError, match="not finite"):
                verify(each, draft, numbers)


@pytest.mark.parametrize("wrong", [shared_accept_rule, shared_draft_rule])
def test_injected_numbers_reach_the_native_rule(wrong: Callable[[], AcceptRule]) -> None:
    law, draft, numbers = judged_round(reduced=False, rows=800)
    exact, found = verify(law, draft, numbers), wrong()(law, draft, numbers)
    rejected = torch.from_numpy(exact.accepted_B < draft.counts_B)
    assert (found.accepted_B == exact.accepted_B).all()
    assert (found.next_B != exact.next_B)[rejected].float().mean() > 0.3
    assert torch.equal(found.next_B[~rejected], exact.next_B[~rejected])


@pytest.mark.parametrize(("token", "column"), [(700, 0), (-1, 0), (0, 300), (0, -1)])
def test_drafts_outside_their_vocabulary_are_refused(token: int, column: int) -> None:
    law, draft, numbers = judged_round(reduced=True, rows=4)
    assert draft.probs is not None
    draft.tokens_BK[3, 0] = token if token != 700 else law.weights_XV.shape[1]
    draft.probs.columns_BK[3, 0] = column
    with pytest.raises(IndexError, match="outside the vocabulary"):
        verify(law, draft, numbers)


def test_log_probabilities_are_those_of_the_torch_operators() -> None:
    law = Law.from_logits(padded(5, 700), ParamsBatch.of([SamplingParams(temperature=0.8)] * 5))
    ids_X = torch.tensor([0, 699, 13, 512, 511])
    torch.testing.assert_close(law.logprob(ids_X), law.prob(ids_X).log(), rtol=1e-15, atol=0)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        law.logprob(torch.tensor([0, 1, 2, 3, 1024]))


def test_laws_of_a_vocabulary_smaller_than_a_block_are_left_to_the_torch_operators() -> None:
    law = Law.from_weights(padded(3, 300).exp_())
    ids_X = torch.tensor([0, 299, 7])
    torch.testing.assert_close(
        law.logprob(ids_X), law.probs(300).double().log()[torch.arange(3), ids_X], rtol=1e-6, atol=0
    )
    assert law.draw(torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float64])
def test_rows_are_copied_to_their_places(dtype: torch.dtype) -> None:
    target_ZF = torch.zeros(5, 3, dtype=dtype)
    source_YF = torch.arange(12).view(4, 3).to(dtype)
    copy_rows(target_ZF, np.array([4, 0]), source_YF, np.array([1, 3]))
    assert target_ZF.tolist() == [[9, 10, 11], [0, 0, 0], [0, 0, 0], [0, 0, 0], [3, 4, 5]]
    copy_rows(target_ZF, np.zeros(0, np.int64), source_YF, np.zeros(0, np.int64))
    with pytest.raises(IndexError, match="expected rows within 5 and 4"):
        copy_rows(target_ZF, np.array([5]), source_YF, np.array([0]))


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
