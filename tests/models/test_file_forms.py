"""A head that is read and written again keeps the form of its files, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leadout.models.eagle3_io import read_eagle3, write_eagle3, write_speculators
from leadout.models.head_io import read_head, write_head
from tests.models.eagle3_fakes import SPEC, tiny_head


def rename(folder: Path, old: str, new: str) -> None:
    """Names of tensors as another exporter writes them."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def published(folder: Path) -> None:
    write_eagle3(tiny_head(dtype=torch.bfloat16), folder)


def layers_0(folder: Path) -> None:
    published(folder)
    rename(folder, "midlayer.", "layers.0.")


def prefixed(folder: Path) -> None:
    published(folder)
    rename(folder, "", "model.")


def foreign_config(folder: Path) -> None:
    published(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"bos_token_id": 1, "transformers_version": "4.57.0"}
    path.write_text(json.dumps(fields, indent=4, sort_keys=True))


def without_t2d(folder: Path) -> None:
    published(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["t2d"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def whole_vocabulary_with_a_map(folder: Path) -> None:
    write_eagle3(tiny_head(dtype=torch.bfloat16, draft_vocab_size=SPEC.vocab_size), folder)
    size = SPEC.vocab_size
    maps = {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
    tensors = load_file(folder / "model.safetensors") | maps
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def speculators(folder: Path) -> None:
    head = tiny_head(dtype=torch.bfloat16)
    write_speculators(head, folder, torch.randn(SPEC.vocab_size, 16), policy="tiny", drafts=3)


def parallel_speculators(folder: Path) -> None:
    head = tiny_head(dtype=torch.bfloat16, mask_token_id=5)
    write_speculators(head, folder, torch.randn(SPEC.vocab_size, 16), policy="tiny", drafts=3)


FORMS = [
    published,
    layers_0,
    prefixed,
    foreign_config,
    without_t2d,
    whole_vocabulary_with_a_map,
    speculators,
    parallel_speculators,
]


@pytest.mark.parametrize("make", FORMS)
def test_an_unchanged_head_is_written_with_the_same_bytes(tmp_path, make):
    make(tmp_path / "a")
    write_head(read_head(tmp_path / "a"), tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


@pytest.mark.parametrize("make", FORMS)
def test_a_head_that_learnt_is_read_back_as_it_is_with_the_names_of_its_form(tmp_path, make):
    make(tmp_path / "a")
    head = read_eagle3(tmp_path / "a").float()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    write_eagle3(head, tmp_path / "b")
    again = read_eagle3(tmp_path / "b")
    assert again.spec == head.spec
    wanted, found = dict(head.named_parameters()), dict(again.named_parameters())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if wanted[name].requires_grad)
    names = [set(load_file(tmp_path / part / "model.safetensors")) for part in "ab"]
    assert names[0] == names[1]
    before, after = ((tmp_path / part / "config.json").read_text() for part in "ab")
    assert json.loads(before.replace('"bfloat16"', '"float32"')) == json.loads(after)
