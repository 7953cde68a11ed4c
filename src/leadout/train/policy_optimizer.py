"""Stage train: the policy's AdamW, its clipping and its learning rate. The weights are its float32 masters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from leadout.errors import TrainingError
from leadout.train.settings import OptimizerSettings


class PolicyOptimizer:
    """One per learner."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.updates = 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return scheduled_learning_rate(self.settings, self.updates)

    def update(self) -> float:
        """Clip the gathered gradients, take one step, drop them; returns their norm before clipping.

        Raises TrainingError when gradients or weights are not finite: nothing that follows would be worth keeping, and
        the run ends before it replaces a good checkpoint.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm)
        self._require_finite("gradient", norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.updates += 1
        self._require_finite("weights", torch.stack(torch._foreach_norm([p.detach() for p in self._parameters])))
        return float(norm)

    def _require_finite(self, what: str, norms: torch.Tensor) -> None:
        if not bool(torch.isfinite(norms).all()):
            raise TrainingError(
                f"expected finite {what} of the policy, got inf or nan around update {self.updates} at learning rate "
                f"{self.learning_rate:g}; lower optim.learning_rate and resume from the last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Moments and the count of updates."""
        return {"adamw": self._adamw.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._adamw.load_state_dict(state["adamw"])
        self.updates = int(state["updates"])


def scheduled_learning_rate(settings: OptimizerSettings, updates: int) -> float:
    """Learning rate after `updates` finished updates: a linear rise, then constant or falling to 0 at the end."""
    if updates < settings.warmup_steps:
        return settings.learning_rate * (updates + 1) / settings.warmup_steps
    left = max(settings.total_updates - settings.warmup_steps, 1)
    done = min((updates - settings.warmup_steps) / left, 1.0)
    if settings.schedule == "linear":
        return settings.learning_rate * (1.0 - done)
    if settings.schedule == "cosine":
        return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate
