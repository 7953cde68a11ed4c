"""Rollouts follow the policy's law exactly, whatever drafts them: whole sequences over a tiny vocabulary."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leadout.draft_length.controller import Choice, RoundOutcome
from leadout.draft_length.load import Load
from leadout.drafters.head_drafter import HeadDrafter
from leadout.drafters.ngram import NgramDrafter
from leadout.interfaces import Draft, DraftProbs
from leadout.models import sampling
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.models.kv import KVSlots
from leadout.models.spec import DecoderSpec
from leadout.records import SamplingParams
from tests.equivalence.tiny_engines import eagle3_drafter, engine
from tests.models.eagle3_fakes import tiny_head, tiny_mtp_head
from tests.rollout.exactness import (
    joint_p_value,
    many_requests,
    markov_law,
    outcomes,
    positions_p_values,
    run,
    sequence_probabilities,
    sequences_p_value,
    slow_law,
    tokens_of,
)
from tests.rollout.fakes import TableDrafter, make_engine, markov_table

ROLLOUTS = 100_000
SLOTS = 4_000
VOCAB = 4
LENGTH = 4
PROMPT = (0, 1)
BIASED = 1e-6
TABLE = markov_table(VOCAB, seed=0, scale=1.2)
Q = markov_table(VOCAB, seed=1, scale=1.2)[0].softmax(-1)
PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.05}
ENDING = {"stop_token_ids": (3,)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Draws work on blocks of the vocabulary; small ones make a tiny vocabulary quick, and have several of them."""
    monkeypatch.setattr(sampling, "_BLOCK", 2)
    gc.disable()  # A hundred thousand small records at once; collecting among them takes longer than making them.
    yield
    gc.enable()


def params_of(**law) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": LENGTH, "seed": 11, **law})


def assert_exact(rollouts, params: SamplingParams, law=None, prompt=PROMPT, vocab_size=VOCAB) -> None:
    end = params.stop_token_ids[0] if params.stop_token_ids else None
    law = law or markov_law(TABLE, params)
    probabilities = sequence_probabilities(law, prompt, params.max_new_tokens, vocab_size, end)
    sequences = tokens_of(rollouts)
    assert sequences_p_value(sequences, probabilities) > BIASED
    assert min(positions_p_values(sequences, probabilities, vocab_size)) > BIASED


def markov_rollouts(drafter, k, *params, count=ROLLOUTS, prompt=PROMPT, slots=SLOTS, table=TABLE):
    generator, _ = make_engine(table, num_slots=slots, max_len=16, drafter=drafter, draft_length=k)
    return run(generator, many_requests(count, prompt, params))


@pytest.mark.parametrize("law", [PLAIN, FILTERED, PLAIN | ENDING, FILTERED | ENDING])
def test_whole_rollouts_with_sampled_drafts_follow_the_policy(law):
    params = params_of(**law)
    rollouts = markov_rollouts(TableDrafter(Q, SLOTS), 3, params)
    assert_exact(rollouts, params)
    policy = markov_law(TABLE, params)
    found = outcomes(rollouts)
    assert joint_p_value(found, policy, lambda context: Q[context[-1]].numpy(), PROMPT) > BIASED
    assert {kind for _, _, kind, _ in found} == {"accepted", "corrected", "bonus"}


def test_a_reduced_draft_vocabulary_emits_whole_rollouts_of_the_policy():
    params = params_of(**FILTERED)
    ids = torch.tensor([3, 1])
    q_V2 = markov_table(VOCAB, seed=2)[0][:, :2].softmax(-1)
    rollouts = markov_rollouts(TableDrafter(q_V2, SLOTS, ids), 2, params)
    assert_exact(rollouts, params)
    q_VV = np.zeros((VOCAB, VOCAB))
    q_VV[:, ids.numpy()] = q_V2.numpy()
    policy = markov_law(TABLE, params)
    assert joint_p_value(outcomes(rollouts), policy, lambda context: q_VV[context[-1]], PROMPT) > BIASED


