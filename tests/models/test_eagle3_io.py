from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from leadout.errors import CapacityError, ModelError
from leadout.models.eagle3_io import read_eagle3, read_spec, write_eagle3, write_speculators
from leadout.models.rope import RopeSpec
from tests.models.eagle3_fakes import SPEC, policy_tensors, tiny_head

ROPES = [
    RopeSpec(rope_type="default", theta=50000.0, dim=4),
    RopeSpec(rope_type="linear", theta=10000.0, dim=4, factor=4.0),
    RopeSpec(
        rope_type="llama3",
        theta=500000.0,
        dim=4,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=32,
    ),
    RopeSpec(rope_type="yarn", theta=10000.0, dim=4, factor=4.0, original_max_position=16, attention_factor=1.2),
]


def rewrite(folder, change_config=None, change_tensors=None):
    if change_config is not None:
        config = json.loads((folder / "config.json").read_text())
        change_config(config)
        (folder / "config.json").write_text(json.dumps(config))
    if change_tensors is not None:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    write_eagle3(tiny_head(dtype=torch.bfloat16), tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loading_and_saving_gives_the_same_bytes(tmp_path, dtype):
    write_eagle3(tiny_head(dtype=dtype), tmp_path / "a")
    write_eagle3(read_eagle3(tmp_path / "a"), tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_read_head_holds_the_written_tensors_and_spec(tmp_path):
    head = tiny_head()
    write_eagle3(head, tmp_path)
    read = read_eagle3(tmp_path)
    assert read.spec == head.spec
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_the_rope_survives_the_round_trip(tmp_path, rope):
    write_eagle3(tiny_head(rope=rope), tmp_path)
    assert read_spec(tmp_path).rope == rope
    assert torch.equal(read_eagle3(tmp_path).spec.rope.inverse_frequencies(), rope.inverse_frequencies())


def test_the_config_is_the_published_one(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (40, 12, 1)
    assert config["tie_word_embeddings"] is False
    assert config["fc_norm"] is True


def test_a_full_vocabulary_is_written_without_a_map(tmp_path):
    write_eagle3(tiny_head(draft_vocab_size=40), tmp_path)
    assert {"d2t", "t2d"}.isdisjoint(load_file(tmp_path / "model.safetensors"))


def test_a_parallel_head_keeps_what_it_learnt_of_unknown_tokens(tmp_path):
    head = tiny_head(mask_token_id=5)
    write_eagle3(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ptd_token_id"] == 5
    read = read_eagle3(tmp_path)
    assert (read.method, read.spec) == ("parallel", head.spec)
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in read.state_dict().items())
    assert {"mask_hidden", "mask_embedding"} <= read.state_dict().keys()


@pytest.mark.parametrize("name", ["mask_hidden", "mask_embedding"])
def test_a_parallel_head_without_its_mask_is_an_error(tmp_path, name):
    write_eagle3(tiny_head(mask_token_id=5), tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"missing {name}"):
        read_eagle3(tmp_path)


def test_a_mask_state_of_one_dimension_more_is_read(tmp_path):
    head = tiny_head(mask_token_id=5)
    write_eagle3(head, tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.update(mask_hidden=tensors["mask_hidden"][None]))
    assert torch.equal(read_eagle3(tmp_path).mask_hidden, head.mask_hidden)


EMBEDDING = policy_tensors()["model.embed_tokens.weight"]


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 40}, {"rope": ROPES[2]}])
def test_the_speculators_form_gives_the_same_head_back(tmp_path, changes):
    head = tiny_head(**changes)
    write_speculators(head, tmp_path, EMBEDDING, policy="some/policy", drafts=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3Speculator"])
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/policy"
    assert config["transformer_layer_config"]["hidden_size"] == 16
    assert not any(name.startswith("midlayer") for name in load_file(tmp_path / "model.safetensors"))
    read = read_eagle3(tmp_path, policy=policy_tensors())
    assert read.spec == head.spec
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in read.state_dict().items())


