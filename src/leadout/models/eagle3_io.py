"""Draft head folders in the published EAGLE-3 form, sequential and parallel.

Written as Hugging Face `LlamaForCausalLMEagle3`, which vLLM, SGLang and SpecForge load, or in the speculators form
(`speculators_model_type`, layer fields under `transformer_layer_config`). Both are read. A parallel head is marked by
`ptd_token_id` (vLLM), or by `speculators_model_type: peagle` with `mask_token_id`; its state for unknown tokens is the
tensor `mask_hidden`, its embedding for them is `mask_embedding` or, in the speculators form and in vLLM, the row of
that token in the head's own `embed_tokens`. A map or head that is missing is never guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadout.errors import ModelError, about
from leadout.models.eagle3 import Eagle3Head, make_head
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.head_files import (
    FileForm,
    check_policy,
    check_tensors_fit,
    flag,
    read_fields,
    read_shape,
    read_tensors,
    shape_fields,
    whole,
    write_files,
)

logger = logging.getLogger(__name__)

REFUSED = {"attention_bias": False, "mlp_bias": False, "logit_scale": 1.0, "norm_output": False, "hidden_act": "silu"}
"""Fields that would change the forward pass, with the only value it has here."""

_MASK_FIELDS = ("ptd_token_id", "pard_token", "mask_token_id")
_SPECULATORS = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}


def write_eagle3(head: Eagle3Head, folder: Path) -> None:
    """Write a head as its files were, or in the Hugging Face form; each file appears whole or not at all.

    An unchanged head gives the same bytes: names, fields and order of an earlier config are kept.
    """
    form, tensors = head.form, head.state_dict()
    if form is None:
        write_files(folder, hf_config(head), tensors)
        return
    if head.spec.mask_token_id is not None and "mask_embedding" not in form.names:
        table_PH = tensors["embed_tokens.weight"].clone()
        table_PH[head.spec.mask_token_id] = tensors.pop("mask_embedding")[0]
        tensors["embed_tokens.weight"] = table_PH
    if "t2d" not in form.names:
        tensors.pop("t2d", None)
    named = {
        form.names.get(name, name): tensor.reshape(form.shapes.get(name, tensor.shape))
        for name, tensor in tensors.items()
    }
    write_files(folder, form.config_for(head.dtype), named | dict(form.unused))


def write_speculators(head: Eagle3Head, folder: Path, policy_embedding_PH: Tensor, *, policy: str, drafts: int) -> None:
    """Write a head in the speculators form.

    A parallel head gets the policy's embeddings with its own row for unknown tokens, as vLLM wants it.

    Args:
        head: The head, in the dtype it is to be written in.
        folder: Where to.
        policy_embedding_PH: The policy's input embeddings.
        policy: Name of the policy, for the reader.
        drafts: Tokens to draft per round unless told otherwise.

    """
    spec = head.spec
    kind = "eagle3" if spec.mask_token_id is None else "peagle"
    fields = hf_config(head)
    own = (
        *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
        *("norm_before_residual", "norm_before_fc", "fc_norm"),
    )
    config: dict[str, Any] = {
        "architectures": [_SPECULATORS[kind]],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": policy, "architectures": []},
        },
        "tie_word_embeddings": False,
        "torch_dtype": fields["torch_dtype"],
        **{name: fields[name] for name in own},
    }
    layer = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    # vLLM 0.32 looks for these two among the layer's fields: the number of states always, the norms of a parallel head.
    layer |= {name: fields[name] for name in ("num_aux_hidden_states", "fc_norm")}
    config["transformer_layer_config"] = shape_fields(spec, head.dtype) | layer
    tensors = dict(head.state_dict())
    if spec.mask_token_id is not None:
        config["mask_token_id"] = spec.mask_token_id
        table_PH = tensors.get("embed_tokens.weight", policy_embedding_PH).to(head.dtype).clone()
        table_PH[spec.mask_token_id] = tensors.pop("mask_embedding")[0]
        tensors["embed_tokens.weight"] = table_PH
    write_files(folder, config, {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()})


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
            vocabulary is the policy's, with a warning, and its shapes are checked against the config.
        target_hidden_size: The policy's width, if only that is known.
        num_layers: The policy's layers; the head may tap what enters each of them, or what leaves the last.

    Raises:
        ModelError: files missing, truncated or of another architecture; tensors missing, extra or misshapen; no
            `d2t` for a reduced vocabulary; layer ids missing or not the policy's; numbers that are not finite; another
            policy than the head was made for.

    """
    spec = read_spec(folder)
    _check_layer_ids(spec, folder, num_layers)
    check_policy(spec, folder, policy, target_hidden_size)
    held = read_tensors(folder)
    tensors = _canonical(held, spec)
    form = FileForm(
        config=(folder / "config.json").read_text(encoding="utf-8"),
        names={_own_name(name): name for name in held if _own_name(name) in tensors},
        shapes={_own_name(name): tensor.shape for name, tensor in held.items()},
        unused={name: tensor for name, tensor in held.items() if _own_name(name) not in tensors},
    )
    borrows = False
    if "lm_head.weight" not in tensors and policy is not None and not spec.is_reduced:
        lent_VH = policy.get("lm_head.weight", policy["model.embed_tokens.weight"])
        if lent_VH.shape[1] == spec.hidden_size and "fc.weight" in tensors:
            borrows = True
            tensors["lm_head.weight"] = lent_VH.detach().to(tensors["fc.weight"].dtype).clone()
            logger.warning("%s holds no lm_head.weight: the head starts from a copy of the policy's", folder)
    head = head_of_tensors(spec, tensors, str(folder))
    head.borrows_output, head.form = borrows, form
    return head


