"""Plain settings of stage train, made from the recipe by `leadout.build`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW of the policy."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly."""
    schedule: Schedule = "constant"
    total_updates: int = 1
    """Updates of the whole run; where `linear` and `cosine` reach zero."""
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a step's rollouts become optimizer updates."""

    mini_batch_size: int | None = None
    """Completions per update; None is the whole step."""
    num_iterations: int = 1
    """Passes over the step's rollouts."""
    recompute: Literal["auto", "always"] = "auto"
    """`auto` leaves the logprob pass out where the only update's own forward gives the same numbers."""
    scale_rewards: Literal["group", "batch", "none"] = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """How the drafter learns."""

    loss_fn: str = "lk"
    """As `leadout.train.draft_loss.make_loss` takes it."""
    steps: int = 3
    """Unrolled steps of training-time test."""
    decay: float = 0.8
    """Weight of an unrolled step relative to the one before."""
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 20
    decay_updates: int = 0
    """Update at which the learning rate has fallen to its floor; 0 keeps it constant (no end is known)."""
    decay_from: int = 0
    """Update from which it falls, linearly."""
    decay_floor: float = 0.05
    """Share of the learning rate that stays."""
    max_grad_norm: float = 1.0
    passes: int = 1
    """Updates made from the same rollouts in a row."""
    micro_rollouts: int = 4
    """Rollouts per update."""
    replay_rollouts: int = 0
    """Recent rollouts kept and trained on again, as many per step as fresh ones; 0 is off."""
    token_fraction: float = 1.0
    """Share of the rollouts trained on, and of those measured."""
    every: int = 1
    """Train on every n-th step."""
    measure_tokens: int = 4096
    """Response tokens per step that the expected acceptance length is measured on."""
    measure_depth: int = 3
    """Drafts per round of that measurement."""
    autocast: bool = True
    """Matrix products in bfloat16; weights stay float32."""
