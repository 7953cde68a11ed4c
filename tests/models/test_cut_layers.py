from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from leadout.errors import ModelError
from leadout.models.cut_layers import cut_config, write_cut_model
from leadout.models.loading import load_policy
from tests.models.tiny import policy


@pytest.mark.parametrize("name", ["llama_tied", "llama_llama3", "llama_yarn", "qwen2", "qwen3_biases_tied"])
def test_a_cut_model_computes_the_named_layers_of_the_policy(name, tmp_path):
    model = policy(name, torch.float32)
    model.save_pretrained(tmp_path / "policy")
    (tmp_path / "policy" / "tokenizer.json").write_text("{}")
    spec = write_cut_model(tmp_path / "policy", [0, 2], tmp_path / "draft")
    cut = load_policy(tmp_path / "draft", torch.float32)
    tokens = torch.tensor([[5, 9, 33, 2]])
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 2
    with torch.no_grad():
        torch.testing.assert_close(cut(tokens).logits, model(tokens, use_cache=False).logits)
    assert spec.num_layers == 2
    assert (tmp_path / "draft" / "tokenizer.json").read_text() == "{}"


def test_a_cut_model_leaves_other_folders_alone_and_is_readable_by_all(tmp_path):
    policy("llama", torch.float32).save_pretrained(tmp_path / "policy")
    (tmp_path / "policy" / "leadout.json").write_text("{}")
    (tmp_path / ".keep.tmp").mkdir()
    (tmp_path / ".keep.tmp" / "x").write_text("precious")
    write_cut_model(tmp_path / "policy", [0], tmp_path / "keep")
    assert (tmp_path / ".keep.tmp" / "x").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".keep.tmp", "keep", "policy"]
    assert not (tmp_path / "keep" / "leadout.json").exists()
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in (tmp_path / "keep").iterdir())


@pytest.mark.parametrize("form", ["here", "link"])
def test_an_empty_folder_that_is_there_is_filled(tmp_path, monkeypatch, form):
    policy("llama", torch.float32).save_pretrained(tmp_path / "policy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    write_cut_model(tmp_path / "policy", [0, 1], Path() if form == "here" else tmp_path / "link")
    assert load_policy(tmp_path / "empty", torch.float32).config.num_hidden_layers == 2


def test_layer_types_follow_their_layers():
    config = {
        **policy("qwen3", torch.float32).config.to_dict(),
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 128,
    }
    assert cut_config(config, [2, 0])["layer_types"] == ["full_attention", "full_attention"]


@pytest.mark.parametrize("layers", [[], [3], [-1, 0]])
def test_layers_that_the_policy_lacks_are_refused(layers):
    config = json.loads(policy("llama", torch.float32).config.to_json_string(use_diff=False))
    with pytest.raises(ModelError, match="expected layers between 0 and 2"):
        cut_config(config, layers)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="new or empty folder"):
        write_cut_model(tmp_path / "policy", [0], tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
