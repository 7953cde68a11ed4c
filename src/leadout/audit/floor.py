"""What rounding alone does to each statistic, measured from the learner and free of sampling noise.

The learner's model is run twice over the same tokens, exactly (fp32) and in the generator's precision (bf16). If the
second law were sampled and the first tested, the distribution function of U would leave the diagonal by
`mean P16(U <= u) - u`; its largest value is the floor of the KS tests. No second run of a generator is a baseline
here: a fault that both runs share would cancel.

Axes: N positions, V vocabulary, C tokens in the test's order, G grid of u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from leadout.audit.tails import Floats

GRID_SIZE = 63
NUM_SORTED = 1024
"""Tokens of a row ordered one by one; the rest of the row counts as one cell."""


def grid() -> torch.Tensor:
    """The values of u that are looked at, f64[G], evenly spaced inside (0, 1)."""
    return torch.arange(1, GRID_SIZE + 1, dtype=torch.float64) / (GRID_SIZE + 1)


def displacement(exact_NC: torch.Tensor, rounded_NC: torch.Tensor) -> torch.Tensor:
    """Sum over rows of P_rounded(U <= u) - u, f64[G]; columns stand in the order of the test, rows are normalised."""
    exact_NC, rounded_NC = exact_NC.double(), rounded_NC.double()
    exact_NC = exact_NC / exact_NC.sum(-1, keepdim=True)
    rounded_NC = rounded_NC / rounded_NC.sum(-1, keepdim=True)
    cum_exact_NC, cum_rounded_NC = exact_NC.cumsum(-1), rounded_NC.cumsum(-1)
    u_NG = grid().expand(exact_NC.shape[0], -1).contiguous()
    cell_NG = torch.searchsorted(cum_exact_NC, u_NG).clamp(max=exact_NC.shape[-1] - 1)
    width_NG = exact_NC.gather(-1, cell_NG)
    part_NG = 1.0 - ((cum_exact_NC.gather(-1, cell_NG) - u_NG) / width_NG.clamp(min=1e-300)).clamp(0.0, 1.0)
    height_NG = rounded_NC.gather(-1, cell_NG)
    reached_NG = cum_rounded_NC.gather(-1, cell_NG) - height_NG * (1.0 - part_NG)
    return (reached_NG - u_NG).sum(0)


def in_order(key_NV: torch.Tensor, *laws: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Columns of each law by falling `key_NV`, cut to `NUM_SORTED` and one cell with the rest."""
    count = min(NUM_SORTED, key_NV.shape[-1])
    index_NC = torch.topk(key_NV, count, -1).indices
    ordered = []
    for law_NV in laws:
        head_NC = law_NV.gather(-1, index_NC)
        rest_N1 = (law_NV.sum(-1, keepdim=True) - head_NC.sum(-1, keepdim=True)).clamp(min=0.0)
        ordered.append(torch.cat((head_NC, rest_N1), -1))
    return tuple(ordered)


@dataclass(slots=True)
class Curve:
    """Running mean of a displacement."""

    sums_G: torch.Tensor = field(default_factory=lambda: torch.zeros(GRID_SIZE, dtype=torch.float64))
    n: int = 0

    def add(self, exact_NC: torch.Tensor, rounded_NC: torch.Tensor) -> None:
        """Take laws whose columns stand in the order of the test."""
        usable_N = (exact_NC.sum(-1) > 0) & (rounded_NC.sum(-1) > 0)
        if bool(usable_N.any()):
            self.sums_G += displacement(exact_NC[usable_N], rounded_NC[usable_N])
            self.n += int(usable_N.sum())

    @property
    def distance(self) -> float:
        """Largest distance from the diagonal; 0 while nothing was measured."""
        return float(self.sums_G.abs().max()) / self.n if self.n else 0.0


@dataclass(slots=True)
class Mean:
    """Running mean of a number."""

    total: float = 0.0
    n: int = 0

    def add(self, values_N: Floats) -> None:
        """Take more values."""
        self.total += float(values_N.sum())
        self.n += values_N.shape[0]

    @property
    def value(self) -> float:
        """The mean; 0 while empty."""
        return self.total / self.n if self.n else 0.0


@dataclass(slots=True)
class Floor:
    """Every floor of one audit; all 0 when the learner gave one pass only."""

    pit: Curve = field(default_factory=Curve)
    """T1's order."""
    ratio: Curve = field(default_factory=Curve)
    """T2's order."""
    accepted: Curve = field(default_factory=Curve)
    """T4, accepted tokens by id."""
    correction: Curve = field(default_factory=Curve)
    """T4, corrections by id."""
    correction_ratio: Curve = field(default_factory=Curve)
    """T4, corrections by p/q."""
    entropy: Mean = field(default_factory=Mean)
    """Mean under the rounded law of -log p, minus the entropy (nats): what T3 sees of rounding."""
    accept: Mean = field(default_factory=Mean)
    """Rounded minus exact acceptance probability."""
    square: Mean = field(default_factory=Mean)
    """Squared log-probability error of the emitted token."""

    @property
    def entropy_shift(self) -> float:
        """T3's floor in nats per token."""
        return abs(self.entropy.value)

    @property
    def accept_shift(self) -> float:
        """Floor of the count tests, as a probability."""
        return abs(self.accept.value)

    @property
    def logprob_rms(self) -> float:
        """T6's floor in nats."""
        return math.sqrt(self.square.value)