def test_a_parallel_head_in_the_speculators_form_has_its_mask_in_its_embeddings(tmp_path):
    head = tiny_head(mask_token_id=5)
    write_speculators(head, tmp_path, EMBEDDING, policy="p", drafts=3)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert (config["speculators_model_type"], config["mask_token_id"]) == ("peagle", 5)
    assert "mask_embedding" not in tensors
    others = torch.arange(40) != 5
    assert torch.equal(tensors["embed_tokens.weight"][others], EMBEDDING[others])
    read = read_eagle3(tmp_path)
    assert read.has_embeddings
    for name in ("mask_hidden", "mask_embedding", "lm_head.weight", "d2t"):
        assert torch.equal(read.state_dict()[name], head.state_dict()[name])


def test_a_speculators_config_without_its_mask_token_is_an_error(tmp_path):
    write_speculators(tiny_head(mask_token_id=5), tmp_path, EMBEDDING, policy="p", drafts=3)
    rewrite(tmp_path, change_config=lambda config: config.pop("mask_token_id"))
    with pytest.raises(ModelError, match="expected the field mask_token_id"):
        read_eagle3(tmp_path)


def test_layers_0_is_read_as_midlayer(folder):
    expected = read_eagle3(folder).state_dict()

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    rewrite(folder, change_tensors=rename)
    read = read_eagle3(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


def test_the_speculators_form_is_read(folder):
    expected = read_spec(folder)

    def nest(config):
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        keys += ("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "vocab_size", "hidden_act")
        config["transformer_layer_config"] = {key: config.pop(key) for key in keys}
        config.update(architectures=["Eagle3Speculator"], speculators_model_type="eagle3")

    rewrite(folder, change_config=nest)
    assert read_spec(folder) == expected


def test_a_pickled_weight_file_is_read(folder):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(read_eagle3(folder).fc.weight, tensors["fc.weight"])


def test_a_missing_map_of_a_reduced_vocabulary_is_an_error(folder):
    rewrite(folder, change_tensors=lambda tensors: tensors.pop("d2t"))
    with pytest.raises(ModelError, match="missing d2t"):
        read_eagle3(folder)


def test_a_map_that_holds_ids_in_place_of_offsets_is_an_error(folder):
    def as_ids(tensors):
        tensors["d2t"] = torch.arange(12) + tensors["d2t"]

    rewrite(folder, change_tensors=as_ids)
    with pytest.raises(ModelError, match="offsets"):
        read_eagle3(folder)


def test_a_missing_output_matrix_of_a_reduced_vocabulary_is_an_error(folder):
    rewrite(folder, change_tensors=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        read_eagle3(folder, policy=policy_tensors())


def test_a_missing_output_matrix_of_the_full_vocabulary_is_the_policys(tmp_path):
    write_eagle3(tiny_head(draft_vocab_size=40), tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.pop("lm_head.weight"))
    policy = policy_tensors()
    assert torch.equal(read_eagle3(tmp_path, policy=policy).lm_head.weight, policy["model.embed_tokens.weight"])
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        read_eagle3(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.o_proj.weight", "fc_norm.1.weight"])
def test_every_other_missing_tensor_is_named(folder, name):
    rewrite(folder, change_tensors=lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"missing {name}"):
        read_eagle3(folder)


def test_an_unknown_tensor_is_named(folder):
    rewrite(folder, change_tensors=lambda tensors: tensors.update({"layers.1.x": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"unexpected layers\.1\.x"):
        read_eagle3(folder)


def test_missing_layer_ids_are_an_error(folder):
    rewrite(folder, change_config=lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    with pytest.raises(ModelError, match="eagle_aux_hidden_state_layer_ids"):
        read_eagle3(folder)


@pytest.mark.parametrize("size", [0, 7, 500])
def test_a_truncated_weight_file_is_an_error(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="whole weight file"):
        read_eagle3(folder)


def test_a_head_for_another_width_is_refused(folder):
    with pytest.raises(ModelError, match="hidden size 32, got 16"):
        read_eagle3(folder, target_hidden_size=32)


def test_a_head_for_another_vocabulary_is_refused(folder):
    policy = policy_tensors(dataclasses.replace(SPEC, vocab_size=41))
    with pytest.raises(ModelError, match="vocabulary of 41, got vocab_size 40"):
        read_eagle3(folder, policy=policy)


def test_weights_that_contradict_the_config_are_an_error(folder):
    rewrite(folder, change_config=lambda config: config.update(intermediate_size=32))
    with pytest.raises(ModelError, match="shape"):
        read_eagle3(folder)


@pytest.mark.parametrize(
    "field, value",
    [("num_hidden_layers", 2), ("attention_bias", True), ("hidden_act", "gelu"), ("norm_output", True)],
)
def test_fields_that_would_change_the_forward_pass_are_refused(folder, field, value):
    rewrite(folder, change_config=lambda config: config.update({field: value}))
    with pytest.raises(ModelError, match=field):
        read_eagle3(folder)


def test_another_architecture_is_refused(folder):
    rewrite(folder, change_config=lambda config: config.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(ModelError, match="expected architectures LlamaForCausalLMEagle3"):
        read_eagle3(folder)


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        read_eagle3(tmp_path)


def test_errors_are_one_line(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError) as caught:
        read_eagle3(folder)
    assert "\n" not in str(caught.value)


def test_only_the_two_files_are_left_behind(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_own_embeddings_are_kept_and_frozen(folder):
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    rewrite(folder, change_tensors=lambda tensors: tensors.update({"embed_tokens.weight": table}))
    head = read_eagle3(folder)
    assert torch.equal(head.embed_tokens.weight, table)
    assert not head.embed_tokens.weight.requires_grad


@pytest.mark.parametrize("text", ["[]", "3", '{"transformer_layer_config": 3}'])
def test_a_config_that_is_no_object_is_an_error(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"expected a JSON object with the head's fields, got (list|int)"):
        read_eagle3(folder)


def test_a_map_of_fractions_is_an_error(folder):
    rewrite(folder, change_tensors=lambda tensors: tensors.update(d2t=tensors["d2t"].float()))
    with pytest.raises(ModelError, match=r"expected d2t to hold whole numbers, got torch\.float32"):
        read_eagle3(folder)


def test_layer_ids_beyond_the_policy_are_an_error(folder):
    rewrite(folder, change_config=lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]))
    with pytest.raises(ModelError, match=r"to lie in 0\.\.\d+ \(the state entering each layer\), got \[1, 2, 9\]"):
        read_eagle3(folder, num_layers=4)


@pytest.mark.parametrize("ids", [[3, 1, 2], [1, 2, 2]])
def test_layer_ids_that_other_engines_would_reorder_are_an_error(folder, ids):
    rewrite(folder, change_config=lambda config: config.update(eagle_aux_hidden_state_layer_ids=ids))
    with pytest.raises(ModelError, match=re.escape(f"rising order, each once (engines join them so), got {ids}")):
        read_eagle3(folder)


def test_negative_layer_ids_are_an_error(folder):
    rewrite(folder, change_config=lambda config: config.update(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]))
    with pytest.raises(ModelError, match=r"to not be negative, got \[-1, 2, 3\]"):
        read_eagle3(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error(folder, value):
    rewrite(folder, change_tensors=lambda tensors: tensors["fc.weight"][0].fill_(value))
    with pytest.raises(ModelError, match=r"expected finite numbers in fc\.weight, got NaN or infinity"):
        read_eagle3(folder)


def test_a_full_disk_leaves_the_old_head_and_says_what_to_do(folder, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr("leadout.models.head_files.save_file", full)
    with pytest.raises(CapacityError, match=r"disk full while writing .*/model\.safetensors; free some space and run"):
        write_eagle3(tiny_head(), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
