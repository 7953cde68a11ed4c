"""Multi-token heads: the layer against transformers' own, folders, and checkpoints that bring one along."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from leadout.errors import ModelError
from leadout.models.head_io import is_head, read_head, write_head
from leadout.models.loading import iter_weights, load_policy, read_config
from leadout.models.mtp import MtpHead
from leadout.models.mtp_io import has_mtp, read_mtp, write_mtp
from leadout.models.spec import DecoderSpec
from tests.models.eagle3_fakes import MTP_SPEC, policy_tensors, tiny_mtp_head
from tests.models.test_eagle3 import causal_forward

TENSORS = {
    *(f"{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "input_layernorm")),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
    *("post_attention_layernorm.weight", "final_layernorm.weight"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def qwen2_config(**changes) -> Qwen2Config:
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "vocab_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
    }
    return Qwen2Config(**(sizes | changes))


def test_the_layer_equals_a_hugging_face_qwen2_layer_behind_the_projection():
    head = tiny_mtp_head(dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(7, 16, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(7, 16, generator=generator, dtype=torch.float64)
    positions = torch.arange(7)

    config = qwen2_config()
    layer = Qwen2DecoderLayer(config, 0)
    own = head.state_dict()
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})
    norms = {}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        norms[name] = Qwen2RMSNorm(16, eps=1e-5)
        norms[name].load_state_dict({"weight": own[f"{name}.weight"]})
        norms[name].double()
    joined = torch.cat([norms["hidden_layernorm"](states), norms["token_layernorm"](embeddings)], dim=-1)
    stream = (joined @ own["input_proj.weight"].T)[None]
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    rotary = Qwen2RotaryEmbedding(config)(stream, positions[None])
    out = layer.double()(stream, attention_mask=mask, position_embeddings=rotary)
    expected = norms["final_layernorm"](out[0] if out.ndim == 3 else out)

    got = head.final(causal_forward(head, states, embeddings, positions))
    # transformers takes norms and softmax in float32 even in a float64 model.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_the_next_entry_carries_the_normed_output():
    head = tiny_mtp_head(dtype=torch.float64)
    hidden, embedding = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    next_one, expected = head.deeper(hidden, embedding), head.entry(head.final_layernorm(hidden), embedding)
    assert torch.equal(next_one.input_NE, expected.input_NE)


def test_logits_are_the_policys_and_send_it_no_gradient():
    head = tiny_mtp_head()
    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    hidden = torch.ones(1, 16)
    logits = head.logits(hidden, rows)
    torch.testing.assert_close(logits, head.final_layernorm(hidden) @ rows.T)
    logits.sum().backward()
    assert rows.grad is None
    assert head.final_layernorm.weight.grad is not None


def test_tensor_names_are_those_of_the_checkpoint():
    assert set(MtpHead(MTP_SPEC).state_dict()) == TENSORS


def test_a_folder_of_its_own_gives_the_same_head_back(tmp_path):
    head = tiny_mtp_head()
    write_head(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {f"model.mtp_layers.0.{name}" for name in TENSORS}
    read = read_head(tmp_path, policy=policy_tensors(), num_layers=3)
    assert (read.method, read.spec, is_head(tmp_path)) == ("mtp", head.spec, True)
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("count", [0, 2])
def test_only_checkpoints_with_one_head_are_read(tmp_path, count):
    write_mtp(tiny_mtp_head(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"expected num_nextn_predict_layers 1 .*, got {count}"):
        read_mtp(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    write_mtp(tiny_mtp_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.mtp_layers.0.input_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing input_proj\.weight"):
        read_mtp(tmp_path)


def test_a_head_of_a_policy_of_other_depth_is_refused(tmp_path):
    write_mtp(tiny_mtp_head(), tmp_path)
    with pytest.raises(ModelError, match="a policy of 4 layers, got one for 3"):
        read_mtp(tmp_path, num_layers=4)


def mimo_checkpoint(folder, model_type: str) -> Qwen2ForCausalLM:
    """A Qwen2 policy with a multi-token head beside it, under either name."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(qwen2_config())
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in tiny_mtp_head().state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = read_config(folder) | {"model_type": model_type, "num_nextn_predict_layers": 1}
    if model_type == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "use_mrope": False}
        config |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("model_type", ["mimo", "qwen2"])
def test_a_checkpoint_that_brings_a_head_is_a_policy_and_a_head(tmp_path, model_type):
    model = mimo_checkpoint(tmp_path, model_type)
    policy = load_policy(tmp_path, torch.float32)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in policy.state_dict().items())
    spec = DecoderSpec.from_config(read_config(tmp_path))
    assert (spec.family, spec.qkv_bias, spec.output_bias) == ("qwen2", True, False)
    assert not any("mtp" in name for name, _ in iter_weights(tmp_path))
    assert has_mtp(tmp_path)
    head = read_mtp(tmp_path, policy=policy.state_dict(), num_layers=3)
    expected = tiny_mtp_head().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in head.state_dict().items())


def test_a_policy_alone_has_no_head(tmp_path):
    Qwen2ForCausalLM(qwen2_config()).save_pretrained(tmp_path)
    assert not has_mtp(tmp_path)
