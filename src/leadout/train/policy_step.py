"""Stage train: one optimizer update's worth of rollouts, cut into packs, forward, loss and backward.

Axes: R response tokens of a pack, N rollouts of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadout.batch import PolicyForward, PolicyOutput, TrainBatch
from leadout.interfaces import Auditor
from leadout.records import FloatArray, Group, LearnerLogprobs
from leadout.train.loss import LossSettings, importance_weights, policy_loss, rollout_weights
from leadout.train.step_metrics import StepMetrics

Observe = Callable[[TrainBatch, PolicyOutput], None]
"""Called once with every pack and the policy's first output on it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """The rollouts of one optimizer update."""

    packs: tuple[TrainBatch, ...]
    weights: tuple[Tensor, ...]
    """Per pack, weight of each response token's loss; 0 where it is not trained on."""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that count in the loss."""
        return sum(int((weight_R > 0).sum()) for weight_R in self.weights)


def plan_updates(
    forward: PolicyForward,
    groups: Sequence[Group],
    advantages: Sequence[FloatArray],
    *,
    mini_batch_size: int | None,
    settings: LossSettings,
) -> list[Update]:
    """Cut a step's rollouts, in order, into updates of `mini_batch_size` completions (None: one), then into packs."""
    total = sum(len(group.rollouts) for group in groups)
    size = mini_batch_size or max(total, 1)
    updates = []
    for start in range(0, total, size):
        part, part_advantages = _slice(groups, advantages, start, start + size)
        packs = forward.pack(part, part_advantages, start)
        updates.append(Update(packs=tuple(packs), weights=_token_weights(packs, settings)))
    return updates


def _slice(
    groups: Sequence[Group], advantages: Sequence[FloatArray], start: int, stop: int
) -> tuple[list[Group], list[FloatArray]]:
    """The groups cut to rollouts start..stop of the step."""
    part, part_advantages, first = [], [], 0
    for group, advantages_G in zip(groups, advantages):
        own = slice(max(start - first, 0), max(stop - first, 0))
        if group.rollouts[own]:
            part.append(Group(prompt=group.prompt, rollouts=group.rollouts[own], scores=group.scores[own]))
            part_advantages.append(advantages_G[own])
        first += len(group.rollouts)
    return part, part_advantages


def _token_weights(packs: Sequence[TrainBatch], settings: LossSettings) -> tuple[Tensor, ...]:
    active, micro = [], []
    for number, batch in enumerate(packs):
        rollout_R = batch.segment_T[batch.response_R] - batch.first_rollout
        mask_R = batch.loss_mask_T[batch.response_R]
        active.append(torch.bincount(rollout_R[mask_R], minlength=len(batch.rollouts)).cpu().numpy())
        micro.append(np.full(len(batch.rollouts), number))
    weight_N = rollout_weights(
        np.concatenate(active), np.concatenate(micro), settings.loss_type, settings.max_completion_length
    )
    weights, first = [], 0
    for batch in packs:
        response_R = batch.response_R
        own_B = torch.from_numpy(weight_N[first : first + len(batch.rollouts)])
        own_B = own_B.to(device=response_R.device, dtype=batch.advantages_T.dtype)
        weight_R = own_B[batch.segment_T[response_R] - batch.first_rollout]
        weights.append(torch.where(batch.loss_mask_T[response_R], weight_R, 0.0))
        first += len(batch.rollouts)
    return tuple(weights)


class PolicyStep:
    """Runs forward, loss and backward over the packs of a step; the optimizer is the caller's."""

    def __init__(
        self,
        forward: PolicyForward,
        settings: LossSettings,
        metrics: StepMetrics,
        *,
        logprobs: LearnerLogprobs | None,
        reference: PolicyForward | None,
        taps: tuple[int, ...] = (),
        auditor: Auditor | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`taps`, `auditor` and `observe` act where `logprobs` is None: then this is the first pass."""
        self.forward = forward
        self.settings = settings
        self.metrics = metrics
        self.logprobs = logprobs
        self.reference = reference
        self.taps = taps
        self.auditor = auditor
        self.observe = observe
        self._reference_R: dict[int, Tensor] = {}

    def accumulate(self, update: Update, first_pass: bool) -> bool:
        """Add the gradient of an update's loss; returns whether there was any to add."""
        loss, any_signal = 0.0, False
        for batch, weight_R in zip(update.packs, update.weights):
            if not batch.response_R.numel():
                continue
            signal = self._has_signal(batch, weight_R)
            with torch.set_grad_enabled(signal):
                loss += self._pack(batch, weight_R, first_pass, signal)
            any_signal |= signal
        self.metrics.losses.append(loss)
        return any_signal

    def _has_signal(self, batch: TrainBatch, weight_R: Tensor) -> bool:
        """Whether the loss of a pack can have a gradient: equal rewards without KL have none."""
        trained_R = weight_R > 0
        moved_R = trained_R if self.settings.beta > 0.0 else trained_R & (batch.advantages_T[batch.response_R] != 0)
        return bool(moved_R.any())

    def _pack(self, batch: TrainBatch, weight_R: Tensor, first_pass: bool, signal: bool) -> float:
        response_R, mask_R = batch.response_R, weight_R > 0
        watched = first_pass and self.logprobs is None
        output = self.forward.run(batch, taps=self.taps if watched else (), auditor=self.auditor if watched else None)
        logprobs_R, engine_R = output.logprobs_R, batch.policy_logprobs_T[response_R]
        old_R = logprobs_R.detach() if self.logprobs is None else _of_pack(batch, self.logprobs, logprobs_R)
        importance_R = None
        if self.settings.importance_clip_max is not None:
            importance_R = importance_weights(old_R, engine_R, self.settings.importance_clip_max)
        out = policy_loss(
            logprobs_R,
            old_R,
            batch.advantages_T[response_R],
            weight_R,
            batch.segment_T[response_R] - batch.first_rollout,
            self.settings,
            reference_logprobs_R=self._reference(batch),
            importance_R=importance_R,
        )
        if signal:
            out.loss.backward()
        self.metrics.add_loss(out, mask_R, importance_R)
        if first_pass:
            self.metrics.add_forward(old_R, engine_R, output.entropy_R, mask_R)
        if watched and self.observe is not None:
            self.observe(batch, output)
        return float(out.loss.detach())

    @torch.no_grad()
    def _reference(self, batch: TrainBatch) -> Tensor | None:
        """The reference's log-probabilities, computed once per pack."""
        if self.reference is None or self.settings.beta == 0.0:
            return None
        if batch.first_rollout not in self._reference_R:
            self._reference_R[batch.first_rollout] = self.reference.run(batch).logprobs_R
        return self._reference_R[batch.first_rollout]


def _of_pack(batch: TrainBatch, logprobs: LearnerLogprobs, like_R: Tensor) -> Tensor:
    """The learner's log-probabilities of a pack's response tokens."""
    last = batch.first_rollout + len(batch.rollouts)
    values = np.concatenate(logprobs.values[batch.first_rollout : last])
    return torch.from_numpy(values).to(device=like_R.device, dtype=like_R.dtype)
