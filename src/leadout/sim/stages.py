"""Seconds of the stages that are not generation: train, logprob, refit, reward.

Train FLOP = 6 P_mm n (1 + r) + 12 N_l heads d sum(L^2) / 2 (causal), n tokens, r = 1/3 with recomputed activations;
a log-probability pass is a third of the first term without r. t = FLOP / (GPUs F MFU).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.sim.hardware import Gpu
from leadout.sim.kernel_tables import Floats
from leadout.sim.shapes import DraftShape, ModelShape

DENSE_MFU = {"A100": 0.45, "H100": 0.38, "H200": 0.38, "B200": 0.30, "GB200": 0.30}
"""Starting points by GPU, bf16, dense; half of it for experts. To be fitted to a log where there is one."""


def default_mfu(gpu: Gpu, shape: ModelShape) -> float:
    """Model FLOP utilisation assumed without a measurement."""
    dense = DENSE_MFU.get(gpu.name, 0.35)
    return dense / 2 if shape.is_moe else dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the learner sees of a step."""

    total: float
    """Tokens, prompts and padding included."""
    squares: float
    """Sum of squared sequence lengths."""


def learner_tokens(lengths: Floats, prompt: float, cap: float, *, packed: bool) -> Tokens:
    """Packed: sequences as they are; else padded to prompt + cap."""
    sequence = lengths + prompt if packed else np.full_like(lengths, prompt + cap)
    return Tokens(total=float(sequence.sum()), squares=float((sequence**2).sum()))


def train_flops(shape: ModelShape, tokens: Tokens, *, recompute: bool) -> float:
    """FLOP of one pass of training over the tokens."""
    products = 6.0 * shape.matmul_params * tokens.total
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * tokens.squares / 2.0
    return (products + attention) * (4.0 / 3.0 if recompute else 1.0)


def forward_flops(shape: ModelShape, tokens: Tokens) -> float:
    """FLOP of one forward pass."""
    return train_flops(shape, tokens, recompute=False) / 3.0


def draft_flops(drafter: DraftShape, tokens: Tokens, passes: int) -> float:
    """FLOP of training the drafter for `passes` passes (unrolled steps counted)."""
    return 6.0 * drafter.trained_params * tokens.total * passes


def reward_seconds(
    samples: float, seconds_per_sample: float, workers: int, *, overlapped: bool, rollout_seconds: float
) -> float:
    """Exposed scoring time, with n samples of s seconds, W workers and a rollout stage of R seconds.

    After the rollouts: ceil(n / W) s. Scored as they finish: max(s, n s / W - R + s), the last sample alone when the
    workers keep pace with the rollouts, else what they are behind by; never more than the former.
    """
    serial = float(np.ceil(samples / workers)) * seconds_per_sample
    if not overlapped:
        return serial
    behind = samples * seconds_per_sample / workers - rollout_seconds
    return min(serial, seconds_per_sample + max(behind, 0.0))


FIXED_S = {"copy": 1.0, "broadcast": 1.0, "in_flight": 0.1}
"""Fixed part of a weight update."""


def refit_seconds(
    method: str, gpu: Gpu, total_bytes: float, links: int, fraction: float, fixed_s: float | None
) -> float:
    """t_fix + P b / (links bw_eff), bw_eff a share of a network link. In flight nothing drains, the transfer stays.

    One link at 40 % of 50 GB/s gives 1.8 s for 8B (published: 1.6-2.1 s, colocated GB200) and 51 s for 1T parameters
    in FP8 (53 s over NCCL); older colocated software took 4-8 s (8B) and 14-26 s (70B).
    """
    fixed = FIXED_S[method] if fixed_s is None else fixed_s
    return fixed + total_bytes / (links * fraction * gpu.network_bytes_per_s)
