"""Whatever ends a rollout, and wherever in a block: tokens, log-probabilities and counts end together.

Axes: T tokens of a rollout.
"""

from __future__ import annotations

import numpy as np
import pytest

from leadout.pipeline.rollout_metrics import speculation_metrics
from leadout.records import Finish, RolloutId
from tests.rollout.fakes import OracleDrafter, generate, make_engine, make_requests, markov_table

TABLE = markov_table(12, scale=1.5)
PROMPT = (0, 1, 2)
ONE = RolloutId(0, 0)
BUDGET = 14


def free_rollout():
    """What the policy emits when nothing ends it early."""
    return generate(make_engine(TABLE)[0], make_requests(1, prompt=PROMPT, max_new_tokens=BUDGET, seed=6))[ONE]


FREE = free_rollout()
TOKENS = FREE.token_ids.tolist()


def oracle(wrong_every: int | None = None) -> OracleDrafter:
    """Drafts what the policy will emit, but for every n-th position."""

    def script(_: RolloutId, position: int) -> int:
        token = TOKENS[position] if position < BUDGET else 0
        return (token + 1) % 12 if wrong_every and position % wrong_every == wrong_every - 1 else token

    return OracleDrafter(script, 8)


def first_uses() -> list[int]:
    """Positions whose token was not emitted before: declared to be an end, each would end the rollout there."""
    return [i for i, token in enumerate(TOKENS) if token not in TOKENS[:i]]


def speculate(k: int, wrong_every: int | None = None, *, max_len: int = 64, **params):
    engine, _ = make_engine(TABLE, drafter=oracle(wrong_every) if k else None, draft_length=k, max_len=max_len)
    requests = make_requests(1, prompt=PROMPT, **{"max_new_tokens": BUDGET, "seed": 6, **params})
    return generate(engine, requests)[ONE]


def log_probabilities(tokens) -> list[float]:
    """Of the scripted policy, token by token."""
    context = [*PROMPT[-2:], *tokens]
    return [float(TABLE[a, b].log_softmax(-1)[c]) for a, b, c in zip(context, context[1:], context[2:])]


def assert_whole(rollout, length: int) -> None:
    """`length` tokens, each with both log-probabilities and none of padding; rounds that add up to them."""
    assert rollout.token_ids.tolist() == TOKENS[:length]
    assert rollout.logprobs.shape == rollout.policy_logprobs.shape == rollout.loss_mask.shape == (length,)
    np.testing.assert_allclose(rollout.logprobs, log_probabilities(TOKENS[:length]), rtol=0, atol=1e-9)
    np.testing.assert_allclose(rollout.policy_logprobs, rollout.logprobs, rtol=0, atol=1e-12)
    committed = 1 + int((rollout.rounds.accepted + 1).sum())
    assert committed - 1 <= length <= committed, "only the last round may lack its correction or bonus"
    assert (rollout.rounds.accepted <= rollout.rounds.drafted).all()


EITHER = pytest.mark.parametrize("wrong_every", [None, 2, 3], ids=["all accepted", "every 2nd", "every 3rd"])


@EITHER
@pytest.mark.parametrize("k", range(6))
def test_every_token_has_its_log_probabilities_when_an_end_token_comes_anywhere_in_a_block(k, wrong_every):
    inside = 0
    for at in first_uses():
        rollout = speculate(k, wrong_every, stop_token_ids=(TOKENS[at],))
        assert_whole(rollout, at + 1)
        assert (rollout.finish, rollout.stop) == (Finish.EOS, TOKENS[at])
        if rollout.rounds.drafted.size:
            inside += int(rollout.rounds.accepted[-1] < rollout.rounds.drafted[-1])
    assert len(first_uses()) > 5
    assert k < 2 or inside > 0, "some end lay in the middle of a block"


@EITHER
@pytest.mark.parametrize("k", range(6))
def test_every_token_has_its_log_probabilities_when_the_length_runs_out(k, wrong_every):
    for length in range(1, BUDGET + 1):
        rollout = speculate(k, wrong_every, max_new_tokens=length)
        assert_whole(rollout, length)
        assert rollout.finish is Finish.LENGTH


@EITHER
@pytest.mark.parametrize("k", range(6))
def test_every_token_has_its_log_probabilities_when_a_stop_string_is_completed(k, wrong_every):
    text = "".join(chr(97 + token) for token in TOKENS)
    for at in range(1, BUDGET):
        stop = text[at - 1 : at + 1]
        rollout = speculate(k, wrong_every, stop=(stop,))
        assert_whole(rollout, text.index(stop) + 2)
        assert (rollout.finish, rollout.stop) == (Finish.STOP, stop)


@EITHER
@pytest.mark.parametrize("k", range(6))
def test_every_token_has_its_log_probabilities_when_the_context_is_full(k, wrong_every):
    for room in range(1, BUDGET):
        rollout = speculate(k, wrong_every, max_len=len(PROMPT) + room)
        assert_whole(rollout, room)
        assert rollout.finish is Finish.CONTEXT


@EITHER
@pytest.mark.parametrize("k", range(9))
def test_an_answer_that_just_fits_the_context_is_not_cut_earlier_for_speculation(k, wrong_every):
    for length in range(1, BUDGET + 1):
        rollout = speculate(k, wrong_every, max_new_tokens=length, max_len=len(PROMPT) + length)
        assert_whole(rollout, length)
        assert rollout.finish is Finish.LENGTH, "its own length ended it, as without speculation"


def test_drafts_shrink_to_the_room_that_is_left():
    drafted = speculate(4, max_len=len(PROMPT) + BUDGET).rounds.drafted
    # The prefill's token, two rounds of five, and a last one of three: two drafts and the bonus.
    assert drafted.tolist() == [4, 4, 2]


def test_a_block_of_five_drafts_with_its_end_at_the_third_commits_three_tokens():
    at = next(i for i in first_uses() if i == 3)
    rollout = speculate(5, stop_token_ids=(TOKENS[at],))
    assert (rollout.length, rollout.finish) == (4, Finish.EOS)
    assert (rollout.rounds.drafted.tolist(), rollout.rounds.accepted.tolist()) == ([5], [3])
    metrics = speculation_metrics([rollout])
    assert metrics["spec/acceptance_length"] == 3.0
    assert metrics["spec/num_accepted_tokens"] == 3
    assert [metrics[f"spec/acceptance_rate_pos_{i}"] for i in range(1, 6)] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_acceptance_lengths_of_many_ends_are_the_committed_tokens_over_the_rounds():
    for at in first_uses()[1:]:
        rollout = speculate(5, stop_token_ids=(TOKENS[at],), max_new_tokens=3 * BUDGET)
        assert (rollout.rounds.drafted == 5).all()
        # The prefill's token is in no round; `at` tokens came after it.
        assert speculation_metrics([rollout])["spec/acceptance_length"] == at / rollout.rounds.drafted.size
