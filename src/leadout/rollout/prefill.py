"""From waiting requests to live rows: slots, one prefill per distinct prompt, the first token of every row.

Siblings submitted together share their prompt's prefill: it runs once in the first sibling's slot and is copied to the
others. Prompts are batched into passes of bounded size, longest first, so that padding is small.

Axes: G prompts of a pass, P padded prompt length, B rows admitted, V vocabulary.
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


def prefill(parts: EngineParts, batch: Sequence[Cohort]) -> torch.Tensor:
    """Fill the caches of all rows of a pass; logits [G, V] that the first new token of each cohort is drawn from."""
    counts_G = np.array([len(cohort.context) for cohort in batch], np.int64)
    tokens_GP = np.zeros((len(batch), int(counts_G.max())), np.int64)
    for index, cohort in enumerate(batch):
        tokens_GP[index, : counts_G[index]] = cohort.context
    owners = [cohort.slots[0] for cohort in batch]
    taps = parts.drafter.taps if parts.drafter is not None else ()
    hidden_GH, taps_GPF = _forward(parts, torch.from_numpy(tokens_GP).to(parts.device), owners, counts_G, taps)
    parts.kv.advance(owners, counts_G)
    for index, cohort in enumerate(batch):
        length = int(counts_G[index])
        if len(cohort.slots) > 1:
            parts.kv.copy_prefix(cohort.slots[0], cohort.slots[1:], length)
        if parts.drafter is not None:
            taps_PF = None if taps_GPF is None else taps_GPF[index, :length]
            parts.drafter.admit(cohort.slots, cohort.requests, taps_PF)
    return parts.decoder.logits(hidden_GH)


def _forward(
    parts: EngineParts,
    tokens_GP: torch.Tensor,
    owners: list[int],
    counts_G: npt.NDArray[np.int64],
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Last real state of each prompt, [G, H], and all taps; long prompts run in chunks that bound memory."""
    width = tokens_GP.shape[1]
    chunk = max(1, parts.prefill_tokens // len(owners))
    last_GH: torch.Tensor | None = None
    tapped: list[torch.Tensor] = []
    done_G = np.zeros_like(counts_G)
    for start in range(0, width, chunk):
        part_G = np.clip(counts_G - start, 0, chunk)
        states = parts.decoder.forward(tokens_GP[:, start : start + chunk], parts.kv, owners, taps, part_G)
        if states.taps_BNF is not None:
            tapped.append(states.taps_BNF)
        index_G = torch.from_numpy(np.clip(counts_G - 1 - start, 0, states.hidden_BNH.shape[1] - 1)).to(parts.device)
        here_GH = states.hidden_BNH.gather(1, index_G[:, None, None].expand(-1, 1, states.hidden_BNH.shape[-1]))[:, 0]
        ends_here_G = torch.from_numpy((counts_G > start) & (counts_G <= start + chunk)).to(parts.device)
        last_GH = here_GH if last_GH is None else torch.where(ends_here_G[:, None], here_GH, last_GH)
        if start + chunk < width:
            parts.kv.advance(owners, part_G)
            done_G += part_G
    if done_G.any():
        parts.kv.rollback(owners, parts.kv.lengths[owners] - done_G)
    assert last_GH is not None
    return last_GH, torch.cat(tapped, 1) if tapped else None
