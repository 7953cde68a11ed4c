"""Greedy rows beside sampled ones, drafts in all of them: each is what it would be alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leadout.draft_length.controller import FixedLength
from leadout.records import Request, SamplingParams
from tests.equivalence.tiny_engines import (
    eagle3_drafter,
    engine,
    generate,
    ngram_drafter,
    ragged_requests,
    small_drafter,
    teacher_forced,
    tokens_of,
    trained_head,
)

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
LENGTH = 20
K = 4
NAMES = ["ngram", "eagle3", "eagle3-greedy", "small"]


@pytest.fixture(scope="module")
def head(llama, fused):
    return trained_head(llama, list(generate(engine(fused), ragged_requests(4, 1, temperature=0.0)).values()))


def make_drafter(name, llama, fused, head):
    if name == "ngram":
        return ngram_drafter(16)
    if name == "small":
        return small_drafter(llama, 16)
    return eagle3_drafter(head, fused, 16, greedy=name == "eagle3-greedy")


def mixed_requests() -> list[Request]:
    """The prompts that the head has learnt, one temperature each."""
    return [
        replace(request, params=SamplingParams(temperature=temperature, max_new_tokens=LENGTH, seed=9))
        for request, temperature in zip(ragged_requests(len(TEMPERATURES), 1), TEMPERATURES, strict=True)
    ]


@pytest.fixture(scope="module", params=NAMES)
def mixed(request, llama, fused, head):
    """A drafter's name and the rollouts of the mixed batch."""
    generator = engine(fused, make_drafter(request.param, llama, fused, head), FixedLength(K))
    return request.param, generate(generator, mixed_requests())


def greedy_rows(rollouts):
    return [r for r in rollouts.values() if TEMPERATURES[r.request_id.draw] == 0.0]


def test_rows_of_temperature_zero_in_a_mixed_batch_are_the_argmax(mixed, llama):
    rows = greedy_rows(mixed[1])
    assert len(rows) == 2
    for rollout in rows:
        logits_TV = teacher_forced(llama, rollout)
        assert rollout.token_ids.tolist() == logits_TV.argmax(-1).tolist()
        assert rollout.length == LENGTH
        assert not rollout.logprobs.any(), "the law of a greedy row is one token"
        expected = logits_TV.log_softmax(-1).amax(-1).numpy()
        np.testing.assert_allclose(rollout.policy_logprobs, expected, rtol=0, atol=1e-9)


def test_every_row_of_a_mixed_batch_is_what_it_is_alone(mixed, llama, fused, head):
    name, together = mixed
    for request in mixed_requests():
        alone = generate(engine(fused, make_drafter(name, llama, fused, head), K), [request])
        assert tokens_of(alone)[request.rollout_id] == together[request.rollout_id].token_ids.tolist()


def test_sampled_rows_of_a_mixed_batch_have_the_log_probabilities_of_their_temperature(mixed, llama):
    for rollout in mixed[1].values():
        temperature = TEMPERATURES[rollout.request_id.draw]
        if temperature:
            law_TV = (teacher_forced(llama, rollout) / temperature).log_softmax(-1)
            expected = law_TV.gather(-1, torch.from_numpy(rollout.token_ids.astype(np.int64))[:, None])[:, 0].numpy()
            np.testing.assert_allclose(rollout.logprobs, expected, rtol=0, atol=1e-9)
            np.testing.assert_allclose(rollout.policy_logprobs, expected, rtol=0, atol=1e-9)
            assert not np.array_equal(rollout.token_ids, law_TV.argmax(-1).numpy())


def test_counts_of_a_mixed_batch_are_never_negative_and_every_row_drafts(mixed):
    name, rollouts = mixed
    for rollout in rollouts.values():
        drafted, accepted = rollout.rounds.drafted, rollout.rounds.accepted
        assert ((accepted >= 0) & (accepted <= drafted) & (drafted <= K)).all()
        assert drafted.sum() > 0 or name == "ngram"
        assert 1 + int((accepted + 1).sum()) - rollout.length in (0, 1)
        assert np.isfinite(rollout.logprobs).all() and np.isfinite(rollout.policy_logprobs).all()
    assert accepted_in_all(greedy_rows(rollouts)) > 0
    assert accepted_in_all(rollouts.values()) < sum(int(r.rounds.drafted.sum()) for r in rollouts.values())


def accepted_in_all(rollouts) -> int:
    return sum(int(rollout.rounds.accepted.sum()) for rollout in rollouts)