def head_of_tensors(spec: Eagle3Spec, tensors: Mapping[str, Tensor], origin: str) -> Eagle3Head:
    """A head holding exactly these tensors (published names), in their dtype; `origin` begins every message."""
    with torch.device("meta"), about(origin):
        head = make_head(spec, own_embeddings="embed_tokens.weight" in tensors)
    check_tensors_fit(head.state_dict(), tensors, origin, "an EAGLE-3 head")
    head.load_state_dict(dict(tensors), assign=True)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    _check_vocabulary(head, origin)
    return head


def hf_config(head: Eagle3Head) -> dict[str, Any]:
    """The `config.json` of a head."""
    spec = head.spec
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **shape_fields(spec, head.dtype),
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
    }
    return config if spec.mask_token_id is None else config | {"ptd_token_id": spec.mask_token_id}


def read_spec(folder: Path) -> Eagle3Spec:
    """The spec in a folder's `config.json`; raises ModelError as `read_eagle3` does."""
    path, fields = folder / "config.json", read_fields(folder)
    _refuse_foreign(fields, path)
    masks = [fields[name] for name in _MASK_FIELDS if fields.get(name) is not None]
    if fields.get("speculators_model_type") == "peagle" and not masks:
        raise ModelError(f"{path}: expected the field mask_token_id, found none; add it as the head was trained")

    def make(common: dict[str, Any]) -> Eagle3Spec:
        return Eagle3Spec(
            **common,
            draft_vocab_size=whole(fields, "draft_vocab_size", common["vocab_size"]),
            layer_ids=_layer_ids(fields),
            target_hidden_size=whole(fields, "target_hidden_size", common["hidden_size"]),
            # Where an EAGLE-3 head of the speculators form does not say, vLLM takes it for on.
            norm_before_residual=flag(fields, "norm_before_residual", fields.get("speculators_model_type") == "eagle3"),
            norm_before_fc=flag(fields, "norm_before_fc", False),
            fc_norm=flag(fields, "fc_norm", False),
            mask_token_id=whole({"mask_token_id": masks[0]}, "mask_token_id") if masks else None,
        )

    spec = read_shape(fields, path, make)
    assert isinstance(spec, Eagle3Spec)
    return spec


def _layer_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Raises KeyError where they are missing, ModelError for anything but a list of whole numbers."""
    name = "eagle_aux_hidden_state_layer_ids"
    if fields.get(name) is None:
        raise KeyError(name)
    given = fields[name]
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise ModelError(f"expected a list of layers in {name}, got {given!r}")
    return tuple(given)


def _refuse_foreign(layer: Mapping[str, Any], path: Path) -> None:
    named = layer.get("architectures") or [""]
    architecture = str(named[0] if isinstance(named, list) else named)
    ours = any(name in architecture.lower() for name in ("eagle3", "peagle"))
    if not ours and layer.get("speculators_model_type") not in _SPECULATORS:
        raise ModelError(f"{path}: expected architectures LlamaForCausalLMEagle3, got {architecture or 'none'}")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{path}: expected num_hidden_layers 1, got {layer['num_hidden_layers']!r}")
    for name, only in REFUSED.items():
        if layer.get(name, only) not in (only, None):
            raise ModelError(f"{path}: expected {name} {only} (nothing else is implemented), got {layer[name]}")


def _check_layer_ids(spec: Eagle3Spec, folder: Path, num_layers: int | None) -> None:
    lowest, highest = min(spec.layer_ids), max(spec.layer_ids)
    if lowest < 0 or (num_layers is not None and highest > num_layers):
        known = "not be negative" if num_layers is None else f"lie in 0..{num_layers} (the state entering each layer)"
        raise ModelError(
            f"{folder}: expected eagle_aux_hidden_state_layer_ids to {known}, got {list(spec.layer_ids)}; "
            "use a head trained for this policy"
        )


def _own_name(name: str) -> str:
    """A tensor's name in the head, from its name in a file."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _canonical(tensors: Mapping[str, Tensor], spec: Eagle3Spec) -> dict[str, Tensor]:
    """Published names; the identity map that some exporters write for a full vocabulary is dropped."""
    renamed = {_own_name(name): tensor for name, tensor in tensors.items()}
    if not spec.is_reduced and "d2t" in renamed and not renamed["d2t"].any():
        renamed.pop("d2t")
        renamed.pop("t2d", None)
    if spec.is_reduced and "d2t" in renamed and "t2d" not in renamed:
        t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
        ids_V = torch.arange(renamed["d2t"].numel()) + renamed["d2t"]
        t2d[ids_V.clamp(0, spec.vocab_size - 1)] = True
        renamed["t2d"] = t2d
    if spec.mask_token_id is not None:
        if "mask_hidden" in renamed:
            renamed["mask_hidden"] = renamed["mask_hidden"].reshape(1, -1)
        table_PH = renamed.get("embed_tokens.weight")
        has_row = table_PH is not None and table_PH.ndim == 2 and table_PH.shape[0] > spec.mask_token_id
        if "mask_embedding" not in renamed and table_PH is not None and has_row:
            renamed["mask_embedding"] = table_PH[spec.mask_token_id : spec.mask_token_id + 1].clone()
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
