"""Fields and files of a draft head's folder that are odd in one way each."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from leadout.errors import ModelError
from leadout.models.eagle3_io import read_eagle3, read_spec, write_eagle3, write_speculators
from leadout.models.head_io import method_of
from tests.models.eagle3_fakes import policy_tensors, tiny_head


@pytest.fixture
def folder(tmp_path):
    write_eagle3(tiny_head(), tmp_path / "draft")
    return tmp_path / "draft"


def with_fields(folder, **changes):
    """Change fields of the config; `...` takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("draft_vocab_size", 0, "draft_vocab_size must be at least 1, got 0"),
        ("draft_vocab_size", -3, "draft_vocab_size must be at least 1, got -3"),
        ("draft_vocab_size", 10**6, "draft_vocab_size must be at most vocab_size"),
        ("draft_vocab_size", "many", "expected a number in draft_vocab_size, got 'many'"),
        ("intermediate_size", 0, "intermediate_size must be at least 1, got 0"),
        ("num_attention_heads", 0, "num_heads must be at least 1, got 0"),
        ("hidden_size", 8.5, "expected a whole number in hidden_size, got 8.5"),
        ("hidden_size", None, "expected the field hidden_size, found none"),
        ("hidden_size", float("inf"), "expected a number in hidden_size, got inf"),
        ("hidden_size", 1e300, "expected at most 2147483647 in hidden_size, got 1e+300"),
        ("rope_scaling", {"rope_type": "linear", "factor": "far"}, "expected a number above 0 in factor of the rope"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 0},
            "expected a number above 0 in factor of the rope, got 0",
        ),
        ("rope_theta", -1, "expected a number above 0 in rope_theta of the rope, got -1"),
        ("rope_theta", 0, "expected a number above 0 in rope_theta of the rope, got 0"),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
            "expected a number above 0 in original_max_position_embeddings of the rope, got 0",
        ),
        ("norm_before_residual", "false", "expected true or false in norm_before_residual, got 'false'"),
        ("norm_before_fc", [], "expected true or false in norm_before_fc, got []"),
        ("fc_norm", 1, "expected true or false in fc_norm, got 1"),
        ("rms_norm_eps", -1, "rms_norm_eps must lie between 0 and 1, got -1"),
        ("rms_norm_eps", 0, "rms_norm_eps must lie between 0 and 1, got 0"),
        ("rms_norm_eps", 1e30, "rms_norm_eps must lie between 0 and 1, got 1e+30"),
        ("max_position_embeddings", 0, "max_position_embeddings must be at least 1, got 0"),
        ("num_hidden_layers", "1", "expected num_hidden_layers 1, got '1'"),
        ("rms_norm_eps", "small", "expected a number in rms_norm_eps, got 'small'"),
        ("eagle_aux_hidden_state_layer_ids", None, "expected the field eagle_aux_hidden_state_layer_ids, found none"),
        ("eagle_aux_hidden_state_layer_ids", "1,2", "list of layers in eagle_aux_hidden_state_layer_ids, got '1,2'"),
        ("eagle_aux_hidden_state_layer_ids", [], "expected at least one tapped layer, got none"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "expected rope type default, linear, llama3 or yarn"),
    ],
)
def test_an_odd_field_is_named_with_its_file(folder, field, value, words):
    with_fields(folder, **{field: value})
    with pytest.raises(ModelError) as raised:
        read_eagle3(folder)
    assert str(raised.value).startswith(f"{folder / 'config.json'}: ")
    assert words in str(raised.value)


