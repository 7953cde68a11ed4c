"""The learner's part of a checkpoint.

`policy/` is a Hugging Face folder with the float32 masters, `draft/` the drafter's folder, `learner.pt` the rest:
optimizer moments, counters, the drafter's random state and the token ids kept for replay. All is restored to the bit.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from leadout.errors import CheckpointError, ModelError
from leadout.records import Finish, Prompt, Rollout, RolloutId, Rounds, Source, Span
from leadout.storage import writing
from leadout.train.cotrain import DraftTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What is neither policy nor drafter."""

    version: int
    optimizer: dict[str, Any]


def write_learner(folder: Path, model: nn.Module, drafter: DraftTrainer | None, state: LearnerState) -> None:
    """Write into an existing folder; every part appears whole or not at all."""
    policy, temporary = folder / "policy", folder / ".policy.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    hf_model: Any = model
    with writing(folder):
        hf_model.save_pretrained(temporary)
    shutil.rmtree(policy, ignore_errors=True)
    temporary.replace(policy)
    whole: dict[str, Any] = {"version": state.version, "optimizer": state.optimizer, "drafter": None, "replay": []}
    if drafter is not None:
        drafter.student.save(folder / "draft")
        whole["drafter"] = drafter.state_dict()
        whole["replay"] = [_packed(rollout) for rollout in drafter.replay]
    temporary_file = folder / ".learner.pt.tmp"
    with writing(folder):
        torch.save(whole, temporary_file)
    temporary_file.replace(folder / "learner.pt")


def read_learner(folder: Path, model: nn.Module, drafter: DraftTrainer | None) -> LearnerState:
    """Restore policy and drafter in place and return the rest.

    Raises:
        CheckpointError: files missing or truncated, or of another model or drafter.

    """
    try:
        whole = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
        tensors: dict[str, Tensor] = {}
        for path in sorted((folder / "policy").glob("*.safetensors")):
            tensors.update(load_file(path))
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{folder}: expected a whole checkpoint, got {reason}; resume from an earlier one"
        ) from error
    if (whole["drafter"] is None) != (drafter is None):
        raise CheckpointError(
            f"{folder}: expected a checkpoint {'without' if drafter is None else 'with'} a trained drafter, got one "
            f"{'with' if drafter is None else 'without'}; resume with the recipe it was made by"
        )
    _load_policy(folder, model, tensors)
    if drafter is not None:
        _load_drafter(folder, drafter)
        drafter.load_state_dict(whole["drafter"])
        drafter.set_replay([_unpacked(row) for row in whole["replay"]])
    return LearnerState(version=int(whole["version"]), optimizer=whole["optimizer"])


def _load_drafter(folder: Path, drafter: DraftTrainer) -> None:
    try:
        drafter.student.load(folder / "draft")
    except ModelError as error:
        raise CheckpointError(f"{error}; resume with its own recipe, or from an earlier checkpoint") from error


def _load_policy(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    state = model.state_dict()
    held = {tensor.data_ptr() for name, tensor in state.items() if name in tensors}
    missing = sorted(name for name, tensor in state.items() if name not in tensors and tensor.data_ptr() not in held)
    wrong = sorted(name for name, t in tensors.items() if name not in state or state[name].shape != t.shape)
    if missing or wrong:
        raise CheckpointError(
            f"{folder}: expected the policy of this recipe, missing {', '.join(missing[:4]) or 'none'}, "
            f"unknown or misshapen {', '.join(wrong[:4]) or 'none'}; resume with its own recipe"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def _packed(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": tuple(rollout.request_id),
        "prompt": torch.from_numpy(rollout.prompt.token_ids),
        "tokens": torch.from_numpy(rollout.token_ids),
        "mask": torch.from_numpy(rollout.loss_mask),
    }


def _unpacked(row: Mapping[str, Any]) -> Rollout:
    """A rollout as far as the drafter needs it: ids, and which tokens the policy made."""
    tokens, mask = row["tokens"].numpy(), row["mask"].numpy()
    prompt = Prompt(id="replay", token_ids=row["prompt"].numpy(), text="")
    none = np.zeros(0, np.int16)
    return Rollout(
        request_id=RolloutId(*row["id"]),
        prompt=prompt,
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        policy_logprobs=np.zeros(len(tokens), np.float32),
        spans=tuple(_span(bool(made)) for made in mask),
        rounds=Rounds(drafted=none, accepted=none),
        finish=Finish.LENGTH,
    )


def _span(made: bool) -> Span:
    return Span(length=1, source=Source.POLICY if made else Source.GIVEN, version=0)
