"""A drafter that is the policy itself plus noise: never fast, but every draft position is accepted often.

The audit's default drafter. An untrained head is rejected at once, so bonus tokens and later positions would stay
empty and faults in them unseen. This one runs the policy's own decoder over a cache of its own, adds low-rank noise to
the logits, and proposes from a part of the vocabulary, so that a vocabulary map is exercised too.

Axes: B rows, K drafts, M tokens not yet run, H hidden size, V policy vocabulary, D draft vocabulary, P prompt tokens,
R rank of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft, DraftProbs, Noise
from leadout.models.kv import KVSlots
from leadout.models.sampling import Law, ParamsBatch, tempered_weights
from leadout.models.states import DecoderStates
from leadout.records import Request, SamplingParams

RANK = 8
LEFT_OUT = 8
"""Every eighth id is not in the draft vocabulary."""


class LogitsDecoder(Protocol):
    """The part of the policy's decoder that is used."""

    def forward(
        self,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...] = (),
        counts_B: npt.NDArray[np.int64] | None = None,
    ) -> DecoderStates:
        """States of new tokens after each slot's cached ones."""
        ...

    def logits(self, hidden_XH: torch.Tensor) -> torch.Tensor:
        """[X, V]."""
        ...


class NoisyPolicyDrafter:
    """Implements `leadout.interfaces.Drafter`; samples, unfiltered, at each row's own temperature."""

    def __init__(
        self,
        decoder: LogitsDecoder,
        kv: KVSlots,
        *,
        vocab_size: int,
        hidden_size: int,
        noise: float = 0.8,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`decoder` may be the engine's own (its weights are shared, and so refitted); `kv` must not be.

        `noise`: standard deviation of the logits' noise; 0.8 is accepted 60 to 80 % of the time.
        """
        self.kv = kv
        self._decoder = decoder
        self._device = torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        self._down_HR = torch.randn(hidden_size, RANK, generator=generator).to(self._device)
        self._up_RV = (noise * torch.randn(RANK, vocab_size, generator=generator)).to(self._device)
        ids = torch.arange(vocab_size, device=self._device)
        self._token_ids_D = ids[ids % LEFT_OUT != LEFT_OUT - 3] if vocab_size > LEFT_OUT else ids
        self._own: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}
        self._waiting: dict[int, list[int]] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """Needs none."""
        return ()

    @property
    def runs_context(self) -> bool:
        """The policy once more."""
        return True

    @property
    def point_mass(self) -> bool:
        """Drafts are sampled."""
        return False

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Run the prompt once and share it."""
        context = [requests[0].prompt.token_ids]
        if requests[0].given is not None:
            context.append(requests[0].given.token_ids)
        tokens_P = torch.from_numpy(np.concatenate(context).astype(np.int64)).to(self._device)
        own = self.kv.allocate(len(slots))
        self._decoder.forward(tokens_P[None], self.kv, own[:1])
        self.kv.advance(own[:1], np.array([tokens_P.numel()], np.int64))
        if len(own) > 1:
            self.kv.copy_prefix(own[0], own[1:], tokens_P.numel())
        for slot, mine, request in zip(slots, own, requests, strict=True):
            self._own[slot], self._params[slot], self._waiting[slot] = mine, request.params, []

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Queue committed tokens for the next draft."""
        tokens = tokens_BN.cpu().numpy()
        for index, slot in enumerate(slots):
            self._waiting[slot] += tokens[index, : counts_B[index]].tolist()

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Catch up on committed tokens, draft, and take the drafts out of the cache again."""
        own = [self._own[slot] for slot in slots]
        hidden_BH = self._catch_up(slots, own)
        committed_B = self.kv.lengths[own].copy()
        params = ParamsBatch.of([self._params[slot] for slot in slots], self._device)
        num_drafts = int(lengths_B.max())
        columns, values = [], []
        for depth in range(num_drafts):
            law = Law.from_weights(tempered_weights(self._noisy_logits(hidden_BH), params))
            columns.append(law.draw(noise.draft_uniforms(depth)))
            values.append(law.probs(self._token_ids_D.numel()))
            if depth + 1 < num_drafts:
                # Rows that drafted enough already go on with padding that the rollback removes.
                room_B = np.minimum(1, self.kv.max_len - self.kv.lengths[own])
                tokens_B1 = self._token_ids_D[columns[-1]][:, None]
                hidden_BH = self._decoder.forward(tokens_B1, self.kv, own, (), room_B).hidden_BNH[:, 0]
                self.kv.advance(own, room_B)
        self.kv.rollback(own, committed_B)
        columns_BK = torch.stack(columns, 1)
        probs = DraftProbs(values_BKV=torch.stack(values, 1), columns_BK=columns_BK, token_ids_V=self._token_ids_D)
        return Draft(tokens_BK=self._token_ids_D[columns_BK], counts_B=lengths_B.copy(), probs=probs)

    def _catch_up(self, slots: Sequence[int], own: Sequence[int]) -> torch.Tensor:
        """Run the tokens committed since the last draft; the newest one's state, [B, H]."""
        counts_B = np.array([len(self._waiting[slot]) for slot in slots], np.int64)
        assert counts_B.min() >= 1, "every row has gained a token since its last draft"
        tokens_BM = np.zeros((len(slots), int(counts_B.max())), np.int64)
        for index, slot in enumerate(slots):
            tokens_BM[index, : counts_B[index]] = self._waiting[slot]
            self._waiting[slot] = []
        states = self._decoder.forward(torch.from_numpy(tokens_BM).to(self._device), self.kv, own, (), counts_B)
        self.kv.advance(own, counts_B)
        return states.hidden_BNH[torch.arange(len(slots)), torch.from_numpy(counts_B - 1)]

    def _noisy_logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, [B, D]; a new tensor."""
        logits_BV = self._decoder.logits(hidden_BH)
        feature_BR = torch.nn.functional.normalize(hidden_BH.float() @ self._down_HR, dim=-1)
        return (logits_BV + (feature_BR @ self._up_RV).to(logits_BV.dtype))[:, self._token_ids_D]

    def release(self, slots: Sequence[int]) -> None:
        """Forget the rows."""
        known = [slot for slot in slots if slot in self._own]
        self.kv.release([self._own.pop(slot) for slot in known])
        for slot in known:
            del self._params[slot], self._waiting[slot]

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """It has no weights of its own."""
        assert not weights, "the policy's decoder is refitted by the engine"
