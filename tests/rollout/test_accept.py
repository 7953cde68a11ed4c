import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leadout.interfaces import Draft, DraftProbs
from leadout.models.randomness import Purpose, uniforms
from leadout.models.sampling import Law
from leadout.rollout.accept import acceptance_probability, residual, verify
from leadout.rollout.numbers import RoundNumbers

DRAWS = 200_000


def numbers_for(rows: int, seed: int = 0) -> RoundNumbers:
    return RoundNumbers(
        np.full(rows, seed, np.uint64),
        np.arange(rows, dtype=np.int64),
        np.zeros(rows, np.int64),
        np.full(rows, 7, np.int64),
        torch.device("cpu"),
    )


def sampled_draft(q_KV: torch.Tensor, rows: int, numbers: RoundNumbers, token_ids=None) -> Draft:
    columns = []
    for depth, q_V in enumerate(q_KV):
        columns.append(Law.from_weights(q_V.expand(rows, -1)).draw(numbers.draft_uniforms(depth)))
    columns_BK = torch.stack(columns, 1)
    tokens = columns_BK if token_ids is None else token_ids[columns_BK]
    probs = DraftProbs(values_BKV=q_KV.expand(rows, -1, -1), columns_BK=columns_BK, token_ids_V=token_ids)
    return Draft(tokens_BK=tokens, counts_B=np.full(rows, len(q_KV), np.int64), probs=probs)


def law_of(p_NV: torch.Tensor, rows: int) -> Law:
    return Law.from_weights(p_NV.repeat(rows, 1))


def assert_follows(tokens: np.ndarray, p: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=p.size)
    assert counts[p == 0].sum() == 0
    keep = p > 0
    if keep.sum() == 1:
        return
    assert stats.chisquare(counts[keep], p[keep] / p[keep].sum() * counts.sum()).pvalue > 1e-6


