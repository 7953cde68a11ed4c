"""Prompts into the cache: one prefill per distinct prompt, in passes of bounded size that run in chunks.

Siblings submitted together share their prompt's prefill: it runs once in the first sibling's slot and is copied to the
others. Prompts are batched longest first, so that padding is small.

Axes: G prompts of a pass, P padded prompt length, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.records import Request
from leadout.rollout.parts import EngineParts


@dataclass(frozen=True, slots=True)
class Cohort:
    """Requests that continue the same tokens, with their slots."""

    requests: list[Request]
    slots: list[int]

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """Prompt and given tokens, i32[P]."""
        return context_of(self.requests[0])


def context_of(request: Request) -> npt.NDArray[np.int32]:
    """What must be in the cache before the first new token, i32[P]."""
    if request.given is None:
        return request.prompt.token_ids
    return np.concatenate([request.prompt.token_ids, request.given.token_ids])


def cohorts(requests: Sequence[Request], slots: Sequence[int]) -> list[Cohort]:
    """Group neighbours that share a prompt and were given nothing."""
    grouped: list[Cohort] = []
    for request, slot in zip(requests, slots, strict=True):
        last = grouped[-1].requests[0] if grouped else None
        shares = (
            last is not None
            and last.given is None
            and request.given is None
            and (last.prompt is request.prompt or np.array_equal(last.prompt.token_ids, request.prompt.token_ids))
        )
        if shares:
            grouped[-1].requests.append(request)
            grouped[-1].slots.append(slot)
        else:
            grouped.append(Cohort([request], [slot]))
    return grouped


def passes(waiting: Sequence[Cohort], max_tokens: int) -> list[list[Cohort]]:
    """Split into batches whose padded size stays within `max_tokens` (a longer prompt goes alone)."""
    batches: list[list[Cohort]] = []
    for cohort in sorted(waiting, key=lambda c: -len(c.context)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].context) <= max_tokens:
            batches[-1].append(cohort)
        else:
            batches.append([cohort])
    return batches


class Filling:
    """One pass of prompts on its way into the cache, a chunk of tokens at a time.

    Its rows have slots, but take no part in rounds before the whole pass is done.
    """

    def __init__(self, parts: EngineParts, batch: Sequence[Cohort]) -> None:
        self.batch = list(batch)
        self._parts = parts
        self._counts_G = np.array([len(cohort.context) for cohort in batch], np.int64)
        tokens_GP = np.zeros((len(batch), int(self._counts_G.max())), np.int64)
        for index, cohort in enumerate(batch):
            tokens_GP[index, : self._counts_G[index]] = cohort.context
        self._tokens_GP = torch.from_numpy(tokens_GP).to(parts.device)
        self._owners = [cohort.slots[0] for cohort in batch]
        self._done = 0
        self._last_GH: torch.Tensor | None = None
        self._tapped: list[torch.Tensor] = []

    @property
    def slots(self) -> list[int]:
        """Slots of all its rows."""
        return [slot for cohort in self.batch for slot in cohort.slots]

    def run(self, max_tokens: int) -> torch.Tensor | None:
        """Run a chunk of at most `max_tokens` padded tokens (one column at least).

        Returns the logits [G, V] that the first new token of each cohort is drawn from once all is in the cache,
        None before.
        """
        parts, start = self._parts, self._done
        chunk = max(1, max_tokens // len(self.batch))
        part_G = np.clip(self._counts_G - start, 0, chunk)
        taps = parts.drafter.taps if parts.drafter is not None else ()
        tokens_GN = self._tokens_GP[:, start : start + chunk]
        states = parts.decoder.forward(tokens_GN, parts.kv, self._owners, taps, part_G, newest=True)
        parts.kv.advance(self._owners, part_G)
        if states.taps_BNF is not None:
            self._tapped.append(states.taps_BNF)
        here_GH = states.hidden_BNH[:, 0]
        ends_here_G = torch.from_numpy((self._counts_G > start) & (self._counts_G <= start + chunk)).to(parts.device)
        self._last_GH = here_GH if self._last_GH is None else torch.where(ends_here_G[:, None], here_GH, self._last_GH)
        self._done += chunk
        if self._done < self._tokens_GP.shape[1]:
            return None
        self._share()
        return parts.decoder.logits(self._last_GH)

    def _share(self) -> None:
        """Give siblings their copy, and the drafter what it needs of the prompts."""
        parts = self._parts
        taps_GPF = torch.cat(self._tapped, 1) if self._tapped else None
        for index, cohort in enumerate(self.batch):
            length = int(self._counts_G[index])
            if len(cohort.slots) > 1:
                parts.kv.copy_prefix(cohort.slots[0], cohort.slots[1:], length)
            if parts.drafter is not None:
                taps_PF = None if taps_GPF is None else taps_GPF[index, :length]
                parts.drafter.admit(cohort.slots, cohort.requests, taps_PF)
