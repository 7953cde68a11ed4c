"""Rollouts in files, as far as a drafter learns from them: prompt tokens and generated tokens, nothing else.

One `.npz` per batch of generation; a file appears whole or not at all. Axes: N rollouts, X tokens of all of them.
"""

from __future__ import annotations

import itertools
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


def read_rollouts(path: Path, vocab_size: int) -> list[Group]:
    """Groups without rewards; neighbours with the same prompt are siblings.

    Raises:
        CheckpointError: the file is damaged, or its tokens are not ids below `vocab_size`.

    """
    try:
        with np.load(path) as arrays:
            prompts = _split(arrays["prompts_X"], arrays["prompt_lengths_N"], vocab_size)
            tokens = _split(arrays["tokens_X"], arrays["lengths_N"], vocab_size)
            pairs = list(zip(prompts, tokens, strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: expected kept rollouts, got {error}; delete it to make them again") from error
    siblings = itertools.groupby(pairs, key=lambda pair: pair[0].tobytes())
    return [_group(draw, list(members)) for draw, (_, members) in enumerate(siblings)]


def unscored_group(rollouts: Sequence[Rollout]) -> Group:
    """Siblings that nobody rewards."""
    scores = (Score(reward=0.0, parts={}, text=""),) * len(rollouts)
    return Group(prompt=rollouts[0].prompt, rollouts=tuple(rollouts), scores=scores)


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def _split(tokens_X: IntArray, lengths_N: IntArray, vocab_size: int) -> list[IntArray]:
    """Raises ValueError for anything but token ids, as many as the lengths say."""
    for array in (tokens_X, lengths_N):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"an array of {array.dtype} with {array.ndim} axes")
    if not lengths_N.size or lengths_N.min() < 1 or lengths_N.sum() != tokens_X.size:
        raise ValueError(f"{tokens_X.size} tokens for {lengths_N.size} rollouts")
    if tokens_X.min() < 0 or tokens_X.max() >= vocab_size:
        raise ValueError(f"tokens {tokens_X.min()}..{tokens_X.max()} of a vocabulary of {vocab_size}")
    return [np.asarray(part) for part in np.split(tokens_X, np.cumsum(lengths_N)[:-1])]


def _group(draw: int, members: Sequence[tuple[IntArray, IntArray]]) -> Group:
    prompt = Prompt(id=str(draw), token_ids=members[0][0], text="")
    return unscored_group([_rollout(RolloutId(draw, sibling), prompt, ids) for sibling, (_, ids) in enumerate(members)])


def _rollout(rollout_id: RolloutId, prompt: Prompt, token_ids: IntArray) -> Rollout:
    none, unknown = np.zeros(0, np.int16), np.zeros(len(token_ids), np.float32)
    return Rollout(
        request_id=rollout_id,
        prompt=prompt,
        token_ids=token_ids,
        logprobs=unknown,
        policy_logprobs=unknown,
        spans=(Span(length=len(token_ids), source=Source.POLICY, version=0),),
        rounds=Rounds(drafted=none, accepted=none),
        finish=Finish.LENGTH,
    )
