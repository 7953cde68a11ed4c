"""Files of a draft head: a config and tensors, written whole or not at all, read with every oddity named.

What the fields and tensors mean is for `eagle3_io` and `mtp_io`. Everything wrong with a folder is a `ModelError` of
one line.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.errors import ModelError
from leadout.models.draft_head import DraftHeadSpec
from leadout.models.rope import RopeSpec
from leadout.models.weights import is_finite
from leadout.storage import UNREADABLE, writing

_NESTED = ("transformer_layer_config", "eagle_config")
"""Objects in a config whose fields belong to the head: of the speculators form, and of older EAGLE-3 heads."""


_LARGEST = 2**31 - 1
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAPS = {
    "d2t": (torch.int64, torch.int32, torch.int16),
    "t2d": (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Vocabulary maps, with the types that they come in."""
_PART = re.compile(r"model-\d+-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class FileForm:
    """How the files of a head were written, so that they can be written the same way again."""

    config: str
    """Text of `config.json`."""
    names: Mapping[str, str]
    """Name in the file of each of the head's tensors that it holds."""
    shapes: Mapping[str, torch.Size]
    """Their shapes there, by the same key."""
    unused: Mapping[str, Tensor]
    """Tensors that the head does without, such as the map of a whole vocabulary."""

    def config_for(self, dtype: torch.dtype) -> str:
        """The same text, but for the dtype where that is another one now."""
        config = json.loads(self.config)
        name = str(dtype).removeprefix("torch.")
        places = [part for part in (config, *(config.get(nested, {}) for nested in _NESTED)) if isinstance(part, dict)]
        changed = [(part, key) for part in places for key in ("torch_dtype", "dtype") if part.get(key, name) != name]
        if not changed:
            return self.config
        for part, key in changed:
            part[key] = name
        return json.dumps(config, indent=2) + "\n"


def write_files(folder: Path, config: Mapping[str, Any] | str, tensors: Mapping[str, Tensor]) -> None:
    """`config.json`, from its fields or its text, and `model.safetensors`, tensors in their present dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _replace(folder / "model.safetensors", lambda path: save_file(plain, path, metadata={"format": "pt"}))
    text = config if isinstance(config, str) else json.dumps(config, indent=2) + "\n"
    _replace(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def read_fields(folder: Path) -> dict[str, Any]:
    """The config's fields, with those of the layer (the speculators form) and of `eagle_config` beside the others."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: expected a draft head folder with config.json, found none") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON, got {error}; copy the file again") from error
    nested = [config.pop(name, {}) for name in _NESTED] if isinstance(config, dict) else []
    if not isinstance(config, dict) or not all(isinstance(part, dict) for part in nested):
        odd = next((part for part in nested if not isinstance(part, dict)), config)
        raise ModelError(
            f"{path}: expected a JSON object with the head's fields, got {type(odd).__name__}; copy the file again"
        )
    return {name: value for part in (*nested, config) for name, value in part.items()}


def shape_fields(spec: DraftHeadSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The fields that any transformer layer has."""
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        **_rope_fields(spec.rope),
        "vocab_size": spec.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_shape(fields: Mapping[str, Any], path: Path, make: Callable[[dict[str, Any]], DraftHeadSpec]) -> DraftHeadSpec:
    """A spec of the common fields and what `make` adds to them; a missing or odd field is named."""
    try:
        hidden, heads = whole(fields, "hidden_size"), whole(fields, "num_attention_heads")
        head_dim = whole(fields, "head_dim", hidden // max(heads, 1))
        return make(
            {
                "hidden_size": hidden,
                "num_heads": heads,
                "num_kv_heads": whole(fields, "num_key_value_heads", heads),
                "head_dim": head_dim,
                "intermediate_size": whole(fields, "intermediate_size"),
                "rms_norm_eps": _number(fields, "rms_norm_eps"),
                "rope": RopeSpec.from_config(fields, head_dim),
                "max_position_embeddings": whole(fields, "max_position_embeddings"),
                "vocab_size": whole(fields, "vocab_size"),
            }
        )
    except KeyError as error:
        raise ModelError(
            f"{path}: expected the field {error.args[0]}, found none; add it as the head was trained"
        ) from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path}: expected numbers in the head's fields, got {error}") from error


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"expected a number in {name}, got {value!r}")
    return float(value)


def whole(fields: Mapping[str, Any], name: str, missing: int | None = None) -> int:
    """A field that holds a whole number; `missing`: where it is absent or null.

    Raises KeyError where it must be there, ModelError naming it where it holds something else.
    """
    if fields.get(name) is None:
        if missing is None:
            raise KeyError(name)
        return missing
    value = _number(fields, name)
    if value != int(value):
        raise ModelError(f"expected a whole number in {name}, got {fields[name]!r}")
    if abs(value) > _LARGEST:
        raise ModelError(f"expected at most {_LARGEST} in {name}, got {fields[name]!r}")
    return int(value)


def flag(fields: Mapping[str, Any], name: str, missing: bool) -> bool:
    """A field that holds true or false; `missing`: where it is absent or null. Text such as "false" is neither."""
    value = fields.get(name)
    if value is None:
        return missing
    if not isinstance(value, bool):
        raise ModelError(f"expected true or false in {name}, got {value!r}")
    return value


def _rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as every loader of such checkpoints reads them."""
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.rope_type == "llama3":
        scaling.update(low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)
    if rope.rope_type == "yarn":
        scaling.update(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow)
        scaling.update(attention_factor=rope.attention_factor, truncate=rope.truncate)
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.rope_type == "default" else scaling}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of `model.safetensors`, its parts, or `pytorch_model.bin`; finite and of the right kind."""
    held: object = _load(folder)
    if not isinstance(held, dict) or not all(_is_named(name, tensor) for name, tensor in held.items()):
        raise ModelError(f"{folder}: expected a weight file with named tensors, got something else; export it again")
    tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in held.items()}
    for name, tensor in tensors.items():
        is_map = name.removeprefix("model.") in _MAPS
        if tensor.dtype not in (_MAPS[name.removeprefix("model.")] if is_map else _FLOATS):
            expected = "whole numbers" if is_map else "float32, bfloat16, float16 or float64 numbers"
            raise ModelError(f"{folder}: expected {name} to hold {expected}, got {tensor.dtype}; export it again")
        if is_map and tensor.ndim != 1:
            raise ModelError(f"{folder}: expected {name} with one axis, got {tuple(tensor.shape)}; export it again")
        if not is_map and not is_finite(tensor):
            raise ModelError(
                f"{folder}: expected finite numbers in {name}, got NaN or infinity; use another checkpoint"
            )
    return tensors


def _is_named(name: object, tensor: object) -> bool:
    """Whether it is an ordinary tensor with a name."""
    plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return isinstance(name, str) and plain


def _parts(folder: Path) -> list[Path]:
    """The parts of one set of weights; of two sets in one folder neither is taken."""
    found = {file: int(match[1]) for file in sorted(folder.iterdir()) if (match := _PART.fullmatch(file.name))}
    if any(count != len(found) for count in found.values()):
        raise ModelError(
            f"{folder}: expected all parts of one set of weights, got {', '.join(file.name for file in found)}; "
            "remove what is left of others, or copy what is missing"
        )
    return list(found)


def _load(folder: Path) -> object:
    """From one safetensors file, its parts, or a pickled file."""
    files = [file for file in (folder / "model.safetensors",) if file.exists()]
    files = files or _parts(folder)
    files = files or [file for file in (folder / "pytorch_model.bin",) if file.exists()]
    if not files:
        raise ModelError(f"{folder}: expected model.safetensors or pytorch_model.bin, found neither")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".bin":
                return torch.load(file, map_location="cpu", weights_only=True)
            tensors |= load_file(file)
        except (SafetensorError, OSError, *UNREADABLE) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{file}: expected a whole weight file, got {reason}; copy it again") from error
    return tensors


def check_tensors_fit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], origin: str, kind: str) -> None:
    """Names and shapes of a head; `origin` begins every message."""
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise ModelError(
            f"{origin}: expected the tensors of {kind}, missing {', '.join(missing) or 'none'}, "
            f"unexpected {', '.join(extra) or 'none'}; export it again with every tensor and its draft vocabulary map"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{origin}: expected {name} of shape {tuple(expected[name].shape)} by its config, "
                f"got {tuple(tensor.shape)}; config and weights belong to different heads"
            )


def check_policy(
    spec: DraftHeadSpec, folder: Path, policy: Mapping[str, Tensor] | None, target_hidden_size: int | None
) -> None:
    """Refuse a head that was made for another vocabulary or width than the policy's."""
    embedding = None if policy is None else policy["model.embed_tokens.weight"]
    if embedding is not None:
        target_hidden_size = int(embedding.shape[1])
        if embedding.shape[0] != spec.vocab_size:
            raise ModelError(
                f"{folder}: expected a head for the policy's vocabulary of {embedding.shape[0]}, "
                f"got vocab_size {spec.vocab_size}; use a head trained for this policy"
            )
    if target_hidden_size is not None and target_hidden_size != spec.target_hidden_size:
        raise ModelError(
            f"{folder}: expected a head for the policy's hidden size {target_hidden_size}, "
            f"got {spec.target_hidden_size}; use a head trained for this policy"
        )


def _replace(path: Path, write: Any) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        with writing(path):
            write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
