"""A small draft model cut from a policy: its embeddings, norm and head around a few of its layers.

The result is an ordinary Hugging Face folder of the policy's family with the policy's tokenizer, ready for
``speculative_config: {method: small_model}``. Untrained it drafts poorly; it is a start for training.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from leadout.errors import ModelError
from leadout.models.loading import iter_weights, read_config
from leadout.models.spec import DecoderSpec
from leadout.models.weights import check_tensors
from leadout.storage import writing

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OWN_FILES = {"config.json", "README.md", "leadout.json"}
"""Of the policy alone; the last one is the note that a model was fetched."""
_NOT_COPIED = {".safetensors", ".bin", ".gguf", ".pt", ".h5", ".msgpack"}


def cut_config(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The config of a model that has only these layers, in this order.

    Raises:
        ModelError: no layers, or one that the model does not have.

    """
    num_layers = DecoderSpec.from_config(config).num_layers
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise ModelError(
            f"expected layers between 0 and {num_layers - 1}, got {', '.join(map(str, layers)) or 'none'}; "
            "name some of the policy's own layers"
        )
    cut = {**config, "num_hidden_layers": len(layers)}
    if isinstance(config.get("layer_types"), list):
        cut["layer_types"] = [config["layer_types"][layer] for layer in layers]
    if isinstance(config.get("max_window_layers"), int):
        # Layers from this index on slide; the order may change, so only all or none can be said.
        cut["max_window_layers"] = 0 if all(i >= config["max_window_layers"] for i in layers) else len(layers)
    return cut


def cut_tensors(tensors: Mapping[str, torch.Tensor], layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """The tensors of the cut model; a layer named twice is there twice."""
    kept = {name: tensor for name, tensor in tensors.items() if not _LAYER.fullmatch(name)}
    for new, old in enumerate(layers):
        prefix = f"model.layers.{old}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                kept[f"model.layers.{new}.{name.removeprefix(prefix)}"] = tensor.clone()
    return kept


def copy_tokenizer(source: Path, target: Path) -> None:
    """Everything of a model folder but weights and config."""
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in _NOT_COPIED or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name not in _OWN_FILES:
            shutil.copyfile(file, target / file.name)


def write_cut_model(policy: Path, layers: Sequence[int], folder: Path) -> DecoderSpec:
    """Write the cut model beside the policy's tokenizer files; the folder appears whole or not at all.

    Raises:
        ModelError: bad layers, a policy that the decoder cannot run, or a folder that already holds something.

    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"expected a new or empty folder for the draft model, got {folder}; name another one")
    config = read_config(policy)
    cut = cut_config(config, layers)
    spec = DecoderSpec.from_config(cut)
    tensors = cut_tensors(dict(iter_weights(policy)), layers)
    check_tensors(spec, tensors)
    if spec.tied:
        tensors.pop("lm_head.weight", None)
    _write(policy, cut, {name: tensor.contiguous() for name, tensor in tensors.items()}, folder.resolve())
    return spec


def _write(policy: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Into a folder of no one else's first; an empty folder that is there stays, and its config comes last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with writing(folder):
            copy_tokenizer(policy, temporary)
            save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        (temporary / "model.safetensors").chmod(0o644)
        if not folder.exists():
            temporary.replace(folder)
            return
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
