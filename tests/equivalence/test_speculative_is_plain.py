"""Speculative generation equals plain generation, and both equal the transformers model they were made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.draft_length.controller import GoodputLength
from leadout.draft_length.costs import CostProfile
from leadout.drafters.head_drafter import HeadDrafter
from leadout.errors import ModelError
from leadout.interfaces import Drafter
from leadout.models.decoder import FusedDecoder
from leadout.models.loading import iter_weights, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.records import Finish
from tests.equivalence.tiny_engines import (
    MAX_LEN,
    accepted,
    drafted,
    eagle3_drafter,
    eagle3_head,
    engine,
    generate,
    history_drafter,
    ngram_drafter,
    ragged_requests,
    small_drafter,
    teacher_forced,
    tokens_of,
    trained_head,
    with_history,
)
from tests.models.tiny import decoder, policy

POINT_MASS = ["ngram", "history", "eagle3-greedy", "small-greedy", "history+eagle3-greedy"]
DRAFTERS = [*POINT_MASS, "eagle3", "small", "history+eagle3", "history+small"]
EVERY_LENGTH = [
    (name, k) for name in DRAFTERS for k in range(1, 9) if k in (1, 4, 8) or name in ("ngram", "eagle3", "small")
]
"""All lengths for one drafter of each kind, three for the others."""


@pytest.fixture(scope="module")
def head(llama, fused):
    rollouts = generate(engine(fused), ragged_requests(4, 1, temperature=0.0))
    return trained_head(llama, list(rollouts.values()))


def make_drafter(name: str, head, fused, num_slots: int = 16) -> Drafter:
    if name.startswith("history+"):
        return with_history(make_drafter(name.removeprefix("history+"), head, fused, num_slots), num_slots)
    if name == "ngram":
        return ngram_drafter(num_slots)
    if name == "history":
        return history_drafter(num_slots)
    if name.startswith("small"):
        return small_drafter(policy("llama", torch.float64), num_slots, greedy=name == "small-greedy")
    return eagle3_drafter(head, fused, num_slots, greedy=name == "eagle3-greedy")


@pytest.fixture(scope="module")
def plain_greedy(fused):
    return tokens_of(generate(engine(fused), ragged_requests(4, 4, temperature=0.0)))


@pytest.mark.parametrize(("name", "k"), EVERY_LENGTH)
def test_greedy_tokens_are_those_of_plain_decoding_in_a_batch_of_16(fused, head, plain_greedy, name, k):
    speculative = generate(engine(fused, make_drafter(name, head, fused), k), ragged_requests(4, 4, temperature=0.0))
    assert tokens_of(speculative) == plain_greedy
    assert drafted(speculative) > accepted(speculative) > 0


@pytest.mark.parametrize(("name", "k"), EVERY_LENGTH)
def test_greedy_tokens_are_those_of_plain_decoding_alone(fused, head, plain_greedy, name, k):
    request = ragged_requests(4, 4, temperature=0.0)[9]
    speculative = generate(engine(fused, make_drafter(name, head, fused, 1), k, num_slots=1), [request])
    assert tokens_of(speculative) == {request.rollout_id: plain_greedy[request.rollout_id]}


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", ["ngram", "eagle3", "eagle3-greedy"])
def test_a_qwen3_policy_decodes_greedily_to_the_same_tokens(name, k):
    model = policy("qwen3", torch.float64, seed=3)
    fused = decoder(model, MAX_LEN)
    requests = ragged_requests(8, 2, temperature=0.0)
    speculative = generate(engine(fused, make_drafter(name, eagle3_head(model, reduced=False), fused), k), requests)
    assert tokens_of(speculative) == tokens_of(generate(engine(fused), requests))


def test_looked_up_drafts_are_accepted_where_greedy_text_repeats(fused):
    requests = ragged_requests(8, 2, temperature=0.0, max_new_tokens=60)
    speculative = generate(engine(fused, ngram_drafter(16), 4), requests)
    assert accepted(speculative) > 50
    assert tokens_of(speculative) == tokens_of(generate(engine(fused), requests))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", POINT_MASS)
def test_point_mass_drafts_emit_the_tokens_of_plain_sampling(fused, head, name, k, temperature):
    requests = ragged_requests(5, 3, temperature=temperature, seed=5, stop_token_ids=(7, 30))
    speculative = generate(engine(fused, make_drafter(name, head, fused), k), requests)
    plain = generate(engine(fused), requests)
    assert tokens_of(speculative) == tokens_of(plain)
    assert drafted(speculative) > 0
    for key, rollout in speculative.items():
        np.testing.assert_allclose(rollout.logprobs, plain[key].logprobs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_repetition_penalty_acts_alike_with_and_without_drafts(fused, head, name):
    requests = ragged_requests(8, 2, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2)
    speculative = generate(engine(fused, make_drafter(name, head, fused), 4), requests)
    plain = tokens_of(generate(engine(fused), requests))
    assert tokens_of(speculative) == plain
    assert plain != tokens_of(generate(engine(fused), ragged_requests(8, 2, temperature=0.0)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_length_chosen_every_round_from_a_frozen_profile_keeps_greedy_tokens(fused, head, name):
    requests = ragged_requests(4, 4, temperature=0.0, max_new_tokens=60)
    costs = CostProfile({1: 1.0, 64: 1.5}, {1: 0.001, 16: 0.002}, frozen=True)
    controller = GoodputLength(5, costs)
    speculative = generate(engine(fused, make_drafter(name, head, fused), controller), requests)
    assert tokens_of(speculative) == tokens_of(generate(engine(fused), requests))
    lengths = np.concatenate([rollout.rounds.drafted for rollout in speculative.values()])
    assert lengths.max() > 0


def test_a_frozen_profile_gives_the_same_sampled_tokens_every_time(fused, head):
    requests = ragged_requests(4, 4, seed=2)
    costs = CostProfile({1: 1.0, 64: 1.5}, {1: 0.001, 16: 0.002}, frozen=True)
    first, second = (
        tokens_of(generate(engine(fused, eagle3_drafter(head, fused, 16), GoodputLength(5, costs)), requests))
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_fills_the_context_to_the_last_token(fused, head, name):
    requests = ragged_requests(6, 2, temperature=0.0, max_new_tokens=500)
    plain = generate(engine(fused), requests)
    speculative = generate(engine(fused, make_drafter(name, head, fused), 5), requests)
    assert tokens_of(speculative) == tokens_of(plain)
    assert {(len(r.prompt.token_ids) + r.length, r.finish) for r in speculative.values()} == {(MAX_LEN, Finish.CONTEXT)}


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_prefilled_in_pieces_decode_to_the_same_tokens(fused, head, plain_greedy, name):
    requests = ragged_requests(4, 4, temperature=0.0)
    pieces = engine(fused, make_drafter(name, head, fused), 3, prefill_tokens=4)
    assert tokens_of(generate(pieces, requests)) == plain_greedy


@pytest.mark.parametrize("name", DRAFTERS)
def test_slots_that_are_used_again_decode_to_the_same_tokens(fused, head, plain_greedy, name):
    few = engine(fused, make_drafter(name, head, fused, 3), 3, num_slots=3)
    assert tokens_of(generate(few, ragged_requests(4, 4, temperature=0.0))) == plain_greedy


@pytest.mark.parametrize("name", ["none", *DRAFTERS])
@pytest.mark.parametrize(
    "law",
    [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 12, "min_p": 0.05}],
)
def test_log_probabilities_are_those_of_the_transformers_model(llama, fused, head, name, law):
    drafter = None if name == "none" else make_drafter(name, head, fused)
    requests = ragged_requests(5, 3, seed=4, **law)
    rollouts = generate(engine(fused, drafter, 0 if name == "none" else 4), requests)
    assert (drafted(rollouts) > 0) == (name != "none")
    for rollout in rollouts.values():
        assert rollout.logprobs.shape == rollout.policy_logprobs.shape == rollout.token_ids.shape
        logits_TV = teacher_forced(llama, rollout) / law.get("temperature", 1.0)
        tokens_T1 = torch.from_numpy(rollout.token_ids.astype(np.int64))[:, None]
        policy_T = logits_TV.log_softmax(-1).gather(-1, tokens_T1)[:, 0]
        sampled_T = filtered(logits_TV, law).log_softmax(-1).gather(-1, tokens_T1)[:, 0]
        np.testing.assert_allclose(rollout.policy_logprobs, policy_T.numpy(), rtol=0, atol=1e-9)
        np.testing.assert_allclose(rollout.logprobs, sampled_T.numpy(), rtol=0, atol=1e-9)
        if law == {"temperature": 0.6}:
            # A trainer that recomputes at the sampling temperature finds a ratio of one on fresh weights.
            assert np.abs(np.exp(policy_T.numpy() - rollout.policy_logprobs) - 1).max() < 1e-8


def filtered(logits_TV: torch.Tensor, law: dict[str, float]) -> torch.Tensor:
    """transformers' own warpers in their order."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids = torch.zeros(logits_TV.shape[0], 1, dtype=torch.int64)
    if "top_k" in law:
        logits_TV = TopKLogitsWarper(int(law["top_k"]))(ids, logits_TV)
    if "top_p" in law:
        logits_TV = TopPLogitsWarper(law["top_p"])(ids, logits_TV)
    if "min_p" in law:
        logits_TV = MinPLogitsWarper(law["min_p"])(ids, logits_TV)
    return logits_TV


