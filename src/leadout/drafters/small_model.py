"""A smaller language model as drafter: its own decoder and cache, sampled with its q kept, or greedy.

Any model of the decoder's families with the policy's tokenizer drafts: a smaller sibling, or a few of the policy's own
layers. While speculation is off committed tokens only queue up; the next draft first runs them. Siblings admitted
together share the run over their prompt. Drafts are taken out of the cache again after each round.

Rows that would not fit the draft model's context go on without drafts.

Axes: B rows, K drafts, M tokens not yet run, H hidden size, V policy vocabulary, D the draft model's vocabulary as far
as the policy has it, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.errors import ModelError, RefitError
from leadout.interfaces import Draft, DraftProbs, Noise
from leadout.models.decoder import FusedDecoder
from leadout.models.sampling import Law, ParamsBatch, filter_weights, tempered_weights
from leadout.records import Request, SamplingParams

Ints = npt.NDArray[np.int64]

CHUNK = 512
"""Tokens run at once where many have queued up."""


@dataclass(slots=True)
class _Row:
    own: int
    """Slot in the drafter's own cache."""
    params: SamplingParams
    waiting: list[int]
    """Committed tokens not yet run, the newest last."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """Tokens that several rows share and none has run yet."""

    tokens: list[int]
    slots: set[int]


class SmallModelDrafter:
    """Implements `leadout.interfaces.Drafter`."""

    def __init__(
        self,
        decoder: FusedDecoder,
        *,
        num_slots: int,
        policy_vocab_size: int,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> None:
        """`decoder` holds the draft model's weights; its `max_len` is the longest row that gets drafts.

        `temperature` is relative to each row's own; `greedy` proposes argmax drafts as point masses.
        """
        self.decoder = decoder
        self._kv = decoder.new_kv(num_slots)
        self._vocab_size = min(policy_vocab_size, decoder.spec.vocab_size)
        self._greedy = greedy
        self._temperature = temperature
        self._rows: dict[int, _Row] = {}
        self._prompts: list[_Prompt] = []
        self.version = 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Needs none."""
        return ()

    @property
    def runs_context(self) -> bool:
        """The small model."""
        return True

    @property
    def vocab_size(self) -> int:
        """Tokens it can draft: those that both vocabularies have."""
        return self._vocab_size

    @property
    def point_mass(self) -> bool:
        """Whether drafts are greedy."""
        return self._greedy

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Remember the prompt; nothing runs before the first draft."""
        context = requests[0].prompt.token_ids.tolist()
        if requests[0].given is not None:
            context += requests[0].given.token_ids.tolist()
        for slot, own, request in zip(slots, self._kv.allocate(len(slots)), requests, strict=True):
            self._rows[slot] = _Row(own, request.params, [])
        self._prompts.append(_Prompt(context, set(slots)))

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: Ints,
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Queue committed tokens for the next draft."""
        tokens = tokens_BN.tolist()
        for index, slot in enumerate(slots):
            self._rows[slot].waiting += tokens[index][: counts_B[index]]

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """Catch up on committed tokens, draft, and take the drafts out of the cache again."""
        counts_B = self._fitting(slots, lengths_B)
        active = np.flatnonzero(counts_B)
        num_drafts = int(counts_B.max(initial=0))
        device = self.decoder.device
        tokens_BK = torch.zeros((len(slots), max(num_drafts, 1)), dtype=torch.int64, device=device)
        if active.size == 0:
            return Draft(tokens_BK=tokens_BK, counts_B=counts_B, probs=None)
        index_A = torch.from_numpy(active).to(device)
        tokens_AK, values_AKD = self._draft([slots[int(i)] for i in active], num_drafts, noise, index_A)
        tokens_BK[index_A] = tokens_AK
        probs = None
        if values_AKD is not None:
            values_BKD = values_AKD
            if active.size < len(slots):
                values_BKD = values_AKD.new_zeros((len(slots), *values_AKD.shape[1:]))
                values_BKD[index_A] = values_AKD
            probs = DraftProbs(values_BKV=values_BKD, columns_BK=tokens_BK, token_ids_V=None)
        return Draft(tokens_BK=tokens_BK, counts_B=counts_B, probs=probs)

    def _fitting(self, slots: Sequence[int], lengths_B: Ints) -> Ints:
        """`lengths_B`, less where the draft model's context ends."""
        held = {slot: len(prompt.tokens) for prompt in self._prompts for slot in prompt.slots}
        used_B = np.array(
            [
                held.get(slot, int(self._kv.lengths[self._rows[slot].own])) + len(self._rows[slot].waiting)
                for slot in slots
            ]
        )
        # The last draft is never run, so a row may be drafted one token past what fits the cache.
        room_B = self._kv.max_len - used_B + 1
        return np.asarray(np.minimum(lengths_B, np.where(used_B <= self._kv.max_len, room_B, 0)), np.int64)

    def _draft(
        self, slots: Sequence[int], num_drafts: int, noise: Noise, index_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [A, K] of A rows and their laws [A, K, D], None when greedy."""
        self._run_prompts(slots)
        own = [self._rows[slot].own for slot in slots]
        hidden_AH = self._catch_up(slots, own)
        committed_A = self._kv.lengths[own].copy()
        params = self._draft_params(slots)
        tokens, values = [], []
        for depth in range(num_drafts):
            logits_AD = self.decoder.logits(hidden_AH)[:, : self._vocab_size]
            if self._greedy:
                tokens.append(logits_AD.argmax(-1))
            else:
                law = self._law(logits_AD, params)
                tokens.append(law.draw(noise.draft_uniforms(depth)[index_A]))
                values.append(law.probs(self._vocab_size))
            if depth + 1 < num_drafts:
                # Rows at the end of the context go on with padding, which counts for nothing.
                room_A = np.minimum(1, self._kv.max_len - self._kv.lengths[own])
                hidden_AH = self.decoder.forward(tokens[-1][:, None], self._kv, own, (), room_A).hidden_BNH[:, 0]
                self._kv.advance(own, room_A)
        self._kv.rollback(own, committed_A)
        return torch.stack(tokens, 1), torch.stack(values, 1) if values else None

    def _law(self, logits_AD: torch.Tensor, params: ParamsBatch) -> Law:
        weights_AD = tempered_weights(logits_AD, params)
        if params.any_filters:
            # q may be any known law; filtering it like p wastes fewer drafts on tokens p cannot emit.
            weights_AD = filter_weights(weights_AD, params)
        return Law.from_weights(weights_AD)

    def _draft_params(self, slots: Sequence[int]) -> ParamsBatch:
        rows = [self._rows[slot].params for slot in slots]
        if self._temperature != 1.0:
            rows = [replace(row, temperature=row.temperature * self._temperature) for row in rows]
        return ParamsBatch.of(rows, self.decoder.device)

    def _run_prompts(self, slots: Sequence[int]) -> None:
        """Run the shared prompts of these rows once each and copy the cache to the siblings."""
        wanted = set(slots)
        for prompt in [p for p in self._prompts if p.slots & wanted]:
            owner, *others = (self._rows[slot].own for slot in sorted(prompt.slots))
            self._run([owner], [prompt.tokens])
            if others:
                self._kv.copy_prefix(owner, others, len(prompt.tokens))
            self._prompts.remove(prompt)

    def _catch_up(self, slots: Sequence[int], own: Sequence[int]) -> torch.Tensor:
        """Run the tokens committed since the last draft; the newest one's state, [B, H]."""
        waiting = [self._rows[slot].waiting for slot in slots]
        assert all(waiting), "every row has gained a token since its last draft"
        for slot in slots:
            self._rows[slot].waiting = []
        return self._run(own, waiting)

    def _run(self, own: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to the cache, in chunks that bound memory; the last token's state of each row, [B, H]."""
        device = self.decoder.device
        counts_B = np.array([len(row) for row in tokens], np.int64)
        tokens_BM = np.zeros((len(own), int(counts_B.max())), np.int64)
        for index, row in enumerate(tokens):
            tokens_BM[index, : len(row)] = row
        width = max(1, CHUNK // len(own))
        last_BH: torch.Tensor | None = None
        for start in range(0, tokens_BM.shape[1], width):
            piece_BN = torch.from_numpy(tokens_BM[:, start : start + width]).to(device)
            part_B = np.clip(counts_B - start, 0, piece_BN.shape[1])
            hidden_BNH = self.decoder.forward(piece_BN, self._kv, own, (), part_B).hidden_BNH
            self._kv.advance(own, part_B)
            at_B = torch.from_numpy(np.clip(part_B - 1, 0, None)).to(device)
            here_BH = hidden_BNH[torch.arange(len(own), device=device), at_B]
            if last_BH is None:
                last_BH = here_BH
            else:
                last_BH = torch.where(torch.from_numpy(part_B > 0).to(device)[:, None], here_BH, last_BH)
        assert last_BH is not None
        return last_BH

    def release(self, slots: Sequence[int]) -> None:
        """Forget the rows."""
        known = [slot for slot in slots if slot in self._rows]
        self._kv.release([self._rows.pop(slot).own for slot in known])
        for prompt in self._prompts:
            prompt.slots.difference_update(known)
        self._prompts = [prompt for prompt in self._prompts if prompt.slots]

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights. Raises RefitError, before anything changed, when names or shapes differ."""
        try:
            self.decoder.load(weights)
        except ModelError as error:
            raise RefitError(f"draft {error}") from error
        self.version = version