@pytest.mark.parametrize("law", [PLAIN | ENDING, FILTERED])
def test_looked_up_drafts_emit_whole_rollouts_of_the_policy(law):
    params = params_of(**law)
    prompt = (0, 1, 2, 3, 0, 2, 1, 1, 0, 1)
    slots = 2_000
    drafter = NgramDrafter(num_slots=slots, max_len=32, min_ngram=1, max_ngram=3, device=torch.device("cpu"))
    rollouts = markov_rollouts(drafter, 2, params, prompt=prompt, slots=slots)
    assert_exact(rollouts, params, prompt=prompt)
    assert sum(int(r.rounds.accepted.sum()) for r in rollouts[:100]) > 10


def test_rows_of_different_laws_in_one_batch_each_follow_their_own():
    mixed = (params_of(), params_of(**FILTERED), params_of(temperature=0.0), params_of(temperature=1.5, **ENDING))
    rollouts = markov_rollouts(TableDrafter(Q, SLOTS), 3, *mixed, count=4 * 25_000)
    for index in (0, 1, 3):
        assert_exact(rollouts[index::4], mixed[index])
    assert len(set(tokens_of(rollouts[2::4]))) == 1


@pytest.mark.parametrize(
    ("kind", "count", "law"),
    [
        ("eagle3", ROLLOUTS, PLAIN),
        ("eagle3", ROLLOUTS, FILTERED),
        ("parallel", 25_000, PLAIN),
        ("parallel", 25_000, FILTERED),
        ("mtp", 25_000, PLAIN),
        ("mtp", 25_000, FILTERED),
    ],
)
def test_a_real_draft_head_on_a_real_decoder_emits_whole_rollouts_of_the_policy(kind, count, law):
    params = params_of(**law, max_new_tokens=3 if kind == "eagle3" else 4)
    fused, drafter = tiny_policy_and_drafter(kind)
    generator = engine(fused, drafter, 2, num_slots=SLOTS, max_len=16)
    rollouts = run(generator, many_requests(count, (0, 1, 4), [params]))
    assert_exact(rollouts, params, decoder_law(fused, params), prompt=(0, 1, 4), vocab_size=6)
    accepted = sum(int(rollout.rounds.accepted.sum()) for rollout in rollouts)
    assert 0.1 < accepted / sum(int(rollout.rounds.drafted.sum()) for rollout in rollouts) < 0.95


HEADS = {"eagle3": {"seed": 1}, "parallel": {"seed": 3, "mask_token_id": 5}}
"""Seeds whose drafts are neither always nor never accepted."""


def tiny_policy_and_drafter(kind: str) -> tuple[FusedDecoder, HeadDrafter]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=6,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).double()
    fused = FusedDecoder(DecoderSpec.from_config(config.to_dict()), dtype=torch.float64, max_len=16)
    fused.load(dict(model.named_parameters()))
    if kind == "mtp":
        head: DraftHead = tiny_mtp_head(seed=1, vocab_size=6)
    else:
        head = tiny_head(vocab_size=6, draft_vocab_size=6, **HEADS[kind])
    return fused, eagle3_drafter(head.double(), fused, SLOTS, max_len=16)


