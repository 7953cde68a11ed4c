"""Policies by name: alias, local folder or hub id, to a folder of config, safetensors and tokenizer.

The learner's model comes from `load_policy`, the generator's weights from `read_config` and `iter_weights`. Nothing
here waits long for a network: a hub id is looked up in the local cache first, then asked for once.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from leadout.errors import ModelError, about
from leadout.models.aliases import ALIASES, Progress, fetch
from leadout.models.spec import DecoderSpec, as_known_family
from leadout.models.weights import is_finite, shortened
from leadout.text import checked_token_ids

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_LOOKUP_SECONDS = 10.0

MTP_PREFIX = "model.mtp_layers."
"""Begins the names of a checkpoint's heads for later tokens (MiMo's layout)."""


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
        check_reachable(constants.ENDPOINT)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=_LOOKUP_SECONDS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {name!r} is not a folder, not in the hub cache and cannot be fetched ({_first_line(error)}); "
            "name a local folder, or connect to the hub once"
        ) from error


def check_reachable(endpoint: str) -> None:
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


def read_spec(path: Path) -> DecoderSpec:
    """The shape of the model in a folder. Raises ModelError naming the file where it cannot be run."""
    config = read_config(path)
    with about(path / "config.json"):
        return DecoderSpec.from_config(config)


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json where it names any, else those of config.json.

    Chat models often end a turn with another token than a document, and say so in generation_config.json only.

    Raises:
        ModelError: a file is no JSON object, or names ids that are no token ids of the model.

    """
    generation = path / "generation_config.json"
    config = read_config(path)
    named = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    size = config.get("vocab_size")
    file, value = (path / "config.json", config.get("eos_token_id")) if named is None else (generation, named)
    return checked_token_ids(value, size if isinstance(size, int) else None, f"{file}: eos_token_id")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"expected JSON in {file}, got: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"expected a JSON object in {file}, got {type(config).__name__}")
    return config


def iter_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder's safetensors, one file after another (one file, or shards with an index).

    Heads for later tokens that came along (`model.mtp_layers.*`) are left out: `iter_mtp_weights` has them.

    Raises:
        ModelError: no safetensors, a missing shard, a damaged file, or numbers that are not finite.

    """
    return _iter_weights(path, lambda name: not name.startswith(MTP_PREFIX))


def iter_mtp_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that `iter_weights` leaves out; raises as it does."""
    return _iter_weights(path, lambda name: name.startswith(MTP_PREFIX))


def _iter_weights(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    files = _weight_files(path)
    if not files:
        raise ModelError(f"expected model.safetensors (or shards with an index) in {path}, found none")
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    # Old Llama checkpoints store the rotary frequencies, which follow from the config.
                    if wanted(name) and not name.endswith(".rotary_emb.inv_freq"):
                        yield name, _checked(reader.get_tensor(name), name, path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {_first_line(error)}; the file is missing or damaged") from error


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _read_json(index).get("weight_map")
        shards: list[Any] = list(listed.values()) if isinstance(listed, dict) else [None]
        if not all(isinstance(shard, str) for shard in shards):
            raise ModelError(f"expected weight_map in {index} to name a file for every tensor; copy the file again")
        return [path / shard for shard in sorted(set(shards))]
    single = path / "model.safetensors"
    return [single] if single.is_file() else []


def load_policy(path: Path, dtype: torch.dtype) -> Any:
    """The learner's model, an `AutoModelForCausalLM` in evaluation mode with PyTorch's fused attention.

    Raises:
        ModelError: the folder does not hold a causal language model that transformers can load, a tensor is missing,
            of another shape or unknown (the head of a tied model may be left out), or a number is not finite.

    """
    config = read_config(path)
    known = as_known_family(config)
    try:
        own_config: dict[str, Any] = {} if known is config else {"config": Qwen2Config.from_dict(dict(known))}
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                **own_config,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
    except SafetensorError as error:
        raise ModelError(
            f"cannot read the weights in {path}: {_first_line(error)}; the file is damaged, copy it again"
        ) from error
    except (ValueError, OSError, LookupError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(
            f"transformers cannot load a causal language model from {path}: {_first_line(error)}"
        ) from error
    _check_loaded(info, path)
    for name, parameter in model.named_parameters():
        _checked(parameter.detach(), name, path)
    return model.eval()


def _check_loaded(info: Mapping[str, Any], path: Path) -> None:
    """transformers fills what a checkpoint lacks with random numbers and only warns of it."""
    missing = sorted(info["missing_keys"])
    misshapen = sorted(f"{name} {tuple(found)} for {tuple(wanted)}" for name, found, wanted in info["mismatched_keys"])
    unexpected = sorted(
        name
        for name in info["unexpected_keys"]
        if not name.endswith(".rotary_emb.inv_freq") and not name.startswith(MTP_PREFIX)
    )
    if missing or misshapen or unexpected:
        parts = (("missing", missing), ("of another shape", misshapen), ("unexpected", unexpected))
        raise ModelError(
            f"{path}: expected exactly the tensors of its config.json, "
            f"got {'; '.join(f'{what} {shortened(names)}' for what, names in parts if names)}; "
            "config and weights do not belong together or the copy is incomplete, copy the folder again"
        )


def _checked(tensor: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    if not is_finite(tensor):
        raise ModelError(f"{path}: expected finite numbers in {name}, got NaN or infinity; use another checkpoint")
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """No report of transformers while it loads: what is wrong with the tensors becomes one error line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