PAIRS = [
    ([0.1, 0.2, 0.3, 0.25, 0.15], [0.5, 0.1, 0.1, 0.2, 0.1]),
    ([0.3, 0.2, 0.3, 0.2, 0.0], [0.1, 0.5, 0.2, 0.2, 0.0]),
    ([0.6, 0.4, 0.0, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0, 0.0]),
    ([0.51, 0.49, 0.0, 0.0, 0.0], [0.51, 0.49, 0.0, 0.0, 0.0]),
    ([0.0, 0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_first_token_of_a_sampled_round_follows_the_policy(p, q):
    p_V, q_V = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    numbers = numbers_for(DRAWS)
    draft = sampled_draft(q_V[None], DRAWS, numbers)
    verdict = verify(law_of(p_V.expand(2, -1), DRAWS), draft, numbers)
    first = np.where(verdict.accepted_B > 0, draft.tokens_BK[:, 0].numpy(), verdict.next_B.numpy())
    assert_follows(first, p_V.numpy())


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_accepted_tokens_follow_min_p_q_and_corrections_the_residual(p, q):
    p_V, q_V = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    numbers = numbers_for(DRAWS, seed=1)
    draft = sampled_draft(q_V[None], DRAWS, numbers)
    verdict = verify(law_of(p_V.expand(2, -1), DRAWS), draft, numbers)
    accepted = verdict.accepted_B > 0
    overlap = np.minimum(p_V.numpy(), q_V.numpy())
    assert stats.binomtest(int(accepted.sum()), DRAWS, min(1.0, float(overlap.sum()))).pvalue > 1e-6
    if accepted.any():
        assert_follows(draft.tokens_BK[accepted, 0].numpy(), overlap)
    if not accepted.all():
        assert_follows(verdict.next_B.numpy()[~accepted], np.clip(p_V.numpy() - q_V.numpy(), 0, None))


def test_every_position_of_a_long_round_follows_the_policy_given_the_ones_before():
    generator = torch.Generator().manual_seed(0)
    p_NV = torch.rand(4, 6, dtype=torch.float64, generator=generator).softmax(-1)
    q_KV = torch.rand(3, 6, dtype=torch.float64, generator=generator).mul(2).softmax(-1)
    numbers = numbers_for(DRAWS, seed=2)
    draft = sampled_draft(q_KV, DRAWS, numbers)
    verdict = verify(law_of(p_NV, DRAWS), draft, numbers)
    tokens = torch.nn.functional.pad(draft.tokens_BK, (0, 1)).numpy()
    tokens[np.arange(DRAWS), verdict.accepted_B] = verdict.next_B.numpy()
    for position in range(4):
        reached = verdict.accepted_B >= position
        assert_follows(tokens[reached, position], p_NV[position].numpy())


def test_a_reduced_draft_vocabulary_still_emits_every_token():
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)
    numbers = numbers_for(DRAWS, seed=3)
    draft = sampled_draft(torch.tensor([[0.7, 0.3]], dtype=torch.float64), DRAWS, numbers, torch.tensor([3, 1]))
    verdict = verify(law_of(p_V.expand(2, -1), DRAWS), draft, numbers)
    first = np.where(verdict.accepted_B > 0, draft.tokens_BK[:, 0].numpy(), verdict.next_B.numpy())
    assert_follows(first, p_V.numpy())
    rejected = verdict.accepted_B == 0
    assert_follows(verdict.next_B.numpy()[rejected], np.array([0.1, 0.0, 0.3, 0.0, 0.15]))


def test_a_point_mass_draft_is_accepted_with_its_probability_and_the_rest_follows_p_without_it():
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    tokens = torch.full((DRAWS, 1), 2)
    draft = Draft(tokens_BK=tokens, counts_B=np.ones(DRAWS, np.int64), probs=None)
    verdict = verify(law_of(p_V.expand(2, -1), DRAWS), draft, numbers_for(DRAWS, seed=4))
    accepted = verdict.accepted_B == 1
    assert stats.binomtest(int(accepted.sum()), DRAWS, 0.3).pvalue > 1e-6
    assert_follows(verdict.next_B.numpy()[~accepted], np.array([0.1, 0.2, 0.0, 0.4]))
    assert_follows(verdict.next_B.numpy()[accepted], p_V.numpy())


def test_a_point_mass_round_emits_the_tokens_plain_decoding_would():
    p_NV = torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = 500
    numbers = numbers_for(rows, seed=5)
    plain = torch.stack(
        [Law.from_weights(p_NV[i].expand(rows, -1)).draw(numbers.token_uniforms(3)[:, i]) for i in range(3)], 1
    )
    draft = Draft(tokens_BK=plain[:, :2].clone(), counts_B=np.full(rows, 2, np.int64), probs=None)
    draft.tokens_BK[::2, 1] = (draft.tokens_BK[::2, 1] + 1) % 8
    verdict = verify(law_of(p_NV, rows), draft, numbers)
    assert verdict.accepted_B.tolist() == [1, 2] * (rows // 2)
    assert verdict.next_B.tolist() == plain[np.arange(rows), verdict.accepted_B].tolist()


def test_rows_that_reject_at_different_places_do_not_touch_each_other():
    p = torch.zeros(2, 4, 5, dtype=torch.float64)
    p[0, 0, 4] = 1.0  # row 0 rejects at once
    p[0, 1:, 0] = 1.0
    p[1, 0, 1] = p[1, 1, 2] = p[1, 2, 4] = p[1, 3, 0] = 1.0  # row 1 accepts two, then rejects
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    values = torch.zeros(2, 3, 5, dtype=torch.float64).scatter_(2, tokens[..., None], 1.0)
    draft = Draft(
        tokens_BK=tokens,
        counts_B=np.array([3, 3]),
        probs=DraftProbs(values_BKV=values, columns_BK=tokens, token_ids_V=None),
    )
    verdict = verify(Law.from_weights(p.reshape(8, 5)), draft, numbers_for(2))
    assert verdict.accepted_B.tolist() == [0, 2]
    assert verdict.next_B.tolist() == [4, 4]


def test_rows_with_fewer_drafts_end_at_their_own_count():
    p_V = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tokens = torch.ones(3, 2, dtype=torch.int64)
    values = torch.zeros(3, 2, 3, dtype=torch.float64)
    values[..., 1] = 1.0
    draft = Draft(
        tokens_BK=tokens,
        counts_B=np.array([0, 1, 2]),
        probs=DraftProbs(values_BKV=values, columns_BK=tokens, token_ids_V=None),
    )
    verdict = verify(law_of(p_V.expand(3, -1), 3), draft, numbers_for(3))
    assert verdict.accepted_B.tolist() == [0, 1, 2]
    assert verdict.next_B.tolist() == [1, 1, 1]


def test_a_greedy_row_keeps_a_draft_only_if_it_is_the_argmax():
    one_hot = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    q_V = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    numbers = numbers_for(3000, seed=6)
    draft = sampled_draft(q_V[None], 3000, numbers)
    verdict = verify(law_of(one_hot.expand(2, -1), 3000), draft, numbers)
    assert (verdict.accepted_B == (draft.tokens_BK[:, 0] == 1).numpy()).all()
    assert (verdict.next_B == 1).all()


def test_the_residual_of_equal_laws_falls_back_to_p():
    p = torch.tensor([[0.25, 0.75]])
    assert residual(p, p.clone()).tolist() == [[0.25, 0.75]]


laws = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4).filter(lambda w: sum(w) > 0.05)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(p=laws, q=laws)
def test_accepting_and_correcting_together_give_p_for_any_p_and_q(p, q):
    p_V = torch.tensor(p, dtype=torch.float64) / sum(p)
    q_V = torch.tensor(q, dtype=torch.float64) / sum(q)
    drawn = q_V > 0
    accept = torch.zeros(4, dtype=torch.float64)
    accept[drawn] = acceptance_probability(p_V[drawn], q_V[drawn])
    rest = residual(p_V[None], q_V[None])[0]
    emitted = q_V * accept + (1 - (q_V * accept).sum()) * rest / rest.sum()
    torch.testing.assert_close(emitted, p_V, rtol=0, atol=1e-6)


def test_accept_correction_and_draft_numbers_are_independent_streams():
    rows = 50_000
    numbers = numbers_for(rows)
    streams = [
        numbers.draft_uniforms(0).numpy(),
        numbers.accept_uniforms(1)[:, 0].numpy(),
        numbers.residual_uniforms(np.zeros(rows, np.int64)).numpy(),
        numbers.token_uniforms(1)[:, 0].numpy(),
    ]
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(rows)


def test_a_position_drafted_again_in_a_later_round_gets_new_numbers():
    column = np.array([3], np.int64)
    one = np.ones(1, np.int64)
    first = uniforms(one, one, one, column, Purpose.DRAFT, np.array([2]))
    again = uniforms(one, one, one, column, Purpose.DRAFT, np.array([3]))
    assert first[0] != again[0]
