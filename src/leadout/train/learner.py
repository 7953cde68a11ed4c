"""Stages logprob and train in one process: the learner owns the policy that learns and the drafter's training.

A step: groups -> advantages -> packs -> forward, loss, backward -> one or more optimizer updates. Whichever forward
runs first on the rollouts also feeds the drafter and the audit. The version rises by one per step, and `publish` turns
the weights into a `WeightUpdate`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leadout.batch import PolicyForward, PolicyOutput, TrainBatch
from leadout.interfaces import Auditor
from leadout.records import DraftSpec, Group, LearnerLogprobs, Rollout, RolloutId, TrainReport, WeightUpdate
from leadout.train.advantage import advantages, zero_std_share
from leadout.train.checkpoint import LearnerState, read_learner, write_learner
from leadout.train.cotrain import DraftTrainer
from leadout.train.loss import LossSettings
from leadout.train.policy_optimizer import PolicyOptimizer
from leadout.train.policy_step import PolicyStep, plan_updates
from leadout.train.settings import OptimizerSettings, UpdateSettings
from leadout.train.step_metrics import StepMetrics

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """Stage refit's sending half: `leadout.refit.publish.weight_update`."""

    def __call__(
        self,
        *,
        policy: Mapping[str, Tensor],
        version: int,
        draft: Mapping[str, Tensor] | None,
        draft_version: int,
        draft_spec: DraftSpec | None,
        dtype: torch.dtype,
    ) -> WeightUpdate:
        """Snapshot the weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """All settings of a learner."""

    loss: LossSettings
    optimizer: OptimizerSettings
    update: UpdateSettings
    is_policy_law: bool = True
    """Whether rollouts are drawn from softmax(logits / temperature) itself; if not, a logprob pass is forced."""
    publish_dtype: torch.dtype = torch.bfloat16
    """The generator's type."""


