from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from leadout.errors import ModelError
from leadout.logprob.pack_attention import NAME, PackLayout, attend_pack, layout_pays
from leadout.logprob.policy_forward import ForwardSettings, PackedForward, unshared_reason
from tests.train.learner_fakes import VOCAB, make_forward, make_group, random_groups, tiny_policy

LENGTHS = [[3, 6, 1], [4, 0, 2, 5]]


def one_by_one(model, groups, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of every completion from a plain pass of its own."""
    result = []
    for group in groups:
        for rollout in group.rollouts:
            prompt = torch.from_numpy(group.prompt.token_ids.astype(np.int64))
            tokens = torch.from_numpy(rollout.token_ids.astype(np.int64))
            logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0]
            log_p = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            result.append(log_p[: len(tokens)].gather(-1, tokens[:, None]).squeeze(-1))
    return result


def packed(forward, groups) -> list[torch.Tensor]:
    packs = forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups])
    return [forward.run(batch).logprobs_R for batch in packs]


@pytest.mark.parametrize("layers", ["layout", "mask", "best"])
@pytest.mark.parametrize("max_completions", [1, 2, 3, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_log_probabilities_and_gradients_equal_plain_passes(max_completions, tied, layers):
    model = tiny_policy(tied=tied)
    groups = random_groups(LENGTHS)
    weights = torch.linspace(0.5, 2.0, 21, dtype=torch.float64)
    plain = torch.cat(one_by_one(model, groups, 0.8))
    (plain * weights).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    forward = make_forward(model, temperature=0.8, max_completions=max_completions, layers=layers)
    assert forward.decoder.config._attn_implementation == NAME
    got = torch.cat(packed(forward, groups))
    (got * weights).sum().backward()

    torch.testing.assert_close(got, plain, rtol=0, atol=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_packed_log_probabilities_equal_plain_passes_in_float32():
    model = tiny_policy(torch.float32)
    groups = random_groups(LENGTHS)
    got = torch.cat(packed(make_forward(model), groups))
    torch.testing.assert_close(got, torch.cat(one_by_one(model, groups, 1.0)), rtol=0, atol=2e-4)


def test_a_model_with_a_sliding_window_runs_unshared_and_says_so_once(caplog):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config).double().eval()
    groups = random_groups(LENGTHS)
    with caplog.at_level(logging.WARNING):
        forward = make_forward(model, max_completions=3)
        got = torch.cat(packed(forward, groups))
    assert not forward.shared
    assert [record.message.count("sliding window") for record in caplog.records] == [1]
    # transformers takes norms in float32 even in a float64 model.
    torch.testing.assert_close(got, torch.cat(one_by_one(model, groups, 1.0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_taps_are_the_states_entering_the_layers(shared):
    model = tiny_policy()
    forward = make_forward(model)
    forward.shared = shared
    groups = [make_group(0, [1, 5, 9], [[7, 2], [8, 3, 3]], [1.0, 0.0])]
    (batch,) = forward.pack(groups, [np.zeros(2)])
    output = forward.run(batch, taps=(1, 3, 4))
    for completion, rows in (([7, 2], [0, 1, 2, 3, 4]), ([8, 3, 3], [0, 1, 2, 5, 6, 7])):
        states: list[torch.Tensor] = []

        def keep(_, args, states=states):
            states.append(args[0][0])

        handle = model.model.norm.register_forward_pre_hook(keep)
        hidden = model(input_ids=torch.tensor([[1, 5, 9, *completion]]), output_hidden_states=True).hidden_states
        handle.remove()
        expected = torch.cat([hidden[1][0], hidden[3][0], states[0]], dim=-1)
        torch.testing.assert_close(output.taps_TF[rows], expected, rtol=0, atol=1e-12)


def test_taps_and_hidden_states_carry_no_gradient():
    forward = make_forward(tiny_policy())
    (batch,) = forward.pack(random_groups([[2, 2]]), [np.zeros(2)])
    output = forward.run(batch, taps=(1, 2, 3))
    assert not output.taps_TF.requires_grad
    assert not output.hidden_RH.requires_grad
    assert output.logprobs_R.requires_grad


def test_probabilities_rebuilt_from_the_last_hidden_state_are_the_policys():
    model = tiny_policy()
    forward = make_forward(model, temperature=0.7)
    groups = [make_group(0, [1, 5], [[7, 2, 4]], [1.0])]
    (batch,) = forward.pack(groups, [np.zeros(1)])
    output = forward.run(batch)
    logits = output.hidden_RH @ forward.head_rows(None).T / 0.7
    expected = (model(input_ids=torch.tensor([[1, 5, 7, 2, 4]])).logits[0, 1:4] / 0.7).softmax(-1)
    torch.testing.assert_close((logits - output.log_normalizer_R[:, None]).exp(), expected, rtol=0, atol=1e-12)


def test_hooks_are_gone_after_a_pass():
    model = tiny_policy()
    forward = make_forward(model)
    (batch,) = forward.pack(random_groups([[2, 2]]), [np.zeros(2)])
    forward.run(batch, taps=(1, 2, 4))
    assert all(not module._forward_pre_hooks for module in model.modules())


class Recorder:
    """Audits every second rollout."""

    def __init__(self):
        self.seen = {}

    def select(self, rollout):
        return rollout.request_id.sibling % 2 == 0

    def observe(self, rollout, logits_TV):
        self.seen[rollout.request_id] = logits_TV

    def finish_step(self):
        return {}


def test_the_auditor_sees_whole_selected_rollouts_before_temperature():
    model = tiny_policy()
    forward = make_forward(model, temperature=0.5, chunk_size=2)
    groups = random_groups(LENGTHS)
    recorder = Recorder()
    for batch in forward.pack(groups, [np.zeros(3), np.zeros(4)]):
        forward.run(batch, auditor=recorder)
    assert sorted(recorder.seen) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    prompt, rollout = groups[0].prompt, groups[0].rollouts[0]
    tokens = torch.from_numpy(np.concatenate([prompt.token_ids, rollout.token_ids]).astype(np.int64))
    expected = model(input_ids=tokens[None]).logits[0, len(prompt.token_ids) - 1 : -1]
    torch.testing.assert_close(recorder.seen[0, 0], expected, rtol=0, atol=1e-12)


def test_models_that_scale_their_logits_are_refused():
    model = tiny_policy()
    model.config.logits_scaling = 8.0
    with pytest.raises(ModelError, match="logits_scaling"):
        PackedForward(model, ForwardSettings(temperature=1.0))


def test_linear_attention_layers_run_unshared():
    model = tiny_policy()
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert "linear_attention" in unshared_reason(model)


def test_the_law_at_another_temperature_is_the_tempered_softmax():
    model = tiny_policy()
    groups = [make_group(0, [1], [[7]], [1.0])]
    (got,) = packed(make_forward(model, temperature=0.6), groups)
    expected = (model(input_ids=torch.tensor([[1]])).logits[0, 0] / 0.6).log_softmax(-1)[7]
    assert float(got) == pytest.approx(float(expected), abs=1e-9)


def test_a_model_switched_to_pack_attention_answers_plain_calls_as_before():
    model = tiny_policy()
    tokens = torch.tensor([[3, 9, 4, 7], [5, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    before = model(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    make_forward(model)
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits[mask.bool()], before)


@pytest.mark.parametrize(("prompts", "length", "pays"), [(1, 32, False), (4, 32, True), (1, 400, True)])
def test_packs_are_attended_in_rows_where_their_square_costs_more_than_gathering(prompts, length, pays):
    groups = [make_group(n, [1] * 64, [[7] * length] * 8, [1.0] * 8) for n in range(prompts)]
    forward = make_forward(tiny_policy(), max_completions=8 * prompts)
    (batch,) = forward.pack(groups, [np.zeros(8)] * prompts)
    assert layout_pays(batch) is pays


def test_scores_that_are_capped_do_not_run_on_packs():
    forward = make_forward(tiny_policy())
    (batch,) = forward.pack(random_groups([[2]]), [np.zeros(1)])
    query = torch.zeros(1, 4, batch.num_tokens, 6)
    with pytest.raises(ModelError, match="softcap does not run on packs"):
        attend_pack(None, query, query, query, None, pack_layout=PackLayout.of(batch, query.dtype), softcap=30.0)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_policy().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.cat(packed(make_forward(model), random_groups(LENGTHS))).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*gradients)
