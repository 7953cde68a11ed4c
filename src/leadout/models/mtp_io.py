"""Multi-token heads in MiMo's layout: inside the policy's own checkpoint, or in a folder of their own.

Either way the tensors are `model.mtp_layers.0.*` and `config.json` has the policy's sizes and
`num_nextn_predict_layers: 1`. Only the first head is used, again and again for longer drafts; checkpoints with several
are refused, since drafts of the later ones would need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadout.errors import ModelError
from leadout.models.head_files import (
    check_policy,
    check_tensors_fit,
    read_fields,
    read_shape,
    shape_fields,
    whole,
    write_files,
)
from leadout.models.loading import MTP_PREFIX, iter_mtp_weights
from leadout.models.mtp import MtpHead, MtpSpec

_PREFIX = f"{MTP_PREFIX}0."


def has_mtp(folder: Path) -> bool:
    """Whether a checkpoint's config says that it brings a multi-token head along."""
    return bool(read_fields(folder).get("num_nextn_predict_layers"))


def write_mtp(head: MtpHead, folder: Path) -> None:
    """Write a folder of its own; each file appears whole or not at all."""
    (num_layers,) = head.spec.layer_ids
    config = {
        "architectures": ["MiMoMTPModel"],
        "model_type": "mimo_mtp",
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        **shape_fields(head.spec, head.dtype),
    }
    write_files(folder, config, {f"{_PREFIX}{name}": tensor for name, tensor in head.state_dict().items()})


def read_mtp(folder: Path, *, policy: Mapping[str, Tensor] | None = None, num_layers: int | None = None) -> MtpHead:
    """The head in a folder of its own or in a policy's checkpoint, in the dtype of the file.

    Args:
        folder: Holds `config.json` and safetensors.
        policy: The policy's state dict; its shapes are checked against the config.
        num_layers: The policy's layers, which must be the config's.

    Raises:
        ModelError: no such head, several of them, tensors missing, unknown, misshapen or not finite, or another policy
            than it was made for.

    """
    path, fields = folder / "config.json", read_fields(folder)
    count = fields.get("num_nextn_predict_layers")
    if count != 1:
        raise ModelError(f"{path}: expected num_nextn_predict_layers 1 (one multi-token head), got {count!r}")

    def make(common: dict[str, Any]) -> MtpSpec:
        return MtpSpec(
            **common,
            draft_vocab_size=common["vocab_size"],
            layer_ids=(whole(fields, "num_hidden_layers"),),
            target_hidden_size=common["hidden_size"],
        )

    spec = read_shape(fields, path, make)
    assert isinstance(spec, MtpSpec)
    if num_layers is not None and spec.layer_ids != (num_layers,):
        raise ModelError(
            f"{folder}: expected a multi-token head for a policy of {num_layers} layers, got one for "
            f"{spec.layer_ids[0]}; use a head trained for this policy"
        )
    check_policy(spec, folder, policy, None)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in iter_mtp_weights(folder)}
    with torch.device("meta"):
        head = MtpHead(spec)
    check_tensors_fit(head.state_dict(), tensors, str(folder), "a multi-token head")
    head.load_state_dict(tensors, assign=True)
    return head.requires_grad_(True)
