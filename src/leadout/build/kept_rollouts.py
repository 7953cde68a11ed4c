"""Rollouts in files, as far as a drafter learns from them: prompt tokens and generated tokens, nothing else.

One `.npz` per batch of generation; a file appears whole or not at all. Axes: N rollouts, X tokens of all of them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from leadout.errors import CheckpointError
from leadout.records import Finish, Group, IntArray, Prompt, Rollout, RolloutId, Rounds, Score, Source, Span


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the token ids of some rollouts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                prompt_lengths_N=np.array([len(r.prompt.token_ids) for r in rollouts], np.int32),
                lengths_N=np.array([r.length for r in rollouts], np.int32),
                prompts_X=_joined([r.prompt.token_ids for r in rollouts]),
                tokens_X=_joined([r.token_ids for r in rollouts]),
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rollouts(path: Path) -> list[Group]:
    """One group per rollout, numbered from 0, without rewards.

    Raises:
        CheckpointError: the file is damaged.

    """
    try:
        with np.load(path) as arrays:
            prompts = _split(arrays["prompts_X"], arrays["prompt_lengths_N"])
            tokens = _split(arrays["tokens_X"], arrays["lengths_N"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: expected kept rollouts, got {error}; delete it to make them again") from error
    return [_group(draw, *pair) for draw, pair in enumerate(zip(prompts, tokens, strict=True))]


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def _split(tokens_X: IntArray, lengths_N: IntArray) -> list[IntArray]:
    return [np.asarray(part) for part in np.split(tokens_X, np.cumsum(lengths_N)[:-1])]


def _group(draw: int, prompt_ids: IntArray, token_ids: IntArray) -> Group:
    prompt, none = Prompt(id=str(draw), token_ids=prompt_ids, text=""), np.zeros(0, np.int16)
    unknown = np.zeros(len(token_ids), np.float32)
    rollout = Rollout(
        request_id=RolloutId(draw, 0),
        prompt=prompt,
        token_ids=token_ids,
        logprobs=unknown,
        policy_logprobs=unknown,
        spans=(Span(length=len(token_ids), source=Source.POLICY, version=0),),
        rounds=Rounds(drafted=none, accepted=none),
        finish=Finish.LENGTH,
    )
    return Group(prompt=prompt, rollouts=(rollout,), scores=(Score(reward=0.0, parts={}, text=""),))