@pytest.mark.parametrize("name", ["none", *DRAFTERS])
def test_greedy_tokens_are_the_argmax_of_the_transformers_model(llama, fused, head, name):
    drafter = None if name == "none" else make_drafter(name, head, fused)
    rollouts = generate(engine(fused, drafter, 0 if name == "none" else 4), ragged_requests(4, 2, temperature=0.0))
    for rollout in rollouts.values():
        logits_TV = teacher_forced(llama, rollout)
        assert rollout.token_ids.tolist() == logits_TV.argmax(-1).tolist()
        expected = logits_TV.log_softmax(-1).amax(-1).numpy()
        np.testing.assert_allclose(rollout.policy_logprobs, expected, rtol=0, atol=1e-9)
        assert not rollout.logprobs.any()


@pytest.mark.integration
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_the_pretrained_model_decodes_greedily_alike_up_to_rounding(name, record_property):
    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"needs the small pretrained model: {error}")
    spec = DecoderSpec.from_config(read_config(path))
    fused = FusedDecoder(spec, dtype=torch.float32, max_len=64)
    weights = dict(iter_weights(path))
    fused.load(weights)
    requests = ragged_requests(2, 1, vocab_size=2000, temperature=0.0, max_new_tokens=24)
    drafter: Drafter = ngram_drafter(2, 64)
    if name == "eagle3":
        drafter = pretrained_drafter(spec, fused, weights)
    plain = generate(engine(fused, num_slots=2, max_len=64), requests)
    speculative = generate(engine(fused, drafter, 3, num_slots=2, max_len=64), requests)
    for key, rollout in plain.items():
        other = speculative[key].token_ids
        differs = np.flatnonzero(rollout.token_ids != other)
        record_property(f"first difference {tuple(key)}", int(differs[0]) if differs.size else "none")
        if differs.size:
            gap = top_two_gap(fused, rollout, int(differs[0]))
            assert gap < 1e-3, f"tokens part at {differs[0]} where the two best logits are {gap} apart"


def pretrained_drafter(spec: DecoderSpec, fused: FusedDecoder, weights: dict[str, torch.Tensor]) -> HeadDrafter:
    from leadout.build.drafter import new_head
    from leadout.config import Draft

    head = new_head(Draft(), fused, weights, [], seed=0, temperature=1.0, keep=())
    return eagle3_drafter(head.float(), fused, 2, max_len=64)


def top_two_gap(fused: FusedDecoder, rollout, position: int) -> float:
    """Between the two best logits at the position, computed over the whole prefix at once."""
    from leadout.models.kv import KVSlots

    prefix = np.concatenate([rollout.prompt.token_ids, rollout.token_ids[:position]]).astype(np.int64)
    kv = KVSlots(fused.spec, 1, 64, fused.dtype)
    states = fused.forward(torch.from_numpy(prefix)[None], kv, kv.allocate(1))
    best = fused.logits(states.hidden_BNH[0, -1:]).topk(2).values[0]
    return float(best[0] - best[1])
