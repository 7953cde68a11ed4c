"""A filter or a penalty that rules a token out does so at every verified position, and a bias nobody has is refused.

The drafters here propose the token that is ruled out: wherever a rule were applied to the last position only, they
would get it through.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.errors import ConfigError
from leadout.interfaces import Draft
from leadout.recipe import load_recipe
from leadout.records import RolloutId, SamplingParams
from tests.rollout.exactness import many_requests, markov_law, run, sequence_probabilities, sequences_p_value, tokens_of
from tests.rollout.fakes import (
    OracleDrafter,
    TableDrafter,
    generate,
    make_engine,
    make_requests,
    markov_table,
    sequences,
)

VOCAB = 6
BANNED = 5
K = 4
MIN_P = 0.5


def table_with_a_weak_token() -> torch.Tensor:
    """Two likely tokens after every pair, and `BANNED` always at 0.45 of the most likely one."""
    table = torch.full((VOCAB, VOCAB, VOCAB), -8.0, dtype=torch.float64)
    first = torch.arange(VOCAB)[:, None] + torch.arange(VOCAB)
    table.scatter_(2, (first % (VOCAB - 1))[..., None], 0.0)
    table.scatter_(2, ((first + 2) % (VOCAB - 1))[..., None], -0.2)
    table[..., BANNED] = float(np.log(0.45))
    return table


WEAK = table_with_a_weak_token()


class OneWrongDrafter(OracleDrafter):
    """Point masses: the plain continuation, except `token` at one depth of every round."""

    def __init__(self, plain, depth: int, token: int) -> None:
        def script(rollout_id: RolloutId, position: int) -> int:
            tokens = plain[rollout_id].token_ids
            return int(tokens[position]) if position < tokens.size else 0

        super().__init__(script, 8)
        self.depth, self.token = depth, token

    def propose(self, slots, lengths_B, noise) -> Draft:
        draft = super().propose(slots, lengths_B, noise)
        draft.tokens_BK[:, self.depth : self.depth + 1] = self.token
        return draft


def test_without_min_p_the_weak_token_is_drawn_and_drafted_through():
    rollouts = generate(make_engine(WEAK)[0], make_requests(4, 4, max_new_tokens=20, seed=2))
    share = np.mean([rollout.token_ids == BANNED for rollout in rollouts.values()])
    assert 0.1 < share < 0.3
    drafter = OneWrongDrafter(rollouts, 0, BANNED)
    through = generate(make_engine(WEAK, drafter=drafter, draft_length=1)[0], make_requests(4, 2, max_new_tokens=20))
    assert sum(int(rollout.rounds.accepted.sum()) for rollout in through.values()) > 10


@pytest.mark.parametrize("depth", range(K))
def test_a_drafted_token_below_min_p_is_rejected_at_every_position_of_a_round(depth):
    requests = make_requests(3, 2, max_new_tokens=21, min_p=MIN_P, seed=2)
    plain = generate(make_engine(WEAK)[0], requests)
    drafter = OneWrongDrafter(plain, depth, BANNED)
    speculative = generate(make_engine(WEAK, drafter=drafter, draft_length=K)[0], requests)
    assert sequences(speculative) == sequences(plain)
    for key, rollout in speculative.items():
        assert BANNED not in rollout.token_ids
        reached = rollout.rounds.drafted > depth
        assert reached.sum() > 2
        assert rollout.rounds.accepted[reached].tolist() == [depth] * int(reached.sum())
        np.testing.assert_allclose(rollout.logprobs, plain[key].logprobs, rtol=0, atol=1e-12)


def test_a_flat_draft_never_gets_a_token_below_min_p_through_and_the_rest_follows_the_filtered_law():
    params = SamplingParams(min_p=MIN_P, max_new_tokens=5, seed=7, trace=True)
    q_VD = torch.full((VOCAB, VOCAB), 1.0 / VOCAB, dtype=torch.float64)
    engine, _ = make_engine(WEAK, num_slots=2000, max_len=16, drafter=TableDrafter(q_VD, 2000), draft_length=3)
    rollouts = run(engine, many_requests(8000, (0, 1), (params,)))
    law = markov_law(WEAK, params)
    assert law((0, 1))[BANNED] == 0.0 < law((0, 1)).max() < 0.6
    assert sequences_p_value(tokens_of(rollouts), sequence_probabilities(law, (0, 1), 5, VOCAB)) > 1e-6
    drafted_K, accepted_K = np.zeros(3, int), np.zeros(3, int)
    for rollout in rollouts:
        trace = rollout.trace
        assert trace is not None
        depth_D = trace.position_D - first_positions(rollout)[trace.round_D]
        banned_D = trace.draft_D == BANNED
        drafted_K += np.bincount(depth_D[banned_D], minlength=3)
        accepted_K += np.bincount(depth_D[banned_D & trace.accepted_D], minlength=3)
    assert drafted_K.min() > 100, "the banned token was proposed at each depth"
    assert accepted_K.tolist() == [0, 0, 0]


def first_positions(rollout) -> np.ndarray:
    """Index into the tokens at which each round starts; the first token has no round."""
    return 1 + np.concatenate([[0], np.cumsum(rollout.rounds.accepted + 1)[:-1]])


class SameTokenDrafter(TableDrafter):
    """Point masses: the newest token over and over, or one given token over and over."""

    def __init__(self, token: int | None = None) -> None:
        super().__init__(torch.eye(VOCAB), 8, greedy=True)
        self.token = token

    def propose(self, slots, lengths_B, noise) -> Draft:
        draft = super().propose(slots, lengths_B, noise)
        if self.token is not None:
            draft.tokens_BK.fill_(self.token)
        return draft


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafter",
    [
        lambda: SameTokenDrafter(),
        lambda: SameTokenDrafter(BANNED),
        lambda: TableDrafter(torch.full((VOCAB, VOCAB), 1 / VOCAB, dtype=torch.float64), 8),
    ],
    ids=["the newest token", "one token", "flat"],
)
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_token_that_a_penalty_rules_out_after_its_first_use_is_never_repeated(drafter, temperature, penalty):
    params = {penalty: 1000.0, "temperature": temperature, "max_new_tokens": VOCAB, "seed": 4}
    requests = make_requests(20, 2, **params)
    made = drafter()
    speculative = generate(make_engine(markov_table(), drafter=made, draft_length=K)[0], requests)
    assert sum(int(rollout.rounds.drafted.sum()) for rollout in speculative.values()) > 100
    assert {tuple(sorted(rollout.token_ids.tolist())) for rollout in speculative.values()} == {tuple(range(VOCAB))}
    if made.point_mass or temperature == 0.0:
        assert sequences(speculative) == sequences(generate(make_engine(markov_table())[0], requests))


def test_a_drafted_token_accepted_in_a_round_is_ruled_out_for_the_rest_of_the_round():
    requests = make_requests(40, 2, presence_penalty=1000.0, max_new_tokens=VOCAB, seed=4)
    engine, _ = make_engine(markov_table(), drafter=SameTokenDrafter(BANNED), draft_length=K)
    accepted = np.concatenate([rollout.rounds.accepted for rollout in generate(engine, requests).values()])
    assert set(accepted.tolist()) == {0, 1}


def test_a_bias_on_single_tokens_is_not_offered_and_refused_by_name(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("rollout: {logit_bias: {5: -100}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key rollout\.logit_bias") as refused:
        load_recipe(path, ())
    assert "\n" not in str(refused.value)
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias={5: -100.0})  # type: ignore[call-arg]
