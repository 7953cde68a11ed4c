"""Stage train, drafter: the drafter learns from the policy's own forward passes.

The learner hands over every pack with the policy's output the first time it runs over it. Taps, last hidden states and
embeddings arrive detached and live for one pack; the drafter has its own optimizer, clipping and random numbers, so
that the policy's weights are the same to the bit whether it learns or not.

Axes: R response tokens of a pack, V draft vocabulary, B rollouts, L query columns, K drafts of a round, H widths.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadout.batch import PolicyForward, PolicyOutput, TrainBatch
from leadout.records import Group, Rollout, Score
from leadout.train.draft_loss import make_loss, unrolled_loss
from leadout.train.drafted import Drafted, draft_along
from leadout.train.expected_acceptance import AcceptanceMeter
from leadout.train.lesson import Lesson
from leadout.train.settings import DraftSettings
from leadout.train.students import DraftStudent


@dataclass
class _StepSums:
    """What one train stage adds up."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: int = 0
    skipped: int = 0
    """Updates left out because their loss or gradient was not finite."""
    seconds: float = 0.0
    """Spent measuring and learning."""


class DraftTrainer:
    """Trains a drafter; one per learner."""

    def __init__(self, student: DraftStudent, settings: DraftSettings, *, temperature: float, seed: int) -> None:
        """`temperature`: the sampling temperature; drafts are learnt as softmax(draft logits / temperature)."""
        self.student = student
        self.settings = settings
        self._loss = make_loss(settings.loss_fn)
        self.temperature = temperature
        self.version = 0
        self.updates = 0
        self._steps = 0
        self._learnt_at = 0
        self._age = 0
        self._rng = np.random.default_rng(seed)
        self._replay: deque[Rollout] = deque(maxlen=settings.replay_rollouts or 1)
        self._parameters = [parameter for parameter in student.module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0, fused=True
        )
        self._meter: AcceptanceMeter | None = None
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._chosen: set[int] = set()
        self._learns = False
        self._sums = _StepSums()

    @property
    def taps(self) -> tuple[int, ...]:
        """Policy layers whose inputs it needs."""
        return self.student.taps

    def begin_step(self, num_rollouts: int, *, can_roll_back: bool = False) -> None:
        """Start a train stage: choose the rollouts to measure and learn from.

        `can_roll_back`: keep what `roll_back` needs, for a step that may still be dropped.
        """
        settings = self.settings
        self._before = (
            (copy.deepcopy(self.student.module.state_dict()), copy.deepcopy(self.state_dict()))
            if can_roll_back
            else None
        )
        self._learns = self._steps % settings.every == 0
        self._age = self._steps - self._learnt_at
        self._steps += 1
        count = int(np.ceil(settings.token_fraction * num_rollouts))
        self._chosen = set(self._rng.permutation(num_rollouts)[:count].tolist())
        self._meter = None
        self._sums = _StepSums()

    def roll_back(self) -> None:
        """Undo everything since `begin_step`."""
        assert self._before is not None, "begin_step was not told that the step may be dropped"
        weights, state = self._before
        self.student.module.load_state_dict(weights)
        self.load_state_dict(state)

    def observe(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward) -> None:
        """Measure the serving drafter on the chosen rollouts of a pack, then learn from them.

        Only on those: measuring them all would cost more than learning from a quarter does.
        """
        began = time.perf_counter()
        self._observe(batch, output, forward)
        self._sums.seconds += time.perf_counter() - began

    def _observe(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward) -> None:
        if self._meter is None:
            self._meter = self.meter(self.student, forward, self.settings.measure_tokens)
        meter, first = self._meter, batch.first_rollout
        rows = [row for row in range(len(batch.rollouts)) if first + row in self._chosen]
        lesson = self._lesson(batch, output, forward)
        if not self._learns:
            meter.add(lesson, rows)
            return
        shared: list[int] = []
        drafted = None
        if meter.student is self.student:
            # The first update starts from the drafter that serves, so its forward pass is measured too.
            shared = rows[: self.settings.micro_rollouts]
            drafted = self.draft(lesson, shared)
            meter.add(lesson, shared, drafted)
        meter.add(lesson, rows[len(shared) :])
        if meter.student is self.student and any(number >= first + len(batch.rollouts) for number in self._chosen):
            # Packs that are still to come are measured with the drafter that served them as well.
            meter.student = self.student.frozen_copy()
        self._learn(lesson, rows, drafted)

    def finish_step(self, forward: PolicyForward) -> dict[str, float]:
        """Train on replayed rollouts, if asked for, and report `draft/*` metrics.

        `draft/age`: policy versions since the drafter that served this step last learnt. `seconds/drafter`: what
        measuring and teaching it took of the learner's stages.
        """
        sums, began = self._sums, time.perf_counter()
        if self.settings.replay_rollouts and self._replay and self._learns:
            self._learn_again(forward, len(self._chosen))
        sums.seconds += time.perf_counter() - began
        if sums.losses:
            self.version += 1
            self._learnt_at = self._steps
        metrics = {
            "draft/version": float(self.version),
            "draft/updates": float(len(sums.losses)),
            "draft/age": float(self._age),
            "seconds/drafter": sums.seconds,
        }
        if sums.skipped:
            metrics["draft/skipped_updates"] = float(sums.skipped)
        if sums.losses:
            metrics["draft/loss"] = float(np.mean(sums.losses))
            metrics["draft/grad_norm"] = float(np.mean(sums.grad_norms))
            metrics["draft/learning_rate"] = self._learning_rate()
            metrics["draft/tokens"] = float(sums.tokens)
        if self._meter is not None:
            metrics |= self._meter.metrics()
        return metrics

    def meter(self, student: DraftStudent, forward: PolicyForward, budget: int) -> AcceptanceMeter:
        """Measures a drafter on packs, as it would draft here; `budget` in response tokens."""
        settings = self.settings
        return AcceptanceMeter(
            student,
            vocab_size=forward.embedding_VH.shape[0],
            temperature=self.temperature,
            depth=settings.measure_depth,
            budget=budget,
            autocast=settings.autocast,
        )

    def evaluate(self, groups: Sequence[Group], forward: PolicyForward) -> dict[str, float]:
        """Expected acceptance of the present drafter on rollouts that it does not learn from."""
        meter = self.meter(self.student, forward, sum(rollout.length for group in groups for rollout in group.rollouts))
        for batch in forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups]):
            if batch.response_R.numel():
                with torch.no_grad():
                    lesson = self._lesson(batch, forward.run(batch, taps=self.taps), forward)
                meter.add(lesson, range(len(batch.rollouts)))
        return meter.metrics()

    def remember(self, groups: Sequence[Group]) -> None:
        """Keep a step's rollouts for replay."""
        if self.settings.replay_rollouts:
            self._replay.extend(rollout for group in groups for rollout in group.rollouts)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, counters and random state; the drafter and the kept rollouts are saved by themselves."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "version": self.version,
            "updates": self.updates,
            "steps": self._steps,
            "learnt_at": self._learnt_at,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.updates, self._steps = state["version"], state["updates"], state["steps"]
        self._learnt_at = state["learnt_at"]
        self._rng.bit_generator.state = state["rng"]

    @property
    def replay(self) -> tuple[Rollout, ...]:
        """The rollouts kept for replay, oldest first."""
        return tuple(self._replay)

    def set_replay(self, rollouts: Sequence[Rollout]) -> None:
        """Restore them."""
        self._replay = deque(rollouts, maxlen=self.settings.replay_rollouts or 1)

    def draft(self, lesson: Lesson, rows: Sequence[int]) -> Drafted | None:
        """The present drafter along rollouts of a pack, with gradients to it only."""
        with torch.enable_grad():
            return draft_along(self.student, lesson, rows, self.settings.steps, autocast=self.settings.autocast)

    def loss(self, drafted: Drafted) -> Tensor:
        """The unrolled loss."""
        losses = []
        for step, logits_NV in enumerate(drafted.logits, 1):
            teacher_NV = drafted.teacher_NV[drafted.queries.from_step(step)]
            losses.append(self._loss(logits_NV, teacher_NV, self.temperature))
        return unrolled_loss(losses, self.settings.decay)

    def _lesson(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward) -> Lesson:
        return Lesson(batch, output, forward, self.student.token_ids_V, self.temperature)

    def _learn(self, lesson: Lesson, rows: Sequence[int], drafted: Drafted | None = None) -> None:
        """One update per `micro_rollouts`; `drafted`: the present drafter along the first of them, if at hand."""
        settings = self.settings
        for start in range(0, len(rows), settings.micro_rollouts):
            for turn in range(settings.passes):
                if start or turn or drafted is None:
                    drafted = self.draft(lesson, rows[start : start + settings.micro_rollouts])
                if drafted is None:
                    break
                if turn == 0:
                    self._sums.tokens += drafted.queries.target_N.numel()
                with torch.enable_grad():
                    loss = self.loss(drafted)
                    loss.backward()
                self._update(float(loss.detach()))

    def _update(self, loss: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not (math.isfinite(loss) and bool(torch.isfinite(norm))):
            # A drafter of nan weights would stop the generator; one that stays as it was only drafts a little worse.
            self._optimizer.zero_grad(set_to_none=True)
            self._sums.skipped += 1
            return
        if norm > self.settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.settings.max_grad_norm, norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self._sums.losses.append(loss)
        self._sums.grad_norms.append(float(norm))

    def _learning_rate(self) -> float:
        settings = self.settings
        warm = min(1.0, (self.updates + 1) / max(settings.warmup_steps, 1))
        if not settings.decay_updates:
            return settings.learning_rate * warm
        left = 1.0 - (self.updates - settings.decay_from) / max(settings.decay_updates - settings.decay_from, 1)
        return settings.learning_rate * warm * min(1.0, max(left, settings.decay_floor))

    def _learn_again(self, forward: PolicyForward, count: int) -> None:
        """As many kept rollouts as fresh ones, run through the present policy again."""
        picked = self._rng.permutation(len(self._replay))[:count]
        score = Score(reward=0.0, parts={}, text="", masked=True)
        kept = [self._replay[int(index)] for index in picked]
        groups = [Group(prompt=rollout.prompt, rollouts=(rollout,), scores=(score,)) for rollout in kept]
        for batch in forward.pack(groups, [np.zeros(1)] * len(groups)):
            if batch.response_R.numel():
                with torch.no_grad():
                    output = forward.run(batch, taps=self.taps)
                self._learn(self._lesson(batch, output, forward), range(len(batch.rollouts)))
