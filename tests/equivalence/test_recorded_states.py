"""States kept while rollouts are generated are those of a pass of the policy over the finished rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leadout.drafters.recorder import StateRecorder
from leadout.errors import RefitError
from leadout.logprob.recorded import recorded_output
from leadout.records import Finish, Group, Score
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


def assert_recomputed(model, rollouts, states):
    """The recorded states of these rollouts give what a pass of the policy gives."""
    score = Score(reward=0.0, parts={}, text="")
    groups = [Group(prompt=rollout.prompt, rollouts=(rollout,), scores=(score,)) for rollout in rollouts]
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


def test_a_recorded_pack_equals_a_pass_of_the_policy(kept):
    model, _, requests, recorder, rollouts = kept
    ordered = [rollouts[request.rollout_id] for request in requests]
    assert_recomputed(model, ordered, [recorder.take(rollout.request_id) for rollout in ordered])


ENDS = [
    {"max_new_tokens": 9},
    {"stop_token_ids": tuple(range(0, 97, 3))},
    {"max_new_tokens": 1},
    {"stop_token_ids": tuple(range(97))},
]
"""By length, by an end token, and each of them at the first token."""


def test_states_end_before_the_last_token_whatever_ended_the_rollout(kept):
    model, fused, _, _, _ = kept
    requests = [
        replace(request, params=replace(request.params, **ENDS[request.rollout_id.sibling]))
        for request in ragged_requests(5, len(ENDS), temperature=0.7)
    ]
    recorder = StateRecorder((*TAPS, fused.spec.num_layers))
    rollouts = list(generate(engine(fused, recorder, num_slots=6), requests).values())
    states = [recorder.take(rollout.request_id) for rollout in rollouts]
    for rollout, states_XF in zip(rollouts, states, strict=True):
        assert states_XF.shape[0] == len(rollout.prompt.token_ids) + rollout.length - 1
    by_sibling = [rollouts[sibling :: len(ENDS)] for sibling in range(len(ENDS))]
    assert {rollout.finish for rollout in by_sibling[0]} == {Finish.LENGTH}
    assert any(rollout.finish is Finish.EOS and 1 < rollout.length < 24 for rollout in by_sibling[1])
    assert {(rollout.finish, rollout.length) for rollout in by_sibling[2]} == {(Finish.LENGTH, 1)}
    assert {(rollout.finish, rollout.length) for rollout in by_sibling[3]} == {(Finish.EOS, 1)}
    assert_recomputed(model, rollouts, states)


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
