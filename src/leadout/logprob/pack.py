"""Stage logprob, first half: groups become flat packs in which siblings share their prompt.

A prompt is laid down once and every completion of its group after it, with positions that continue the prompt's. A
group larger than the room left in a pack goes on in the next one, its prompt repeated there.

Axes: T tokens of a pack, B rows and S columns of the padded form.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadout.batch import TrainBatch
from leadout.records import FloatArray, Group, IntArray, Prompt, Rollout


def pack_groups(
    groups: Sequence[Group],
    advantages: Sequence[FloatArray],
    *,
    max_completions: int,
    first_rollout: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[TrainBatch]:
    """Pack the rollouts of a step.

    Args:
        groups: In order.
        advantages: Per group, one number a rollout.
        max_completions: Bound on the completions of a pack.
        first_rollout: Number of the first rollout within the step; the others follow.
        dtype: Of advantages and log-probabilities: float32, or float64 for a float64 policy.
        device: Where the tensors go.

    """
    packs: list[TrainBatch] = []
    pack, rollout = _Pack(), first_rollout
    for number, (group, advantages_G) in enumerate(zip(groups, advantages, strict=True)):
        start = 0
        while start < len(group.rollouts):
            if len(pack.rollouts) == max_completions:
                packs.append(pack.build(dtype, device))
                pack = _Pack()
            stop = min(start + max_completions - len(pack.rollouts), len(group.rollouts))
            pack.add_prompt(group.prompt, -1 - number)
            for sibling in range(start, stop):
                trained = not group.scores[sibling].masked
                pack.add_completion(group.rollouts[sibling], rollout, float(advantages_G[sibling]), trained)
                rollout += 1
            start = stop
    if pack.rollouts:
        packs.append(pack.build(dtype, device))
    return packs


class _Piece(NamedTuple):
    """One prompt or completion of a pack; scalars hold for all its tokens."""

    token_ids: IntArray
    first_position: int
    segment: int
    parent: int
    previous: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    advantage: float
    logprobs: FloatArray
    versions: IntArray

    def filled(self, value: float) -> npt.NDArray[np.float64]:
        return np.full(len(self.token_ids), value)


class _Pack:
    """A pack while it grows."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.rollouts: list[Rollout] = []
        self.first_rollout = 0
        self.size = 0

    def add_prompt(self, prompt: Prompt, segment: int) -> None:
        length = len(prompt.token_ids)
        self._add(
            _Piece(
                token_ids=prompt.token_ids,
                first_position=0,
                segment=segment,
                parent=segment,
                previous=self._previous(length, -1),
                mask=np.zeros(length, bool),
                advantage=0.0,
                logprobs=np.zeros(length),
                versions=np.full(length, -1, np.int32),
            )
        )
        self.prompt, self.prompt_length, self.prompt_end = segment, length, self.size - 1

    def add_completion(self, rollout: Rollout, number: int, advantage: float, trained: bool) -> None:
        if not self.rollouts:
            self.first_rollout = number
        self.rollouts.append(rollout)
        self._add(
            _Piece(
                token_ids=rollout.token_ids,
                first_position=self.prompt_length,
                segment=number,
                parent=self.prompt,
                previous=self._previous(rollout.length, self.prompt_end),
                mask=rollout.loss_mask & trained,
                advantage=advantage,
                logprobs=rollout.policy_logprobs,
                versions=rollout.versions,
            )
        )

    def _previous(self, length: int, first: int) -> npt.NDArray[np.int64]:
        previous = np.arange(self.size - 1, self.size - 1 + length)
        previous[:1] = first
        return previous

    def _add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.size += len(piece.token_ids)

    def build(self, dtype: torch.dtype, device: torch.device | str) -> TrainBatch:
        def column(parts: Iterable[npt.NDArray[Any]], kind: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(list(parts))).to(device=device, dtype=kind)

        pieces = self.pieces
        return TrainBatch(
            token_ids_T=column((p.token_ids for p in pieces), torch.int64),
            position_ids_T=column((p.first_position + np.arange(len(p.token_ids)) for p in pieces), torch.int64),
            segment_T=column((p.filled(p.segment) for p in pieces), torch.int64),
            parent_T=column((p.filled(p.parent) for p in pieces), torch.int64),
            previous_T=column((p.previous for p in pieces), torch.int64),
            loss_mask_T=column((p.mask for p in pieces), torch.bool),
            advantages_T=column((p.filled(p.advantage) for p in pieces), dtype),
            policy_logprobs_T=column((p.logprobs for p in pieces), dtype),
            version_T=column((p.versions for p in pieces), torch.int64),
            rollouts=tuple(self.rollouts),
            first_rollout=self.first_rollout,
        )


def block_mask(batch: TrainBatch) -> Tensor:
    """Who sees whom, bool[1, 1, T, T]: row i sees column j iff j <= i and j is of i's segment or its prompt."""
    segment_T, parent_T = batch.segment_T, batch.parent_T
    same_TT = segment_T[:, None] == segment_T[None, :]
    prompt_TT = parent_T[:, None] == segment_T[None, :]
    return (same_TT | prompt_TT).tril()[None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """The same pack with one row per completion, each with its own copy of the prompt, padded on the right."""

    index_BS: Tensor
    """Index into the pack of each cell; 0 in the padding."""
    mask_BS: Tensor
    """True where a cell holds a token."""
    row_R: Tensor
    """Row of each response token."""
    previous_column_R: Tensor
    """Column of the token before each response token."""


def padded_rows(batch: TrainBatch) -> PaddedRows:
    """Unshare a pack."""
    rows, row_R, column_R = [], [], []
    for row, (prompt_T, completion_T) in enumerate(completions(batch)):
        rows.append(torch.cat([prompt_T, completion_T]))
        row_R.append(torch.full_like(completion_T, row))
        column_R.append(torch.arange(completion_T.numel(), device=completion_T.device) + prompt_T.numel() - 1)
    lengths_B = torch.tensor([row.numel() for row in rows], device=batch.token_ids_T.device)
    index_BS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    columns_S = torch.arange(index_BS.shape[1], device=index_BS.device)
    return PaddedRows(
        index_BS=index_BS,
        mask_BS=columns_S[None, :] < lengths_B[:, None],
        row_R=torch.cat(row_R),
        previous_column_R=torch.cat(column_R),
    )


def completions(batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """(indices of the prompt, indices of the completion) of every rollout in the pack that has tokens, in order."""
    blocks = segments(batch)
    for number, rollout in enumerate(batch.rollouts, batch.first_rollout):
        if number in blocks:
            yield blocks[int(batch.parent_T[blocks[number][0]])], blocks[number]
        else:
            assert rollout.length == 0


def segments(batch: TrainBatch) -> dict[int, Tensor]:
    """Indices of each segment's tokens, in the order of the pack."""
    segments_T = batch.segment_T
    starts = [0, *((segments_T[1:] != segments_T[:-1]).nonzero().squeeze(-1) + 1).tolist(), segments_T.numel()]
    return {int(segments_T[a]): torch.arange(a, b, device=segments_T.device) for a, b in itertools.pairwise(starts)}
