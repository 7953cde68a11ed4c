"""From the policy's logits to the law of each position of a round, per row parameters and history included.

The engine owns one `Sampler`; it keeps token counts only for rows whose parameters have penalties.

Axes: B rows, N positions of a round, X = B x N, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from leadout.models.sampling import Law, ParamsBatch, filter_weights, penalise, tempered_scores, tempered_weights
from leadout.records import SamplingParams


@dataclass(frozen=True, slots=True)
class Laws:
    """Both laws of X positions."""

    sampled: Law
    """What tokens are drawn from."""
    policy: Law
    """softmax(logits / temperature), T = 0 counting as 1; the same object where nothing else is applied."""


class Sampler:
    """Applies penalties, temperature and filters."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._prompt_seen_SV: torch.Tensor | None = None
        self._output_counts_SV: torch.Tensor | None = None

    def admit(self, slot: int, params: SamplingParams, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Start a row's history; a no-op without penalties."""
        if not params.has_penalties:
            return
        if self._prompt_seen_SV is None or self._output_counts_SV is None:
            self._prompt_seen_SV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts_SV = torch.zeros(self._shape, dtype=torch.int16, device=self._device)
        self._prompt_seen_SV[slot].zero_()
        self._prompt_seen_SV[slot, prompt_ids] = True
        self._output_counts_SV[slot] = torch.bincount(output_ids, minlength=self._shape[1]).to(torch.int16)

    def observe(self, slots: Sequence[int], params: Sequence[SamplingParams], tokens: Sequence[torch.Tensor]) -> None:
        """Count committed tokens of rows with penalties."""
        if self._output_counts_SV is None:
            return
        for slot, row, ids in zip(slots, params, tokens, strict=True):
            if row.has_penalties:
                ones = torch.ones(ids.shape, dtype=torch.int16, device=self._device)
                self._output_counts_SV[slot].scatter_add_(0, ids, ones)

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """Laws after each column of `tokens_BN` (column 0: the last committed token, then the drafts of the round).

        `batch` has one entry per row. May write into `logits_XV`.
        """
        if not (batch.any_penalties or batch.any_greedy or batch.any_filters):
            law = Law.from_logits(logits_XV, batch, tokens_BN.shape[1])
            return Laws(sampled=law, policy=law)
        positions = batch.repeat(tokens_BN.shape[1])
        special = batch.any_penalties or batch.any_greedy
        plain_XV = logits_XV.clone() if special else logits_XV
        if batch.any_penalties:
            logits_XV = self._penalised(logits_XV, positions, slots, tokens_BN)
        weights_XV = tempered_weights(logits_XV, positions)
        if special:
            # Penalties may lead to tokens whose weight under the policy's own law underflows.
            scores_XV = tempered_scores(plain_XV, _ungreedy(positions))
            policy = Law.from_weights(scores_XV.exp(), scores_XV)
        else:
            policy = Law.from_weights(weights_XV)
        if batch.any_filters:
            weights_XV = filter_weights(weights_XV, positions)
        return Laws(sampled=Law.from_weights(weights_XV), policy=policy)

    def _penalised(
        self, logits_XV: torch.Tensor, positions: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor
    ) -> torch.Tensor:
        """Each position is penalised for the prompt, the output and the drafts before it."""
        assert self._prompt_seen_SV is not None and self._output_counts_SV is not None, "rows were not admitted"
        num_rows, num_positions = tokens_BN.shape
        index_B = torch.as_tensor(list(slots), device=self._device)
        counts_BV = self._output_counts_SV[index_B]
        counts = [counts_BV]
        for column in range(1, num_positions):
            one_hot = torch.zeros_like(counts_BV).scatter_(1, tokens_BN[:, column : column + 1], 1)
            counts.append(counts[-1] + one_hot)
        counts_XV = torch.stack(counts, 1).reshape(num_rows * num_positions, -1)
        seen_XV = self._prompt_seen_SV[index_B].repeat_interleave(num_positions, 0) | (counts_XV > 0)
        return penalise(logits_XV, seen_XV, counts_XV, positions)


def _ungreedy(batch: ParamsBatch) -> ParamsBatch:
    """The same rows with temperature 1 where it was 0: log-probabilities of greedy tokens are untempered."""
    temperature_X = batch.temperature_X.masked_fill(batch.temperature_X == 0.0, 1.0)
    return replace(batch, temperature_X=temperature_X, any_greedy=False)
