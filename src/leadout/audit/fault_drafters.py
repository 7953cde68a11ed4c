"""Drafters and generators with a known mistake, and harmless variants: the real thing behind a thin layer.

Axes: B rows, K drafts, V draft vocabulary, T tokens and D traced drafts of a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft, Drafter, DraftProbs, Generator, Noise, Running
from leadout.models.sampling import Law
from leadout.records import Capabilities, Finish, RefitReport, Request, Rollout, RolloutId, Rounds, WeightUpdate

Ints = npt.NDArray[np.int64]


class DrafterAround:
    """A drafter that hands everything on; faults change `propose`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def taps(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.inner.taps

    @property
    def runs_context(self) -> bool:
        """As the inner drafter."""
        return self.inner.runs_context

    @property
    def point_mass(self) -> bool:
        """The inner drafter's."""
        return self.inner.point_mass

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Handed on."""
        self.inner.admit(slots, requests, prompt_taps_PF)

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """Handed on."""
        return self.inner.propose(slots, lengths_B, noise)

    def observe(
        self, slots: Sequence[int], tokens_BN: torch.Tensor, counts_B: Ints, taps_BNF: torch.Tensor | None
    ) -> None:
        """Handed on."""
        self.inner.observe(slots, tokens_BN, counts_B, taps_BNF)

    def release(self, slots: Sequence[int]) -> None:
        """Handed on."""
        self.inner.release(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Handed on."""
        self.inner.load(weights, version)


def _probs(draft: Draft) -> DraftProbs:
    assert draft.probs is not None, "this fault needs a drafter that samples"
    return draft.probs


class GreedyWithSoftQ(DrafterAround):
    """Proposes q's most probable token and calls it a sample of q (one draft a round)."""

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """The argmax with its q."""
        draft = super().propose(slots, np.minimum(lengths_B, 1), noise)
        probs = _probs(draft)
        columns_BK = probs.values_BKV.argmax(-1)
        tokens_BK = columns_BK if probs.token_ids_V is None else probs.token_ids_V[columns_BK]
        return replace(draft, tokens_BK=tokens_BK, probs=replace(probs, columns_BK=columns_BK))


class UnmappedQ(DrafterAround):
    """The vocabulary map reaches the ids but not q."""

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """q's columns are taken for policy ids."""
        draft = super().propose(slots, lengths_B, noise)
        return replace(draft, probs=replace(_probs(draft), token_ids_V=None))


class ConfidentOnly(DrafterAround):
    """Cuts the draft at the first sampled token whose own probability is low."""

    threshold = 0.3

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """Counts depend on the very tokens that were sampled."""
        draft = super().propose(slots, lengths_B, noise)
        probs = _probs(draft)
        sure_BK = probs.values_BKV.gather(-1, probs.columns_BK[..., None])[..., 0] >= self.threshold
        leading_B = sure_BK.long().cumprod(-1).sum(-1).cpu().numpy()
        return replace(draft, counts_B=np.minimum(draft.counts_B, leading_B))


class AsPointMass(DrafterAround):
    """Harmless: a sampled draft handed over without its q."""

    @property
    def point_mass(self) -> bool:
        """As it looks to the engine."""
        return True

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """No q."""
        return replace(super().propose(slots, lengths_B, noise), probs=None)


class WrongMap(DrafterAround):
    """Harmless: every id of the draft vocabulary is wrong, in the tokens and in q alike."""

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """The map, rotated by one."""
        draft = super().propose(slots, lengths_B, noise)
        probs = _probs(draft)
        ids_V = probs.token_ids_V
        if ids_V is None:
            ids_V = torch.arange(probs.values_BKV.shape[-1], device=probs.values_BKV.device)
        wrong_V = ids_V.roll(1)
        return replace(draft, tokens_BK=wrong_V[probs.columns_BK], probs=replace(probs, token_ids_V=wrong_V))


class RandomQ(DrafterAround):
    """Harmless: drafts from a fixed random law that knows nothing of the policy."""

    def propose(self, slots: Sequence[int], lengths_B: Ints, noise: Noise) -> Draft:
        """The inner draft's vocabulary, other probabilities."""
        draft = super().propose(slots, lengths_B, noise)
        probs = _probs(draft)
        generator = torch.Generator().manual_seed(0)
        q_V = torch.softmax(2.0 * torch.randn(probs.values_BKV.shape[-1], generator=generator), -1)
        values_BKV = q_V.to(probs.values_BKV).expand_as(probs.values_BKV).contiguous()
        law = Law.from_weights(values_BKV[:, 0])
        columns_BK = torch.stack([law.draw(noise.draft_uniforms(k)) for k in range(values_BKV.shape[1])], 1)
        tokens_BK = columns_BK if probs.token_ids_V is None else probs.token_ids_V[columns_BK]
        changed = replace(probs, values_BKV=values_BKV, columns_BK=columns_BK)
        return replace(draft, tokens_BK=tokens_BK, probs=changed)


class GeneratorAround:
    """A generator that hands everything on."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """The inner generator's."""
        return self._inner.capabilities

    def submit(self, requests: Sequence[Request]) -> None:
        """Handed on."""
        self._inner.submit(requests)

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """Handed on."""
        return self._inner.collect(timeout)

    def cancel(self, ids: Sequence[RolloutId]) -> list[Rollout]:
        """Handed on."""
        return self._inner.cancel(ids)

    def refit(self, update: WeightUpdate, running: Running = "finish") -> RefitReport:
        """Handed on."""
        return self._inner.refit(update, running)

    def set_awake(self, awake: bool) -> None:
        """Handed on."""
        self._inner.set_awake(awake)


class OneNoisePerPrompt(GeneratorAround):
    """Numbers keyed by the prompt alone: siblings come out equal, so one of them is generated and copied."""

    def __init__(self, inner: Generator) -> None:
        super().__init__(inner)
        self._siblings: dict[int, list[RolloutId]] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """The first sibling of every draw."""
        firsts = []
        for request in requests:
            if request.rollout_id.draw not in self._siblings:
                firsts.append(request)
            self._siblings.setdefault(request.rollout_id.draw, []).append(request.rollout_id)
        self._inner.submit(firsts)

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """A copy for every sibling."""
        return [
            replace(rollout, request_id=rollout_id)
            for rollout in self._inner.collect(timeout)
            for rollout_id in self._siblings[rollout.request_id.draw]
        ]


class LateStop(GeneratorAround):
    """A row ends after the round that held its end-of-sequence token, with all tokens of that round."""

    def __init__(self, inner: Generator) -> None:
        super().__init__(inner)
        self._stop_ids: dict[RolloutId, tuple[int, ...]] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """The engine does not know the end."""
        self._stop_ids |= {request.rollout_id: request.params.stop_token_ids for request in requests}
        self._inner.submit([replace(r, params=replace(r.params, stop_token_ids=())) for r in requests])

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """Cut at the end of the round."""
        return [self._cut(rollout) for rollout in self._inner.collect(timeout)]

    def _cut(self, rollout: Rollout) -> Rollout:
        ends_T = np.isin(rollout.token_ids, self._stop_ids[rollout.request_id])
        if not ends_T.any():
            return rollout
        last = int(ends_T.argmax())
        after_R = 1 + np.cumsum(rollout.rounds.accepted.astype(np.int64) + 1)
        rounds = 0 if last == 0 else int(np.searchsorted(after_R, last + 1)) + 1
        length = 1 if rounds == 0 else min(int(after_R[rounds - 1]), rollout.length)
        (span,) = rollout.spans
        made, looked_up = rollout.rounds, rollout.rounds.looked_up
        trace = None if rollout.trace is None else rollout.trace.take(rollout.trace.round_D < rounds)
        return replace(
            rollout,
            token_ids=rollout.token_ids[:length],
            logprobs=rollout.logprobs[:length],
            policy_logprobs=rollout.policy_logprobs[:length],
            spans=(replace(span, length=length),),
            rounds=Rounds(
                drafted=made.drafted[:rounds],
                accepted=made.accepted[:rounds],
                looked_up=None if looked_up is None else looked_up[:rounds],
            ),
            finish=Finish.EOS,
            stop=int(rollout.token_ids[last]),
            trace=trace,
        )