def test_a_truncated_weight_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="expected a whole weight file") as raised:
        read_eagle3(folder)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_weight_file_in_parts_gives_the_same_head(folder):
    whole = read_eagle3(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    parts = read_eagle3(folder).state_dict()
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("kept", "stray"),
    [(("model-00001-of-00002", "model-00002-of-00002"), "model-00001-of-00003"), (("model-00001-of-00002",), None)],
)
def test_parts_of_two_sets_or_of_half_a_set_are_an_error(folder, kept, stray):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in (*kept, stray) if stray else kept:
        save_file(tensors, folder / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"expected all parts of one set of weights, got model-00001-of-00002"):
        read_eagle3(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("d2t", lambda d2t: d2t.repeat(2, 1), "expected d2t with one axis, got (2, "),
        ("d2t", lambda d2t: d2t.bool(), "expected d2t to hold whole numbers, got torch.bool"),
        ("d2t", lambda d2t: d2t.to(torch.uint16), "expected d2t to hold whole numbers, got torch.uint16"),
        ("t2d", lambda t2d: t2d.to(torch.uint64), "expected t2d to hold whole numbers, got torch.uint64"),
        ("t2d", lambda t2d: t2d[None], "expected t2d with one axis, got (1, "),
        ("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn), "float64 numbers, got torch.float8_e4m3fn"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_named(folder, name, change, words):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as raised:
        read_eagle3(folder)
    assert str(raised.value).startswith(f"{folder}: ")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({1: torch.ones(2)}, "expected a weight file with named tensors"),
        ({"fc.weight": torch.ones(2, 2).to_sparse()}, "expected a weight file with named tensors"),
        ({"fc.weight": torch.ones(2, device="meta")}, "expected a weight file with named tensors"),
        (None, "expected a whole weight file"),
    ],
)
def test_a_pickled_file_of_something_else_is_an_error(folder, held, words):
    (folder / "model.safetensors").unlink()
    if held is None:
        (folder / "pytorch_model.bin").write_text("text in the place of weights")
    else:
        torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=words):
        read_eagle3(folder)


def test_a_pickled_state_dict_of_parameters_is_read(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    held = {name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()}
    torch.save(held, folder / "pytorch_model.bin")
    assert torch.equal(read_eagle3(folder).state_dict()["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_named(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ModelError, match=name):
        read_eagle3(folder)


def test_a_config_without_later_heads_is_no_multi_token_head(folder):
    with_fields(folder, num_nextn_predict_layers=0)
    assert method_of(folder) == "eagle3"


def test_fields_under_eagle_config_are_read(folder):
    before = read_spec(folder)
    nested = {"eagle_aux_hidden_state_layer_ids": list(before.layer_ids), "norm_before_residual": True}
    with_fields(folder, eagle_config=nested, eagle_aux_hidden_state_layer_ids=..., norm_before_residual=...)
    spec = read_spec(folder)
    assert (spec.layer_ids, spec.norm_before_residual) == (before.layer_ids, True)


@pytest.mark.parametrize(("speculators", "residual"), [(False, False), (True, True)])
def test_a_residual_that_the_config_leaves_open_is_what_vllm_takes_it_for(tmp_path, speculators, residual):
    if speculators:
        head = tiny_head()
        table = torch.zeros(head.spec.vocab_size, head.spec.target_hidden_size)
        write_speculators(head, tmp_path, table, policy="tiny", drafts=3)
    else:
        write_eagle3(tiny_head(), tmp_path)
    with_fields(tmp_path, norm_before_residual=...)
    assert read_spec(tmp_path).norm_before_residual is residual


def test_a_borrowed_output_matrix_is_said_aloud(tmp_path, caplog):
    head = tiny_head(draft_vocab_size=tiny_head().spec.vocab_size)
    write_eagle3(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        read = read_eagle3(tmp_path, policy=policy_tensors())
    assert read.borrows_output
    assert caplog.messages == [f"{tmp_path} holds no lm_head.weight: the head starts from a copy of the policy's"]


def test_the_kind_of_a_head_is_in_its_config(folder):
    (folder / "model.safetensors").unlink()
    assert method_of(folder) == "eagle3"
    with_fields(folder, ptd_token_id=1)
    assert method_of(folder) == "parallel"
