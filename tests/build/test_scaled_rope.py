"""Draft heads made for a policy with a scaled rotary embedding rotate as the policy does, also once read back."""

from __future__ import annotations

import pytest
import torch

from leadout.build.drafter import load_head, new_head
from leadout.config import Draft
from leadout.models.head_io import write_head
from tests.models.tiny import decoder, policy


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "mtp"])
@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "llama_yarn"])
def test_a_new_head_that_was_written_and_read_rotates_as_its_policy(tmp_path, name, kind):
    model = policy(name, torch.float32)
    weights = model.state_dict()
    made = new_head(Draft(), decoder(model), weights, (), seed=0, temperature=1.0, keep=(), method=kind)
    write_head(made, tmp_path / "head")
    head = load_head(tmp_path / "head", weights, kind)
    rotary = model.model.rotary_emb
    assert torch.equal(head.spec.rope.inverse_frequencies(), rotary.inv_freq)
    assert head.spec.rope.attention_factor == rotary.attention_scaling
    positions = torch.arange(200)
    expected = rotary(torch.zeros(1, 200, 1), positions[None])
    for got_ND, expected_1ND in zip(head.rotary(positions), expected, strict=True):
        torch.testing.assert_close(got_ND, expected_1ND[0], rtol=0, atol=1e-6)
    assert (rotary.attention_scaling != 1.0) == (name == "llama_yarn")
