"""Caches and samplers with a known mistake, each the real thing with one part exchanged.

Axes: B rows, N positions of a round, X = B x N, V vocabulary, M = keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.kv import KVSlots
from leadout.models.sampling import Law, ParamsBatch, tempered_weights
from leadout.records import SamplingParams
from leadout.rollout.parts import LawMaker
from leadout.rollout.sampler import Laws

Ints = npt.NDArray[np.int64]


class TakenKV(KVSlots):
    """Takes over another cache's memory and slots; the other must not be used any more."""

    def __init__(self, kv: KVSlots) -> None:
        vars(self).update(vars(kv))
        self._written = 0

    def write_block(self, layer: int, rows: slice, start: int, block_BNMD: torch.Tensor) -> None:
        """Remember the width, write."""
        self._written = block_BNMD.shape[1]
        super().write_block(layer, rows, start, block_BNMD)

    def write_at(self, layer: int, rows_B1: torch.Tensor, positions_BN: torch.Tensor, block_BNMD: torch.Tensor) -> None:
        """Remember the width, write."""
        self._written = block_BNMD.shape[1]
        super().write_at(layer, rows_B1, positions_BN, block_BNMD)


class StaleKV(TakenKV):
    """After drafts were dropped the first of them stays in the cache in place of the token that replaced it."""

    def __init__(self, kv: KVSlots) -> None:
        super().__init__(kv)
        self._stale: set[int] = set()

    def advance(self, slots: Sequence[int], counts_B: Ints) -> None:
        """A block of which not all was kept leaves a stale entry behind."""
        for slot, count in zip(slots, counts_B.tolist(), strict=True):
            (self._stale.add if count < self._written else self._stale.discard)(slot)
        super().advance(slots, counts_B)

    def rollback(self, slots: Sequence[int], lengths_B: Ints) -> None:
        """The same when tokens are taken back."""
        shorter = lengths_B < self.lengths[list(slots)]
        self._stale.update(slot for slot, is_shorter in zip(slots, shorter, strict=True) if is_shorter)
        super().rollback(slots, lengths_B)

    def release(self, slots: Sequence[int]) -> None:
        """Forget."""
        self._stale.difference_update(slots)
        super().release(slots)

    def write_block(self, layer: int, rows: slice, start: int, block_BNMD: torch.Tensor) -> None:
        """Write all but the stale entries."""
        stale = [row for row in range(rows.start, rows.stop) if self._slot_at[row] in self._stale]
        kept = self._layers[layer][stale, :, start].clone()
        super().write_block(layer, rows, start, block_BNMD)
        self._layers[layer][stale, :, start] = kept

    def write_at(self, layer: int, rows_B1: torch.Tensor, positions_BN: torch.Tensor, block_BNMD: torch.Tensor) -> None:
        """Write all but the stale entries."""
        rows = rows_B1[:, 0].tolist()
        stale = [index for index, row in enumerate(rows) if self._slot_at[row] in self._stale]
        row_S = rows_B1[stale, 0]
        kept = self._layers[layer][row_S, :, positions_BN[stale, 0]].clone()
        super().write_at(layer, rows_B1, positions_BN, block_BNMD)
        self._layers[layer][row_S, :, positions_BN[stale, 0]] = kept


class ShiftedKV(TakenKV):
    """A row's first rejection moves all its later positions by one."""

    def __init__(self, kv: KVSlots) -> None:
        super().__init__(kv)
        self._shifted: set[int] = set()

    def advance(self, slots: Sequence[int], counts_B: Ints) -> None:
        """One too many, once per row."""
        moved_B = counts_B.copy()
        for index, slot in enumerate(slots):
            room = self.lengths[slot] + counts_B[index] < self.max_len - self._written
            if counts_B[index] < self._written and slot not in self._shifted and room:
                self._shifted.add(slot)
                moved_B[index] += 1
        super().advance(slots, moved_B)

    def release(self, slots: Sequence[int]) -> None:
        """Forget."""
        self._shifted.difference_update(slots)
        super().release(slots)


class SamplerAround:
    """A sampler that hands everything on; faults change `laws`."""

    def __init__(self, inner: LawMaker) -> None:
        self._inner = inner

    def admit(self, slot: int, params: SamplingParams, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Handed on."""
        self._inner.admit(slot, params, prompt_ids, output_ids)

    def observe(self, slots: Sequence[int], params: Sequence[SamplingParams], tokens: Sequence[torch.Tensor]) -> None:
        """Handed on."""
        self._inner.observe(slots, params, tokens)

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """Handed on."""
        return self._inner.laws(logits_XV, batch, slots, tokens_BN)


class LateFilters(SamplerAround):
    """Rounds with drafts see the law before filters; the rule applies them too late."""

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """No filters where anything was drafted."""
        if tokens_BN.shape[1] > 1:
            batch = replace(batch, any_filters=False)
        return super().laws(logits_XV, batch, slots, tokens_BN)


class ForgetfulPenalties(SamplerAround):
    """Later positions of a round are penalised for the history before the round only."""

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """The drafts of the round are replaced by a token that is in the history already."""
        return super().laws(logits_XV, batch, slots, tokens_BN[:, :1].expand(-1, tokens_BN.shape[1]).contiguous())


class UntemperedLogprobs(SamplerAround):
    """Returned log-probabilities are those before temperature."""

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """The policy's law at temperature 1."""
        plain = replace(batch.repeat(tokens_BN.shape[1]), any_tempered=False, any_greedy=False)
        policy = Law.from_weights(tempered_weights(logits_XV.clone(), plain))
        return Laws(sampled=super().laws(logits_XV, batch, slots, tokens_BN).sampled, policy=policy)