def decoder_law(fused: FusedDecoder, params: SamplingParams):
    """The decoder's own law after a context, computed over the whole context at once."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def law(context):
        key = tuple(context)
        if key not in known:
            kv = KVSlots(fused.spec, 1, 16, fused.dtype)
            states = fused.forward(torch.tensor([key]), kv, kv.allocate(1))
            known[key] = slow_law(fused.logits(states.hidden_BNH[0, -1:])[0].numpy(), params)
        return known[key]

    return law


def test_the_trace_splits_tokens_into_the_overlap_and_the_residual():
    params = params_of(trace=True, temperature=0.7)
    rollouts = markov_rollouts(TableDrafter(Q, SLOTS), 3, params, count=10_000)
    policy = markov_law(TABLE, params)
    found, from_outcomes = [], []
    for rollout in rollouts:
        trace = rollout.trace
        assert trace is not None and trace.probs_DV is not None
        tokens = tuple(rollout.token_ids.tolist())
        for row, position in enumerate(trace.position_D.tolist()):
            kind = "accepted" if trace.accepted_D[row] else "corrected"
            found.append((tokens[:position], 0, kind, tokens[position]))
        from_outcomes += [(o[0], 0, o[2], o[3]) for o in outcomes([rollout]) if o[2] != "bonus"]
    assert found == from_outcomes
    assert joint_p_value(found, policy, lambda context: Q[context[-1]].numpy(), PROMPT) > BIASED


IID_P = np.array([0.5, 0.3, 0.2])
IID_Q = np.array([0.2, 0.3, 0.5])
IID_TABLE = torch.from_numpy(IID_P).log().expand(3, 3, 3).contiguous()


class CuttingDrafter(TableDrafter):
    """Cuts its drafts; `keep(tokens_BK, probs_BK)` says how many of each row to keep."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(torch.from_numpy(IID_Q).expand(3, 3).contiguous(), num_slots)
        self.seen_S = np.zeros(num_slots, np.int64)

    def counts(self, slots, draft: Draft) -> np.ndarray:
        raise NotImplementedError

    def propose(self, slots, lengths_B, noise) -> Draft:
        draft = super().propose(slots, lengths_B, noise)
        return Draft(tokens_BK=draft.tokens_BK, counts_B=self.counts(slots, draft), probs=draft.probs)


class ConfidenceDrafter(CuttingDrafter):
    """Drops a draft that came out improbable: forbidden, since it decides by the token it has just drawn."""

    def counts(self, slots, draft: Draft) -> np.ndarray:
        assert isinstance(draft.probs, DraftProbs)
        confidence_BK = draft.probs.values_BKV.gather(-1, draft.probs.columns_BK[..., None])[..., 0].numpy()
        return np.minimum(np.logical_and.accumulate(confidence_BK >= 0.3, axis=1).sum(1), draft.counts_B)


class TailPeekingDrafter(CuttingDrafter):
    """Chooses the next length of a row by the last token it drafted for it before, rejected or not."""

    def counts(self, slots, draft: Draft) -> np.ndarray:
        counts_B = np.minimum(1 + self.seen_S[list(slots)], draft.counts_B)
        self.seen_S[list(slots)] = draft.tokens_BK[:, -1].numpy()
        return counts_B


class HistoryLength:
    """Chooses k from what was accepted in the rounds before, as wildly as it can."""

    def __init__(self) -> None:
        self.history = 0

    def choose(self, rows: int, load: Callable[[], Load] = Load) -> Choice:
        return Choice(self.history % 4, 1 + self.history % rows)

    def record(self, outcome: RoundOutcome) -> None:
        self.history = (5 * self.history + 1 + int(outcome.accepted_B.sum())) % 97

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state) -> None:
        pass


def iid_law(context) -> np.ndarray:
    return IID_P


def test_a_length_chosen_by_earlier_acceptances_cannot_bias():
    rollouts = markov_rollouts(
        TableDrafter(torch.from_numpy(IID_Q).expand(3, 3).contiguous(), SLOTS),
        HistoryLength(),
        params_of(),
        table=IID_TABLE,
        count=40_000,
    )
    assert_exact(rollouts, params_of(), iid_law, vocab_size=3)


def test_a_length_chosen_by_the_rejected_tail_of_the_round_before_cannot_bias():
    rollouts = markov_rollouts(TailPeekingDrafter(SLOTS), 3, params_of(max_new_tokens=5), table=IID_TABLE, count=40_000)
    assert_exact(rollouts, params_of(max_new_tokens=5), iid_law, vocab_size=3)


def test_a_draft_dropped_for_its_own_low_confidence_would_bias_and_these_tests_would_see_it():
    params = params_of(max_new_tokens=3)
    rollouts = markov_rollouts(ConfidenceDrafter(SLOTS), 1, params, table=IID_TABLE, count=20_000)
    sequences = tokens_of(rollouts)
    assert sequences_p_value(sequences, sequence_probabilities(iid_law, PROMPT, 3, 3)) < BIASED
    frequencies = np.bincount([s[1] for s in sequences], minlength=3) / len(sequences)
    np.testing.assert_allclose(frequencies, [0.4, 0.36, 0.24], atol=0.02)
