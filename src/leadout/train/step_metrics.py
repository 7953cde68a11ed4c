"""Stage train: what one stage measures on the policy, summed over micro-batches and named as in TRL.

Axes: R response tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leadout.train.loss import MAX_LOG_RATIO, LossOutput


@dataclass
class _Mean:
    """A mean over tokens of many micro-batches, with extremes."""

    total: float = 0.0
    count: int = 0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, values: Tensor) -> None:
        if values.numel():
            values = values.detach().double()
            self.total += float(values.sum())
            self.count += values.numel()
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass
class StepMetrics:
    """Sums of one train stage; means are over the tokens trained on."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    entropy: _Mean = field(default_factory=_Mean)
    kl: _Mean = field(default_factory=_Mean)
    low_clipped: _Mean = field(default_factory=_Mean)
    high_clipped: _Mean = field(default_factory=_Mean)
    mismatch: _Mean = field(default_factory=_Mean)
    difference: _Mean = field(default_factory=_Mean)
    importance: _Mean = field(default_factory=_Mean)

    def add_forward(self, learner_R: Tensor, engine_R: Tensor, entropy_R: Tensor, mask_R: Tensor) -> None:
        """The first pass over some tokens: entropy and how far the generator's log-probabilities are off."""
        gap_R = (learner_R.detach() - engine_R)[mask_R].double()
        self.entropy.add(entropy_R[mask_R])
        self.mismatch.add(torch.expm1(gap_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - gap_R)
        self.difference.add(gap_R.abs())

    def add_loss(self, out: LossOutput, mask_R: Tensor, importance_R: Tensor | None) -> None:
        """One micro-batch of an update."""
        self.low_clipped.add(out.low_clipped_R[mask_R])
        self.high_clipped.add(out.high_clipped_R[mask_R])
        if out.kl_R is not None:
            self.kl.add(out.kl_R[mask_R])
        if importance_R is not None:
            self.importance.add(importance_R[mask_R])

    def row(self) -> dict[str, float]:
        """Metrics by name; what was not measured has no key."""
        row = {"loss": _average(self.losses)}
        if self.grad_norms:
            row["grad_norm"] = _average(self.grad_norms)
        for name, measured in (("entropy", self.entropy), ("kl", self.kl), ("mismatch_kl", self.mismatch)):
            if measured.count:
                row[name] = measured.mean
        if self.difference.count:
            row["sampling/sampling_logp_difference/mean"] = self.difference.mean
            row["sampling/sampling_logp_difference/max"] = self.difference.high
        if self.importance.count:
            row["sampling/importance_sampling_ratio/min"] = self.importance.low
            row["sampling/importance_sampling_ratio/mean"] = self.importance.mean
            row["sampling/importance_sampling_ratio/max"] = self.importance.high
        if self.low_clipped.count:
            low, high = self.low_clipped.mean, self.high_clipped.mean
            row |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        return row


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
