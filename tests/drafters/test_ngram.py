from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.drafters.ngram import NgramDrafter
from leadout.errors import ConfigError
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.fakes import make_rollout
from tests.rollout.fakes import generate, make_engine, make_requests, markov_table, sequences


class NoNoise:
    def draft_uniforms(self, depth: int) -> torch.Tensor:
        raise AssertionError("looked-up drafts need no random numbers")


def drafter(*prompts, low=1, high=3, num_slots=4) -> NgramDrafter:
    made = NgramDrafter(num_slots=num_slots, max_len=64, min_ngram=low, max_ngram=high, device=torch.device("cpu"))
    for slot, tokens in enumerate(prompts):
        admit(made, slot, tokens)
    return made


def admit(made: NgramDrafter, slot: int, tokens) -> None:
    prompt = Prompt(id=f"{slot}", token_ids=np.array(tokens, np.int32), text="")
    request = Request(rollout_id=RolloutId(slot, 0), prompt=prompt, params=SamplingParams())
    made.admit([slot], [request], None)


def proposals(made: NgramDrafter, *lengths) -> list[list[int]]:
    draft = made.propose(list(range(len(lengths))), np.array(lengths, np.int64), NoNoise())
    assert draft.probs is None
    return [draft.tokens_BK[b, :count].tolist() for b, count in enumerate(draft.counts_B)]


@pytest.mark.parametrize(
    ("tokens", "low", "high", "length", "expected"),
    [
        ([5], 1, 3, 4, []),
        ([5, 6], 3, 3, 4, []),
        ([1, 2, 3, 4, 5], 1, 3, 4, []),
        ([1, 2, 9, 8, 1, 2], 3, 3, 2, []),
        ([5, 5], 1, 1, 3, [5]),
        ([1, 2, 7, 8, 9, 2, 4, 4, 4, 1, 2], 1, 3, 3, [7, 8, 9]),
        ([1, 2, 7, 8, 9, 2, 4, 4, 4, 1, 2], 1, 1, 3, [4, 4, 4]),
        ([1, 6, 6, 6, 1, 7, 7, 7, 1], 1, 1, 3, [7, 7, 7]),
        ([1, 6, 6, 6, 1, 7, 1], 1, 1, 3, [6, 6, 6]),
        ([1, 6, 6, 6, 1, 7, 1], 1, 1, 2, [7, 1]),
        ([1, 2, 1], 1, 1, 5, [2, 1]),
        ([4, 4, 4, 4], 1, 3, 2, [4]),
        ([1, 2, 3, 1, 2], 1, 3, 0, []),
    ],
    ids=[
        "one token",
        "shorter than the shortest n-gram",
        "every token once",
        "only a shorter n-gram matches",
        "a pair",
        "the longest suffix wins",
        "unless it is not asked for",
        "the latest occurrence wins",
        "if enough follows it",
        "for the length asked for",
        "else what there is",
        "an occurrence may overlap the suffix",
        "nothing asked for",
    ],
)
def test_what_followed_the_longest_suffix_last_time_is_proposed(tokens, low, high, length, expected):
    assert proposals(drafter(tokens, low=low, high=high), length) == [expected]


def test_rows_without_a_match_draft_nothing_among_rows_that_do():
    made = drafter([1, 2, 3, 1, 2], [1, 2, 3, 4], [7, 8, 7])
    assert proposals(made, 2, 2, 2) == [[3, 1], [], [8, 7]]


def test_committed_tokens_and_no_others_are_remembered():
    made = drafter([1, 2], [3, 4])
    made.observe([0, 1], torch.tensor([[3, 1, 9], [3, 9, 9]]), np.array([2, 1]), None)
    assert proposals(made, 2, 2) == [[2, 3], [4, 3]]


def test_tokens_given_to_a_row_count_as_its_own():
    made = drafter()
    prompt = Prompt(id="p", token_ids=np.array([1, 2], np.int32), text="")
    given = make_rollout(tokens=(7, 8, 9), prompt=prompt)
    made.admit([0], [Request(rollout_id=RolloutId(0, 0), prompt=prompt, params=SamplingParams(), given=given)], None)
    made.observe([0], torch.tensor([[2]]), np.array([1]), None)
    assert proposals(made, 2) == [[7, 8]]


def test_a_slot_starts_anew_after_its_release():
    made = drafter([1, 2, 3, 1, 2])
    made.release([0])
    admit(made, 0, [2, 5])
    assert proposals(made, 3) == [[]]


def test_rows_with_and_without_matches_keep_their_tokens_and_log_probabilities():
    table = markov_table(scale=2.0)
    requests = [
        *make_requests(1, 2, prompt=(0, 1, 2, 0, 1), max_new_tokens=12),
        *make_requests(1, 2, prompt=(3,), first_draw=1, max_new_tokens=12),
        *make_requests(1, 1, prompt=(4, 5), first_draw=2, max_new_tokens=12),
    ]
    plain = generate(make_engine(table)[0], requests)
    engine, _ = make_engine(table, drafter=drafter(num_slots=8), draft_length=3)
    speculative = generate(engine, requests)
    assert sequences(speculative) == sequences(plain)
    for key, rollout in speculative.items():
        np.testing.assert_allclose(rollout.logprobs, plain[key].logprobs, rtol=0, atol=1e-12)
    drafted = np.array([rollout.rounds.drafted.sum() for rollout in speculative.values()])
    assert drafted.max() > drafted.min()


def test_a_round_in_which_no_row_matches_is_a_plain_step():
    engine, decoder = make_engine(markov_table(), drafter=drafter(num_slots=8, low=3), draft_length=3)
    (rollout,) = generate(engine, make_requests(1, prompt=(3,), max_new_tokens=3)).values()
    assert rollout.rounds.drafted.tolist() == [0, 0]
    assert decoder.forward_widths == [(1, 1)] * 3


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2)])
def test_impossible_sizes_are_refused(low, high):
    with pytest.raises(ConfigError, match=rf"prompt_lookup_min .* got {low} and {high}"):
        drafter(low=low, high=high)


def test_weights_are_refused():
    made = drafter()
    made.load({}, 1)
    with pytest.raises(ConfigError, match="takes no weights, got 1"):
        made.load({"x": torch.zeros(1)}, 1)
