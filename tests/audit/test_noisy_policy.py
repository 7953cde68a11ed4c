import numpy as np
import torch

from leadout.drafters.noisy_policy import NoisyPolicyDrafter
from leadout.models.kv import KVSlots
from leadout.records import SamplingParams
from leadout.rollout.engine import NativeGenerator
from tests.audit.tiny_engine import EOS, MAX_LEN, SLOTS, VOCAB, make_decoder, make_parts, make_requests

PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,), trace=True, seed=1)


def generate(noise):
    decoder = make_decoder(torch.float64)
    engine = NativeGenerator(make_parts(decoder, noise=noise), num_slots=SLOTS, apply_update=None)
    engine.submit(make_requests(PARAMS, 12))
    found = []
    while rollouts := engine.collect():
        found += rollouts
    return found


def test_acceptance_lies_between_60_and_80_per_cent_and_hardly_falls_with_position():
    traces = [rollout.trace for rollout in generate(0.8)]
    accepted = np.concatenate([trace.accepted_D for trace in traces])
    assert 0.55 < accepted.mean() < 0.85
    depth = np.concatenate(
        [np.arange(trace.round_D.size) - np.searchsorted(trace.round_D, trace.round_D) for trace in traces]
    )
    rates = [accepted[depth == d].mean() for d in range(3)]
    assert max(rates) - min(rates) < 0.2


def test_without_noise_only_the_missing_vocabulary_is_rejected():
    rollouts = generate(0.0)
    accepted = np.concatenate([rollout.trace.accepted_D for rollout in rollouts])
    corrections = np.concatenate([r.token_ids[r.trace.position_D[~r.trace.accepted_D]] for r in rollouts])
    assert accepted.mean() > 0.8
    assert np.all(corrections % 8 == 5)


class Numbers:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def draft_uniforms(self, depth):
        return torch.from_numpy(self.rng.random(2))


def test_a_rejected_draft_leaves_no_trace_in_the_drafters_cache():
    decoder = make_decoder(torch.float64)
    drafts = []
    for detours in (0, 3):
        kv = KVSlots(decoder.spec, SLOTS, MAX_LEN, torch.float64)
        drafter = NoisyPolicyDrafter(decoder, kv, vocab_size=VOCAB, hidden_size=32)
        drafter.admit([4, 9], make_requests(PARAMS, 1, 2), None)
        drafter.observe([4, 9], torch.tensor([[7], [8]]), np.ones(2, np.int64), None)
        for detour in range(detours):
            drafter.propose([4, 9], np.full(2, 4), Numbers(100 + detour))
            drafter.observe([4, 9], torch.tensor([[11], [12]]), np.ones(2, np.int64), None)
        if not detours:
            for _ in range(3):
                drafter.observe([4, 9], torch.tensor([[11], [12]]), np.ones(2, np.int64), None)
        drafts.append(drafter.propose([4, 9], np.full(2, 3), Numbers(5)))
        drafter.release([4, 9])
        assert kv.num_free == SLOTS
    torch.testing.assert_close(drafts[0].probs.values_BKV, drafts[1].probs.values_BKV, atol=1e-12, rtol=0)
    assert torch.equal(drafts[0].tokens_BK, drafts[1].tokens_BK)
