"""Policies by name: alias, local folder or hub id, to a folder of config, safetensors and tokenizer.

The learner's model comes from `load_policy`, the generator's weights from `read_config` and `iter_weights`. Nothing
here waits long for a network: a hub id is looked up in the local cache first, then asked for once.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from leadout.errors import ModelError
from leadout.models.aliases import ALIASES, Progress, fetch

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_LOOKUP_SECONDS = 10.0


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """The folder of a model given by alias, path or hub id.

    Raises:
        ModelError: no such folder, an unknown id, or no network when one is needed.

    """
    if name in ALIASES:
        return fetch(name, progress=progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        raise ModelError(
            f"expected a folder with config.json and safetensors, got the GGUF file {name}; convert it first"
        )
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_like_path:
        raise ModelError(
            f"expected an alias ({', '.join(sorted(ALIASES))}), a folder or a hub id (owner/name), "
            f"got {name!r}; there is no such folder"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    try:
        cached = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        cached = None
    except HFValidationError as error:
        raise ModelError(f"expected a folder or a hub id (owner/name), got {name!r}: {_first_line(error)}") from error
    if cached is not None and (cached / "config.json").is_file() and _weight_files(cached):
        return cached
    try:
        _check_reachable(constants.ENDPOINT)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=_LOOKUP_SECONDS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {name!r} is not a folder, not in the hub cache and cannot be fetched ({_first_line(error)}); "
            "name a local folder, or connect to the hub once"
        ) from error


def _check_reachable(endpoint: str) -> None:
    """Ask the hub once; its client's own retries would stall for minutes without a network. Raises OSError."""
    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_LOOKUP_SECONDS).close()
    except urllib.error.HTTPError:
        return  # Any answer will do.


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
        ModelError: it is missing or not a JSON object.

    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"expected config.json in {path}, found none; is this a model folder?")
    return _read_json(file)


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json where it names any, else those of config.json.

    Chat models often end a turn with another token than a document, and say so in generation_config.json only.
    """
    generation = path / "generation_config.json"
    named = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = read_config(path).get("eos_token_id") if named is None else named
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"expected JSON in {file}, got: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"expected a JSON object in {file}, got {type(config).__name__}")
    return config


def iter_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder's safetensors, one file after another (one file, or shards with an index).

    Raises:
        ModelError: no safetensors, a missing shard, or a damaged file.

    """
    files = _weight_files(path)
    if not files:
        raise ModelError(f"expected model.safetensors (or shards with an index) in {path}, found none")
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    # Old Llama checkpoints store the rotary frequencies, which follow from the config.
                    if not name.endswith(".rotary_emb.inv_freq"):
                        yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {_first_line(error)}; the file is missing or damaged") from error


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [path / shard for shard in sorted(set(shards))]
    single = path / "model.safetensors"
    return [single] if single.is_file() else []


def load_policy(path: Path, dtype: torch.dtype) -> Any:
    """The learner's model, an `AutoModelForCausalLM` in evaluation mode with PyTorch's fused attention.

    Raises:
        ModelError: the folder does not hold a causal language model that transformers can load.

    """
    read_config(path)
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot load a causal language model from {path}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
