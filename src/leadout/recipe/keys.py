"""Names of settings: what other frameworks call them, and which of ours is nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

ACCEPTED: Mapping[str, str] = MappingProxyType({"rollout.num_prompts_per_step": "rollout.num_prompts"})
"""Aliases that are accepted as they are; everything else in another framework's words is refused."""

_FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        # completions and lengths
        "rollout.n": "rollout.num_generations",
        "n": "rollout.num_generations",
        "num_generations_per_prompt": "rollout.num_generations",
        "n_samples_per_prompt": "rollout.num_generations",
        "n_samples": "rollout.num_generations",
        "group_size": "rollout.num_generations",
        "num_prompts_per_step": "rollout.num_prompts",
        "train_batch_size": "rollout.num_prompts",
        "per_device_train_batch_size": "train.micro_batch_size (with rollout.num_prompts prompts a step)",
        "train_micro_batch_size": "train.micro_batch_size",
        "ppo_micro_batch_size_per_gpu": "train.micro_batch_size",
        "gradient_accumulation_steps": "train.micro_batch_size and train.mini_batch_size",
        "train_global_batch_size": "train.mini_batch_size",
        "ppo_mini_batch_size": "train.mini_batch_size",
        "max_new_tokens": "rollout.max_completion_length",
        "max_response_length": "rollout.max_completion_length",
        "max_tokens": "rollout.max_completion_length",
        "rollout_max_response_len": "rollout.max_completion_length",
        "max_total_sequence_length": "rollout.max_model_len",
        "max_input_seq_length": "data.max_prompt_length",
        # models and data
        "model_name_or_path": "model",
        "model_name": "model",
        "dataset_name": "data.train.hub or data.train.path",
        "train_files": "data.train.path",
        "val_files": "data.eval.path",
        "input_key": "data.train.prompt_key",
        "output_key": "data.train.answer_key",
        "label_key": "data.train.answer_key",
        "reward_funcs": "reward: [{function: NAME, weight: 1.0}]",
        "reward_weights": "reward: [{function: NAME, weight: 1.0}]",
        "custom_reward_function.path": "reward: [{function: package.module:function}]",
        # loss
        "clip_ratio": "grpo.epsilon",
        "clip_ratio_low": "grpo.epsilon",
        "clip_ratio_high": "grpo.epsilon_high",
        "clip_ratio_c": "grpo.delta",
        "ratio_clip_min": "grpo.epsilon",
        "ratio_clip_max": "grpo.epsilon_high",
        "ratio_clip_c": "grpo.delta",
        "eps_clip": "grpo.epsilon",
        "eps_clip_high": "grpo.epsilon_high",
        "kl_loss_coef": "grpo.beta",
        "kl_coef": "grpo.beta",
        "use_kl_loss": "grpo.beta (0 is off)",
        "kl_loss_type": "grpo.beta (the estimator is k3)",
        "reference_policy_kl_penalty": "grpo.beta",
        "reference_policy_kl_type": "grpo.beta (the estimator is k3)",
        "loss_agg_mode": "grpo.loss_type",
        "token_level_loss": "grpo.loss_type",
        "norm_adv_by_std_in_grpo": "grpo.scale_rewards",
        "normalize_rewards": "grpo.scale_rewards",
        "ppo_epochs": "grpo.num_iterations",
        "overlong_filtering": "grpo.mask_truncated_completions",
        "sequence_level_importance_ratios": "grpo.importance_sampling_level",
        "vllm_importance_sampling_correction": "grpo.importance_sampling_correction",
        "vllm_importance_sampling_clip_max": "grpo.importance_sampling_clip_max",
        "truncated_importance_sampling_type": "grpo.importance_sampling_correction",
        "rollout_is": "grpo.importance_sampling_correction",
        # optimizer and loop
        "lr": "optim.learning_rate",
        "optim.lr": "optim.learning_rate",
        "clip_grad": "train.max_grad_norm",
        "grad_clip": "train.max_grad_norm",
        "total_training_steps": "pipeline.max_steps",
        "max_num_steps": "pipeline.max_steps",
        "num_train_epochs": "pipeline.max_steps",
        "max_trajectory_age_steps": "pipeline.max_staleness",
        "max_staleness_steps": "pipeline.max_staleness",
        "max_head_offpolicyness": "pipeline.max_staleness",
        "max_off_policy_steps": "pipeline.max_staleness",
        "staleness_threshold": "pipeline.max_staleness (in versions, not a share)",
        "save_steps": "checkpoint.every",
        "save_period": "checkpoint.every",
        "save_freq": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "keep_top_k": "checkpoint.keep",
        "eval_steps": "eval.every",
        "val_period": "eval.every",
        "test_freq": "eval.every",
        "report_to": "log.to",
        # speculation
        "speculative_num_steps": "rollout.speculative_config.num_speculative_tokens",
        "speculative_num_draft_tokens": "rollout.speculative_config.num_speculative_tokens",
        "speculative_algorithm": "rollout.speculative_config.method",
        "speculative_draft_model_path": "rollout.speculative_config.model",
        "draft.model_name": "rollout.speculative_config.model",
        "draft.aux_layer_indices": "draft.layer_ids (NeMo's index i is our i + 1)",
        "ttt_length": "draft.ttt_steps",
        "eagle_ttt_steps": "draft.ttt_steps",
    }
)


def foreign_key(path: str) -> str | None:
    """Our name for a setting in another framework's words, by the longest matching end of its dotted key."""
    parts = path.replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_FOREIGN[end] for end in ends if end in _FOREIGN), None)


def nearest_key(path: str, known: Sequence[str]) -> str | None:
    """The known key most like a mistyped one: of the same section first, then of any."""
    prefix, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == prefix}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return siblings[near[0]]
    same = [key for key in known if key.rpartition(".")[2] == name]
    if same:
        return " or ".join(same)
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.6)
    return elsewhere[near[0]] if near else None
