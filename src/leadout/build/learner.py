"""The learner from its sections: policy, loss, optimizers, drafter training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from leadout.audit.training import TrainingAuditor
from leadout.build.drafter import small_model_folder
from leadout.build.generator import DTYPES
from leadout.config import RunConfig
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.draft_head import DraftHead
from leadout.models.loading import load_policy, read_spec
from leadout.models.mtp_io import has_mtp
from leadout.records import SamplingParams
from leadout.refit.publish import weight_update
from leadout.train.cotrain import DraftTrainer
from leadout.train.learner import LearnerSettings, LocalLearner
from leadout.train.loss import LossSettings
from leadout.train.settings import DraftSettings, OptimizerSettings, UpdateSettings
from leadout.train.students import DraftStudent, HeadStudent, SmallModelStudent

_COARSENESS = ("float64", "float32", "bfloat16")


def load_trainable(path: Path, dtype: str, device: torch.device) -> Any:
    """The policy that learns: fp32 weights (fp64 in float64), whatever the type of its matrix products."""
    return load_policy(path, torch.float64 if dtype == "float64" else torch.float32).to(device)


def make_auditor(config: RunConfig, params: SamplingParams) -> TrainingAuditor | None:
    """The run's auditor; None where it is off. The share of rollouts is fixed before the first is drawn."""
    if not config.audit.every:
        return None
    rollout = config.rollout
    rollouts = rollout.num_prompts * rollout.num_generations
    return TrainingAuditor(
        params,
        precision=max(rollout.dtype, config.train.dtype, key=_COARSENESS.index),
        # One rollout a step at least: fewer would leave most steps without any.
        share=min(1.0, max(config.audit.tokens / rollout.max_completion_length, 1.0) / rollouts),
        every=config.audit.every,
        seed=config.seed,
    )


def make_learner(
    config: RunConfig,
    model: Any,
    path: Path,
    params: SamplingParams,
    head: DraftHead | None,
    auditor: TrainingAuditor | None,
) -> LocalLearner:
    """The learner of a run; `head`, or the small model of the recipe, is trained along where the recipe says so."""
    if config.train.gradient_checkpointing:
        # transformers checkpoints in training mode only; these families have no dropout to switch on.
        model.train()
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    reference = None
    if config.grpo.beta > 0.0:
        reference = PackedForward(
            load_trainable(path, config.train.dtype, model.device).requires_grad_(False), _forward_settings(config)
        )
    drafter = None
    if config.trains_drafter:
        student: DraftStudent
        if head is not None:
            student = HeadStudent(head.to(model.device))
        else:
            speculation = config.rollout.speculative_config
            assert speculation is not None and speculation.model is not None, "the section checks it"
            student = small_student(speculation.model, model, config.train.dtype, _forward_settings(config))
        drafter = DraftTrainer(
            student,
            _draft_settings(config, is_small=head is None, trained=_starts_trained(config, path)),
            temperature=config.rollout.temperature,
            seed=config.seed,
        )
    return LocalLearner(
        PackedForward(model, _forward_settings(config)),
        weight_update,
        _settings(config, params),
        drafter=drafter,
        reference=reference,
        auditor=auditor,
    )


def small_student(name: str | Path, policy: Any, dtype: str, settings: ForwardSettings) -> SmallModelStudent:
    """A small model that is distilled on the policy's rollouts, beside the policy and in the learner's type."""
    path = small_model_folder(str(name))
    forward = PackedForward(load_trainable(path, dtype, policy.device), settings)
    rope = read_spec(path).rope
    return SmallModelStudent(forward, rope, policy_vocab_size=policy.get_output_embeddings().weight.shape[0])


def _forward_settings(config: RunConfig) -> ForwardSettings:
    return ForwardSettings(
        temperature=config.rollout.temperature,
        max_completions=config.train.micro_batch_size,
        chunk_size=config.train.logprob_chunk_size,
        autocast=config.train.dtype == "bfloat16",
    )


def _settings(config: RunConfig, params: SamplingParams) -> LearnerSettings:
    grpo, optim, train = config.grpo, config.optim, config.train
    completions = config.rollout.num_prompts * config.rollout.num_generations
    updates = grpo.num_iterations * -(-completions // (train.mini_batch_size or completions))
    return LearnerSettings(
        loss=LossSettings(
            loss_type=grpo.loss_type,
            epsilon=grpo.epsilon,
            epsilon_high=grpo.epsilon_high,
            delta=grpo.delta,
            beta=grpo.beta,
            importance_sampling_level=grpo.importance_sampling_level,
            max_completion_length=config.rollout.max_completion_length,
            importance_clip_max=grpo.importance_sampling_clip_max if grpo.importance_sampling_correction else None,
        ),
        optimizer=OptimizerSettings(
            learning_rate=optim.learning_rate,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            warmup_steps=optim.warmup_steps,
            schedule=optim.lr_scheduler_type,
            total_updates=config.pipeline.max_steps * updates,
            max_grad_norm=train.max_grad_norm,
        ),
        update=UpdateSettings(
            mini_batch_size=train.mini_batch_size,
            num_iterations=grpo.num_iterations,
            recompute=train.recompute,
            scale_rewards=grpo.scale_rewards,
        ),
        is_policy_law=params.is_policy_law,
        publish_dtype=DTYPES[config.rollout.dtype],
    )


def _starts_trained(config: RunConfig, path: Path) -> bool:
    """Whether the drafter was given, by the recipe or by the policy's checkpoint; `path`: the policy's folder."""
    speculation = config.rollout.speculative_config
    return speculation is not None and (
        speculation.model is not None or (speculation.draft_head == "mtp" and has_mtp(path))
    )


def _draft_settings(config: RunConfig, *, is_small: bool, trained: bool) -> DraftSettings:
    draft, micro_rollouts = config.draft, config.draft.rollouts_per_update(trained=trained)
    learnt = math.ceil(draft.token_fraction * config.rollout.num_prompts * config.rollout.num_generations)
    a_step = -(-learnt // micro_rollouts) * draft.passes * (2 if draft.replay_rollouts else 1)
    updates = -(-config.pipeline.max_steps // draft.every) * a_step
    return DraftSettings(
        loss_fn=draft.loss_fn,
        # What a small model says at a token does not depend on the round: there is nothing to unroll.
        steps=1 if is_small else draft.ttt_steps,
        decay=draft.ttt_decay,
        learning_rate=draft.rate(trained=trained),
        warmup_steps=draft.warmup_steps,
        decay_updates=updates if draft.lr_scheduler_type == "linear" else 0,
        max_grad_norm=draft.max_grad_norm,
        passes=draft.passes,
        micro_rollouts=micro_rollouts,
        replay_rollouts=draft.replay_rollouts,
        token_fraction=draft.token_fraction,
        every=draft.every,
        measure_tokens=draft.measure_tokens,
        autocast=config.train.dtype == "bfloat16",
    )
