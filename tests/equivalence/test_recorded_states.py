"""States kept while rollouts are generated are those of a pass of the policy over the finished rollouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.drafters.recorder import StateRecorder
from leadout.errors import RefitError
from leadout.logprob.recorded import recorded_output
from leadout.records import Group, Score
from tests.equivalence.tiny_engines import engine, generate, ragged_requests, tokens_of
from tests.models.tiny import decoder, policy
from tests.train.learner_fakes import make_forward

TAPS = (1, 3)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def kept(request):
    model = policy(request.param, torch.float64)
    fused = decoder(model, 96)
    requests = ragged_requests(5, 3, temperature=0.7)
    recorder = StateRecorder((*TAPS, fused.spec.num_layers))
    rollouts = generate(engine(fused, recorder, num_slots=4), requests)
    return model, fused, requests, recorder, rollouts


def test_recording_changes_no_token(kept):
    _, fused, requests, _, rollouts = kept
    assert tokens_of(rollouts) == tokens_of(generate(engine(fused, num_slots=4), requests))


def test_a_recorded_pack_equals_a_pass_of_the_policy(kept):
    model, _, requests, recorder, rollouts = kept
    ordered = [rollouts[request.rollout_id] for request in requests]
    groups = [Group(prompt=r.prompt, rollouts=(r,), scores=(Score(reward=0.0, parts={}, text=""),)) for r in ordered]
    states = [recorder.take(r.request_id) for r in ordered]
    forward = make_forward(model, temperature=0.7, max_completions=4)
    for batch in forward.pack(groups, [np.zeros(1)] * len(groups)):
        first = batch.first_rollout
        got = recorded_output(forward, batch, states[first : first + len(batch.rollouts)])
        with torch.no_grad():
            expected = forward.run(batch, taps=TAPS)
        known_T = torch.isin(torch.arange(batch.num_tokens), batch.previous_T)
        assert int(known_T.sum()) == batch.num_tokens - len(batch.rollouts)
        for name in ("logprobs_R", "log_normalizer_R", "hidden_RH"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-7, atol=1e-7, msg=name)
        torch.testing.assert_close(got.taps_TF[known_T], expected.taps_TF[known_T], rtol=1e-7, atol=1e-7)


def test_states_are_handed_out_once(kept):
    _, fused, requests, _, _ = kept
    recorder = StateRecorder((fused.spec.num_layers,))
    generate(engine(fused, recorder), requests[:1])
    rollout_id = requests[0].rollout_id
    assert recorder.take(rollout_id).shape[1] == fused.spec.hidden_size
    with pytest.raises(KeyError):
        recorder.take(rollout_id)


def test_a_recorder_takes_no_weights():
    with pytest.raises(RefitError, match="no weights"):
        StateRecorder((1,)).load({"fc.weight": torch.zeros(1)}, 2)
