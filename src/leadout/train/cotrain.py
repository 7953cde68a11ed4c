"""Stage train, drafter: the draft head learns from the policy's own forward passes.

The learner hands over every pack with the policy's output the first time it runs over it. Taps, last hidden states and
embeddings arrive detached and live for one pack; the head has its own optimizer, clipping and random numbers, so that
the policy's weights are the same to the bit whether the head learns or not.

Axes: R response tokens of a pack, V draft vocabulary, B rollouts, L query columns, K drafts of a round, H widths.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadout.batch import PolicyForward, PolicyOutput, TrainBatch
from leadout.models.eagle3 import Eagle3Head
from leadout.records import Group, Rollout, Score
from leadout.train.chains import Chains, build_chains, unroll
from leadout.train.draft_loss import (
    acceptance_of_token,
    expected_rounds,
    make_loss,
    teacher_probabilities,
    unrolled_loss,
)
from leadout.train.settings import DraftSettings


@dataclass
class _StepSums:
    """What one train stage adds up."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: int = 0
    measured_tokens: int = 0
    rounds: float = 0.0
    accepted: Tensor | None = None
    positions: Tensor | None = None


class DraftTrainer:
    """Trains an `Eagle3Head`; one per learner."""

    def __init__(self, head: Eagle3Head, settings: DraftSettings, *, temperature: float, seed: int) -> None:
        """`temperature`: the sampling temperature; drafts are learnt as softmax(draft logits / temperature)."""
        if head.fc.weight.dtype not in (torch.float32, torch.float64):
            head = head.float()
        self.head = head
        self.settings = settings
        self._loss = make_loss(settings.loss_fn)
        self.temperature = temperature
        self.version = 0
        self.updates = 0
        self._steps = 0
        self._rng = np.random.default_rng(seed)
        self._replay: deque[Rollout] = deque(maxlen=settings.replay_rollouts or 1)
        self._parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
        )
        self._token_ids_V = head.draft_token_ids()
        self._draft_id_P: Tensor | None = None
        if self._token_ids_V is not None:
            self._draft_id_P = torch.full((head.spec.vocab_size,), -1, device=self._token_ids_V.device)
            self._draft_id_P[self._token_ids_V] = torch.arange(
                head.spec.draft_vocab_size, device=self._draft_id_P.device
            )
        self._served = head
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._chosen: set[int] = set()
        self._sums = _StepSums()

    @property
    def taps(self) -> tuple[int, ...]:
        """Policy layers whose inputs it needs."""
        return self.head.spec.layer_ids

    def begin_step(self, num_rollouts: int, *, can_roll_back: bool = False) -> None:
        """Start a train stage: choose the rollouts to learn from and remember the head that is serving now.

        `can_roll_back`: keep what `roll_back` needs, for a step that may still be dropped.
        """
        settings = self.settings
        self._before = (
            (copy.deepcopy(self.head.state_dict()), copy.deepcopy(self.state_dict())) if can_roll_back else None
        )
        learns = self._steps % settings.every == 0
        self._steps += 1
        count = int(np.ceil(settings.token_fraction * num_rollouts)) if learns else 0
        self._chosen = set(self._rng.permutation(num_rollouts)[:count].tolist())
        self._served = copy.deepcopy(self.head).requires_grad_(False)
        self._sums = _StepSums()

    def roll_back(self) -> None:
        """Undo everything since `begin_step`."""
        assert self._before is not None, "begin_step was not told that the step may be dropped"
        head, state = self._before
        self.head.load_state_dict(head)
        self.load_state_dict(state)

    def observe(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward) -> None:
        """Measure the serving head on a pack, then learn from the chosen rollouts in it."""
        self._measure(batch, output, forward)
        first = batch.first_rollout
        rows = [row for row in range(len(batch.rollouts)) if first + row in self._chosen]
        self._learn(batch, output, forward, rows)

    def finish_step(self, forward: PolicyForward) -> dict[str, float]:
        """Train on replayed rollouts, if asked for, and report `draft/*` metrics."""
        fresh = len(self._chosen)
        if self.settings.replay_rollouts and self._replay and fresh:
            self._learn_again(forward, fresh)
        sums = self._sums
        if sums.losses:
            self.version += 1
        metrics = {"draft/version": float(self.version), "draft/updates": float(len(sums.losses))}
        if sums.losses:
            metrics["draft/loss"] = float(np.mean(sums.losses))
            metrics["draft/grad_norm"] = float(np.mean(sums.grad_norms))
            metrics["draft/learning_rate"] = self._learning_rate()
            metrics["draft/tokens"] = float(sums.tokens)
        if sums.rounds and sums.accepted is not None and sums.positions is not None:
            metrics["draft/expected_acceptance_length"] = sums.measured_tokens / sums.rounds
            for depth, rate in enumerate((sums.accepted / sums.positions.clamp(min=1)).tolist(), 1):
                metrics[f"draft/expected_acceptance_rate_pos_{depth}"] = rate
        return metrics

    def remember(self, groups: Sequence[Group]) -> None:
        """Keep a step's rollouts for replay."""
        if self.settings.replay_rollouts:
            self._replay.extend(rollout for group in groups for rollout in group.rollouts)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, counters and random state; the head and the kept rollouts are saved by themselves."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "version": self.version,
            "updates": self.updates,
            "steps": self._steps,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.updates, self._steps = state["version"], state["updates"], state["steps"]
        self._rng.bit_generator.state = state["rng"]

    @property
    def replay(self) -> tuple[Rollout, ...]:
        """The rollouts kept for replay, oldest first."""
        return tuple(self._replay)

    def set_replay(self, rollouts: Sequence[Rollout]) -> None:
        """Restore them."""
        self._replay = deque(rollouts, maxlen=self.settings.replay_rollouts or 1)

    def loss(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, chains: Chains) -> Tensor:
        """The unrolled loss of some chains, with gradients to the head only."""
        assert output.taps_TF is not None, "the policy ran without the drafter's taps"
        teacher_RV = self._teacher(output, forward, chains)
        with self._autocast():
            hidden = unroll(
                self.head,
                chains,
                output.taps_TF.detach().to(self.head.fc.weight.dtype),
                batch.token_ids_T,
                forward.embedding_VH,
                self.settings.steps,
            )
            losses = []
            for step, hidden_BLH in enumerate(hidden, 1):
                counted_BL = chains.valid_BL(step) & chains.wanted_BL
                logits_NV = self.head.logits(hidden_BLH[counted_BL])
                losses.append(self._loss(logits_NV, teacher_RV[counted_BL], self.temperature))
        return unrolled_loss(losses, self.settings.decay)

    def _learn(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, rows: Sequence[int]) -> None:
        settings = self.settings
        for start in range(0, len(rows), settings.micro_rollouts):
            chains = build_chains(batch, rows[start : start + settings.micro_rollouts])
            if chains is None or not bool((chains.real_BL & chains.wanted_BL).any()):
                continue
            self._sums.tokens += int((chains.real_BL & chains.wanted_BL).sum())
            for _ in range(settings.passes):
                with torch.enable_grad():
                    loss = self.loss(batch, output, forward, chains)
                    loss.backward()
                self._update(float(loss.detach()))

    def _update(self, loss: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm)
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
                self._learn(batch, output, forward, range(len(batch.rollouts)))

    @torch.no_grad()
    def _measure(self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward) -> None:
        """Add the pack's rollouts to the expected acceptance, up to the budget of tokens."""
        rows: list[int] = []
        budget = self.settings.measure_tokens - self._sums.measured_tokens
        for row, rollout in enumerate(batch.rollouts):
            if budget <= 0:
                break
            if rollout.length >= 2 and rollout.loss_mask.all():
                rows.append(row)
                budget -= rollout.length - 1
        chains = build_chains(batch, rows)
        if chains is None:
            return
        accept_BLK, shared_K, positions_K = self._acceptances(batch, output, forward, chains)
        lengths_B = np.array([batch.rollouts[row].length for row in rows])
        sums = self._sums
        sums.measured_tokens += int((lengths_B - 1).sum())
        sums.rounds += float(expected_rounds(accept_BLK, lengths_B).sum())
        sums.accepted = shared_K if sums.accepted is None else sums.accepted + shared_K
        sums.positions = positions_K if sums.positions is None else sums.positions + positions_K

    def _acceptances(
        self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, chains: Chains
    ) -> tuple[np.ndarray, Tensor, Tensor]:
        """Acceptance by start and depth [B, L + 1, K], and sums of sum min(p, q) and counts by depth."""
        depth = self.settings.measure_depth
        assert output.taps_TF is not None, "the policy ran without the drafter's taps"
        taps_TF = output.taps_TF.to(self._served.fc.weight.dtype)
        with self._autocast():
            hidden = unroll(self._served, chains, taps_TF, batch.token_ids_T, forward.embedding_VH, depth)
        teacher_BLV = self._teacher(output, forward, chains)
        targets_BL = batch.token_ids_T[batch.response_R][chains.target_BL]
        drafts_BL = targets_BL if self._draft_id_P is None else self._draft_id_P[targets_BL]
        rows, columns = chains.query_BL.shape
        accept_BLK = np.zeros((rows, columns + depth + 1, depth))
        shared_K, positions_K = torch.zeros(depth), torch.zeros(depth)
        for step, hidden_BLH in enumerate(hidden, 1):
            valid_BL = chains.valid_BL(step)
            with self._autocast():
                logits_NV = self._served.logits(hidden_BLH[valid_BL])
            log_q_NV = (logits_NV.to(teacher_BLV.dtype) / self.temperature).log_softmax(-1)
            draft_N = drafts_BL[valid_BL]
            log_q_N = log_q_NV.gather(-1, draft_N.clamp(min=0)[:, None]).squeeze(-1)
            log_q_N = log_q_N.masked_fill(draft_N < 0, -torch.inf)
            log_p_N = output.logprobs_R.detach()[chains.target_BL[valid_BL]]
            accept_BL = torch.zeros(rows, columns, dtype=torch.float64)
            accept_BL[valid_BL.cpu()] = acceptance_of_token(log_p_N, log_q_N).double().cpu()
            # Column j of this step predicts token j + 1 for the round that starts at token j + 2 - step.
            accept_BLK[:, 1 : columns + 2 - step, step - 1] = accept_BL[:, step - 1 :].numpy()
            shared_K[step - 1] = float(torch.minimum(teacher_BLV[valid_BL], log_q_NV.exp()).sum())
            positions_K[step - 1] = draft_N.numel()
        return accept_BLK, shared_K, positions_K

    @torch.no_grad()
    def _teacher(self, output: PolicyOutput, forward: PolicyForward, chains: Chains) -> Tensor:
        """The policy's probabilities of the draft vocabulary at every query's target, [B, L, V]."""
        target_N = chains.target_BL.flatten()
        teacher_NV = teacher_probabilities(
            output.hidden_RH[target_N],
            forward.head_rows(self._token_ids_V),
            output.log_normalizer_R[target_N],
            self.temperature,
        )
        return teacher_NV.view(*chains.target_BL.shape, -1)

    def _autocast(self) -> torch.autocast:
        weight = self.head.fc.weight
        enabled = self.settings.autocast and weight.dtype is torch.float32
        return torch.autocast(weight.device.type, dtype=torch.bfloat16, enabled=enabled)
