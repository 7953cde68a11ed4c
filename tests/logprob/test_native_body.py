"""Packs through the native layers against transformers' own on the same weights."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from leadout.logprob.native_body import NativeBody
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from tests.models.native.models import CONFIGS, distance, needs_kernels, policy
from tests.train.learner_fakes import random_groups, tiny_policy

LENGTHS = [[3, 6, 1], [4, 0, 2, 5]]
TAPS = (0, 2, 3)


def run(model, layers, max_completions=3, taps=TAPS):
    """Log-probabilities, taps and gradients by name, all packs after one another."""
    forward = PackedForward(
        model, ForwardSettings(temperature=0.8, max_completions=max_completions, chunk_size=7, layers=layers)
    )
    assert (forward.native is not None) == (layers == "best")
    model.zero_grad()
    outputs = [
        forward.run(batch, taps=taps) for batch in forward.pack(random_groups(LENGTHS), [np.zeros(3), np.zeros(4)])
    ]
    logprobs_R = torch.cat([output.logprobs_R for output in outputs])
    (logprobs_R * torch.linspace(0.5, 2.0, 21)).sum().backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return logprobs_R.detach(), torch.cat([output.taps_TF for output in outputs]), grads


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_completions", [1, 3, 7])
def test_native_layers_and_transformers_agree_on_packs(name, max_completions):
    model = policy(name)
    native, plain = run(model, "best", max_completions), run(model, "layout", max_completions)
    assert distance(native[0], plain[0]) < 0.02
    assert distance(native[1], plain[1]) < 0.02
    for key, expected in plain[2].items():
        assert distance(native[2][key], expected) < 0.1, key


@needs_kernels
def test_gradient_checkpointing_changes_no_bit_of_the_native_layers():
    model = policy("qwen3").train()
    plain = run(model, "best")
    model.gradient_checkpointing_enable()
    saved = run(model, "best")
    assert torch.equal(plain[0], saved[0])
    assert torch.equal(plain[1], saved[1])
    assert all(torch.equal(plain[2][name], saved[2][name]) for name in plain[2])


@needs_kernels
def test_taps_carry_no_gradient_and_are_the_states_before_the_layers():
    model = policy("llama")
    forward = PackedForward(model, ForwardSettings(temperature=1.0))
    (batch,) = forward.pack(random_groups([[2]]), [np.zeros(1)])
    taps_TF = forward.run(batch, taps=(0,)).taps_TF
    assert not taps_TF.requires_grad
    assert torch.equal(taps_TF, model.get_input_embeddings().weight[batch.token_ids_T])


def test_a_model_of_other_sizes_runs_as_transformers_has_it_and_says_why(caplog):
    with caplog.at_level(logging.INFO):
        forward = PackedForward(tiny_policy(torch.float32), ForwardSettings(temperature=1.0))
    assert forward.native is None
    assert "the policy's layers run as transformers has them: " in caplog.text


@needs_kernels
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.double(), "its weights are not float32 on a CPU"),
        (lambda model: setattr(model.config, "attention_dropout", 0.1), "it has dropout"),
        (
            lambda model: model.model.layers[1].register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2))),
            "its layers have parameters of other names (lora_A)",
        ),
        (lambda model: setattr(model.config, "hidden_act", "gelu"), "expected hidden_act silu, got 'gelu'"),
    ],
)
def test_forms_that_the_kernels_do_not_know_are_refused(change, reason):
    model = policy("llama")
    change(model)
    assert str(NativeBody.of(model)).startswith(reason)


@needs_kernels
def test_a_sliding_window_that_the_kernels_do_not_have_keeps_transformers_layers():
    sizes = CONFIGS["mistral"]().to_dict()
    torch.manual_seed(0)
    windowed = MistralForCausalLM(MistralConfig(**{**sizes, "sliding_window": 4})).eval()
    whole = MistralForCausalLM(MistralConfig(**{**sizes, "sliding_window": None})).eval()
    settings = ForwardSettings(temperature=1.0)
    assert PackedForward(windowed, settings).native is None
    assert PackedForward(whole, settings).native is not None


@needs_kernels
def test_a_layer_that_computes_something_else_is_noticed():
    model = policy("llama")
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: 1.2 * plain(x)
    assert "the kernels differ from transformers' layer by" in str(NativeBody.of(model))


@needs_kernels
def test_a_copy_runs_its_own_weights():
    model = policy("qwen2")
    forward = PackedForward(model, ForwardSettings(temperature=1.0))
    (batch,) = forward.pack(random_groups([[4]]), [np.zeros(1)])
    before = forward.run(batch).logprobs_R.detach()
    twin = copy.deepcopy(forward)
    assert torch.equal(twin.run(batch).logprobs_R, before)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    assert torch.equal(twin.run(batch).logprobs_R, before)
    assert not torch.equal(forward.run(batch).logprobs_R, before)
