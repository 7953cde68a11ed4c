"""Draft head folders: `config.json` and `model.safetensors` in the published EAGLE-3 form.

Written as Hugging Face `LlamaForCausalLMEagle3`, which vLLM, SGLang and SpecForge load. Read in that form and in the
speculators form (`speculators_model_type: eagle3`, layer fields under `transformer_layer_config`). Everything wrong
with a folder is a `ModelError` of one line; a map or head that is missing is never guessed.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.errors import ModelError
from leadout.models.eagle3 import Eagle3Head
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.rope import RopeSpec
from leadout.models.weights import is_finite
from leadout.storage import writing

REFUSED = {"attention_bias": False, "mlp_bias": False, "logit_scale": 1.0, "norm_output": False, "hidden_act": "silu"}
"""Fields that would change the forward pass, with the only value it has here."""


def write_eagle3(head: Eagle3Head, folder: Path) -> None:
    """Write a head, tensors in their present dtype; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    text = json.dumps(hf_config(head.spec, str(head.fc.weight.dtype).removeprefix("torch.")), indent=2) + "\n"
    _replace(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def read_eagle3(
    folder: Path,
    *,
    policy: Mapping[str, Tensor] | None = None,
    target_hidden_size: int | None = None,
    num_layers: int | None = None,
) -> Eagle3Head:
    """Read a head in the dtype of its file.

    Args:
        folder: Holds `config.json` and `model.safetensors` (or `pytorch_model.bin`).
        policy: The policy's state dict; lends its `lm_head` to a head that was saved without one and whose
            vocabulary is the policy's, and its shapes are checked against the config.
        target_hidden_size: The policy's width, if only that is known.
        num_layers: The policy's layers; the head may tap what enters each of them, or what leaves the last.

    Raises:
        ModelError: files missing, truncated or of another architecture; tensors missing, extra or misshapen; no
            `d2t` for a reduced vocabulary; layer ids missing or not the policy's; numbers that are not finite; another
            policy than the head was made for.

    """
    spec = read_spec(folder)
    _check_layer_ids(spec, folder, num_layers)
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
    stored = _read_tensors(folder)
    _check_numbers(stored, folder)
    tensors = _canonical(stored, spec)
    if "lm_head.weight" not in tensors and policy is not None and not spec.is_reduced:
        lent_VH = policy.get("lm_head.weight", policy["model.embed_tokens.weight"])
        if lent_VH.shape[1] == spec.hidden_size:
            tensors["lm_head.weight"] = lent_VH.detach().to(tensors["fc.weight"].dtype).clone()
    return head_of_tensors(spec, tensors, str(folder))


def head_of_tensors(spec: Eagle3Spec, tensors: Mapping[str, Tensor], origin: str) -> Eagle3Head:
    """A head holding exactly these tensors (published names), in their dtype; `origin` begins every message."""
    with torch.device("meta"):
        head = Eagle3Head(spec, own_embeddings="embed_tokens.weight" in tensors)
    expected = head.state_dict()
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise ModelError(
            f"{origin}: expected the tensors of an EAGLE-3 head, missing {', '.join(missing) or 'none'}, "
            f"unexpected {', '.join(extra) or 'none'}; export it again with every tensor and its draft vocabulary map"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{origin}: expected {name} of shape {tuple(expected[name].shape)} by its config, "
                f"got {tuple(tensor.shape)}; config and weights belong to different heads"
            )
    head.load_state_dict(dict(tensors), assign=True)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    _check_vocabulary(head, origin)
    return head


def hf_config(spec: Eagle3Spec, dtype: str) -> dict[str, Any]:
    """The `config.json` of a head."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        **_rope_fields(spec.rope),
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "target_hidden_size": spec.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.layer_ids),
        "num_aux_hidden_states": len(spec.layer_ids),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "torch_dtype": dtype,
    }


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


def read_spec(folder: Path) -> Eagle3Spec:
    """The spec in a folder's `config.json`; raises ModelError as `read_eagle3` does."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: expected a draft head folder with config.json, found none") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON, got {error}; copy the file again") from error
    nested = config.pop("transformer_layer_config", {}) if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(nested, dict):
        got = type(nested if isinstance(config, dict) else config).__name__
        raise ModelError(f"{path}: expected a JSON object with the head's fields, got {got}; copy the file again")
    layer = {**nested, **config}
    _refuse_foreign(layer, path)
    try:
        hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        head_dim = int(layer.get("head_dim") or hidden // heads)
        return Eagle3Spec(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate_size=int(layer["intermediate_size"]),
            rms_norm_eps=float(layer["rms_norm_eps"]),
            rope=RopeSpec.from_config(layer, head_dim),
            max_position_embeddings=int(layer["max_position_embeddings"]),
            vocab_size=int(layer["vocab_size"]),
            draft_vocab_size=int(layer.get("draft_vocab_size") or layer["vocab_size"]),
            layer_ids=tuple(int(i) for i in layer["eagle_aux_hidden_state_layer_ids"]),
            target_hidden_size=int(layer.get("target_hidden_size") or hidden),
            norm_before_residual=bool(layer.get("norm_before_residual", False)),
            norm_before_fc=bool(layer.get("norm_before_fc", False)),
            fc_norm=bool(layer.get("fc_norm", False)),
        )
    except KeyError as error:
        raise ModelError(
            f"{path}: expected the field {error.args[0]}, found none; add it as the head was trained"
        ) from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path}: expected numbers in the head's fields, got {error}") from error


def _refuse_foreign(layer: Mapping[str, Any], path: Path) -> None:
    named = layer.get("architectures") or [""]
    architecture = str(named[0] if isinstance(named, list) else named)
    if "eagle3" not in architecture.lower() and layer.get("speculators_model_type") != "eagle3":
        raise ModelError(f"{path}: expected architectures LlamaForCausalLMEagle3, got {architecture or 'none'}")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{path}: expected num_hidden_layers 1, got {layer['num_hidden_layers']}")
    for name, only in REFUSED.items():
        if layer.get(name, only) not in (only, None):
            raise ModelError(f"{path}: expected {name} {only} (nothing else is implemented), got {layer[name]}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.exists():
            loaded: dict[str, Tensor] = load_file(safe)
            return loaded
        if pickled.exists():
            tensors: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
            return tensors
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{folder}: expected a whole weight file, got {reason}; copy it again") from error
    raise ModelError(f"{folder}: expected model.safetensors or pytorch_model.bin, found neither")


def _check_layer_ids(spec: Eagle3Spec, folder: Path, num_layers: int | None) -> None:
    lowest, highest = min(spec.layer_ids), max(spec.layer_ids)
    if lowest < 0 or (num_layers is not None and highest > num_layers):
        known = "not be negative" if num_layers is None else f"lie in 0..{num_layers} (the state entering each layer)"
        raise ModelError(
            f"{folder}: expected eagle_aux_hidden_state_layer_ids to {known}, got {list(spec.layer_ids)}; "
            "use a head trained for this policy"
        )


def _check_numbers(tensors: object, folder: Path) -> None:
    """Refuse weights that are not finite, matrices that hold no fractions, and maps that do."""
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{folder}: expected a weight file with named tensors, got something else; export it again")
    for name, tensor in tensors.items():
        is_map = str(name).removeprefix("model.") in ("d2t", "t2d")
        if is_map == tensor.is_floating_point():
            expected = "whole numbers" if is_map else "floating-point numbers"
            raise ModelError(f"{folder}: expected {name} to hold {expected}, got {tensor.dtype}; export it again")
        if not is_map and not is_finite(tensor):
            raise ModelError(
                f"{folder}: expected finite numbers in {name}, got NaN or infinity; use another checkpoint"
            )


def _canonical(tensors: Mapping[str, Tensor], spec: Eagle3Spec) -> dict[str, Tensor]:
    """Published names; the identity map that some exporters write for a full vocabulary is dropped."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        renamed[name] = tensor
    if not spec.is_reduced and "d2t" in renamed and not renamed["d2t"].any():
        renamed.pop("d2t")
        renamed.pop("t2d", None)
    if spec.is_reduced and "d2t" in renamed and "t2d" not in renamed:
        t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
        ids_V = torch.arange(renamed["d2t"].numel()) + renamed["d2t"]
        t2d[ids_V.clamp(0, spec.vocab_size - 1)] = True
        renamed["t2d"] = t2d
    return renamed


def _check_vocabulary(head: Eagle3Head, origin: str) -> None:
    ids_V = head.draft_token_ids()
    if ids_V is None:
        return
    inside = bool((ids_V >= 0).all() and (ids_V < head.spec.vocab_size).all())
    if not inside or len(set(ids_V.tolist())) != ids_V.numel():
        raise ModelError(
            f"{origin}: expected d2t to hold offsets (policy id = draft id + d2t[draft id]) to distinct ids below "
            f"{head.spec.vocab_size}, got ids from {int(ids_V.min())} to {int(ids_V.max())}"
        )
    assert head.t2d is not None
    t2d = torch.zeros_like(head.t2d)
    t2d[ids_V] = True
    if not torch.equal(t2d, head.t2d.bool()):
        raise ModelError(f"{origin}: expected t2d to mark exactly the ids of d2t, got another set; export it again")


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