class LocalLearner:
    """Implements `leadout.interfaces.Learner` for one process."""

    def __init__(
        self,
        forward: PolicyForward,
        publisher: Publisher,
        settings: LearnerSettings,
        *,
        drafter: DraftTrainer | None = None,
        reference: PolicyForward | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        """`reference`: the frozen policy of the KL term; needed exactly when beta > 0."""
        assert (settings.loss.beta > 0.0) == (reference is not None), "beta > 0 and a reference come together"
        self.forward = forward
        self.publisher = publisher
        self.settings = settings
        self.drafter = drafter
        self.reference = reference
        self.auditor = auditor
        self._watch: _OfVersion | None = None
        self._said_skipped = False
        self.version = 0
        self._optimizer = PolicyOptimizer(forward.model, settings.optimizer)
        self._watched = False

    def logprobs(self, groups: Sequence[Group]) -> LearnerLogprobs | None:
        """The learner's log-probabilities; None where the only update's own forward gives the same numbers."""
        if self._is_redundant(groups):
            return None
        self._begin(groups, can_roll_back=True)
        metrics = StepMetrics()
        values: list[np.ndarray] = []
        zeros = [np.zeros(len(group.rollouts)) for group in groups]
        for batch in self.forward.pack(groups, zeros):
            response_R = batch.response_R
            logprobs_R = torch.zeros(0)
            if response_R.numel():
                with torch.no_grad():
                    output = self.forward.run(batch, taps=self._taps, auditor=self._watching())
                self._observe(batch, output)
                engine_R, mask_R = batch.policy_logprobs_T[response_R], batch.loss_mask_T[response_R]
                metrics.add_forward(output.logprobs_R, engine_R, output.entropy_R, mask_R)
                logprobs_R = output.logprobs_R
            ends = np.cumsum([rollout.length for rollout in batch.rollouts])
            values.extend(np.split(logprobs_R.cpu().numpy(), ends[:-1]))
        row = metrics.row()
        row.pop("loss")
        return LearnerLogprobs(values=tuple(values), version=self.version, metrics=row)

    def step(self, groups: Sequence[Group], logprobs: LearnerLogprobs | None) -> TrainReport:
        """One train stage on these groups."""
        settings = self.settings
        assert logprobs is not None or self._is_redundant(groups), "several updates need the logprob pass first"
        if not self._watched:
            self._begin(groups, can_roll_back=False)
        metrics = StepMetrics()
        updates = plan_updates(
            self.forward,
            groups,
            advantages(groups, settings.update.scale_rewards),
            mini_batch_size=settings.update.mini_batch_size,
            settings=settings.loss,
        )
        runner = PolicyStep(
            self.forward,
            settings.loss,
            metrics,
            logprobs=logprobs,
            reference=self.reference,
            taps=self._taps,
            auditor=self._watching(),
            observe=self._observe,
        )
        row: dict[str, float] = {"learning_rate": self._optimizer.learning_rate}
        for iteration in range(settings.update.num_iterations):
            for number, update in enumerate(updates):
                signal = runner.accumulate(update, first_pass=iteration == 0)
                if self.auditor is not None and iteration == 0 and number == 0:
                    row |= self._audited(self.auditor)
                if signal:
                    metrics.grad_norms.append(self._optimizer.update())
        row |= metrics.row()
        row["optimizer_updates"] = float(len(metrics.grad_norms))
        row["frac_reward_zero_std"] = zero_std_share(groups)
        return self._finish(groups, row)

    def publish(self) -> WeightUpdate:
        """The present weights of policy and drafter."""
        drafter = self.drafter
        return self.publisher(
            policy=self.forward.model.state_dict(),
            version=self.version,
            draft=None if drafter is None else drafter.student.module.state_dict(),
            draft_version=0 if drafter is None else drafter.version,
            draft_spec=None if drafter is None else drafter.student.spec,
            dtype=self.settings.publish_dtype,
        )

    def save(self, folder: Path) -> None:
        """Write policy (`policy/`), drafter (`draft/`), optimizers and versions (`learner.pt`) into a folder.

        Between `logprobs` and `step` this drops the unfinished step: the state is that of the last finished one.
        """
        if self._watched and self.drafter is not None:
            self.drafter.roll_back()
        self._watched = False
        state = LearnerState(version=self.version, optimizer=self._optimizer.state_dict())
        write_learner(folder, self.forward.model, self.drafter, state)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, to the bit."""
        state = read_learner(folder, self.forward.model, self.drafter)
        self._optimizer.load_state_dict(state.optimizer)
        self.version = state.version
        self._watched = False

    @property
    def _taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    def _is_redundant(self, groups: Sequence[Group]) -> bool:
        update, total = self.settings.update, sum(len(group.rollouts) for group in groups)
        one_update = update.num_iterations == 1 and (update.mini_batch_size is None or update.mini_batch_size >= total)
        return update.recompute == "auto" and one_update and self.settings.is_policy_law

    def _begin(self, groups: Sequence[Group], can_roll_back: bool) -> None:
        self._watched = True
        if self.drafter is not None:
            self.drafter.begin_step(sum(len(group.rollouts) for group in groups), can_roll_back=can_roll_back)

    def _observe(self, batch: TrainBatch, output: PolicyOutput) -> None:
        if self.drafter is not None:
            self.drafter.observe(batch, output, self.forward)

    def _watching(self) -> Auditor | None:
        if self.auditor is None:
            return None
        if self._watch is None or self._watch.version != self.version:
            self._watch = _OfVersion(self.auditor, self.version)
        return self._watch

    def _audited(self, auditor: Auditor) -> Mapping[str, float]:
        """The auditor's figures, and how many rollouts of its sample were of other weights."""
        skipped = 0 if self._watch is None else len(self._watch.skipped)
        if skipped and not self._said_skipped:
            self._said_skipped = True
            logger.warning(
                "audit: %d rollouts of the sample were not made by the weights that the learner holds and are left out "
                "(said once; audit/skipped counts them in every step)",
                skipped,
            )
        return {**auditor.finish_step(), "audit/skipped": float(skipped)}

    def _finish(self, groups: Sequence[Group], row: dict[str, float]) -> TrainReport:
        draft_version = 0
        if self.drafter is not None:
            row |= self.drafter.finish_step(self.forward)
            self.drafter.remember(groups)
            draft_version = self.drafter.version
        self._watched = False
        self.version += 1
        return TrainReport(version=self.version, draft_version=draft_version, metrics=row)


class _OfVersion:
    """An auditor that is only shown rollouts made wholly by the weights the learner still holds."""

    def __init__(self, inner: Auditor, version: int) -> None:
        self.inner = inner
        self.version = version
        self.skipped: set[RolloutId] = set()

    def select(self, rollout: Rollout) -> bool:
        selected = self.inner.select(rollout)
        if selected and not (rollout.versions == self.version).all():
            self.skipped.add(rollout.request_id)
            return False
        return selected

    def observe(self, rollout: Rollout, logits_TV: Tensor) -> None:
        self.inner.observe(rollout, logits_TV)

    def finish_step(self) -> Mapping[str, float]:
        return self.inner.finish_step()
