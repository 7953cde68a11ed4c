"""Expert layers: measured by (GPU, dtype, shape, tensor and expert parallel size, routing), roofline elsewhere.

Roofline: with T tokens, E experts, K per token, uniform routing touches E_d = E (1 - (1 - K/E)^T) experts;
t = max(E_d / EP x 3 h f b / (TP u_m M), 2 T K 3 h f / (TP EP u_f F) x imbalance) + t_0.
Tokens are those of the whole expert-parallel group.
"""

from __future__ import annotations

import numpy as np

from leadout.errors import ConfigError
from leadout.sim.curves import ROOFLINE_GRID, Curve, grid_of
from leadout.sim.gemm import base_gpu
from leadout.sim.hardware import DTYPE_BYTES, GPUS, Gpu
from leadout.sim.kernel_tables import Floats, KernelTables, Served
from leadout.sim.shapes import ModelShape

ROUTINGS = ("power_law_1.2", "balanced")
EXCLUDED = frozenset({("h100_sxm", "fp8"), ("h200_sxm", "fp8")})
"""(system, dtype) of expert rows that timed a kernel no server uses."""
SKEW = 1.5
"""Slowest rank over mean under `power_law_1.2`, on the roofline path."""


def touched(experts: int, per_token: int, tokens: Floats) -> Floats:
    """Expected number of experts that see a token under uniform routing."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def roofline(gpu: Gpu, dtype: str, shape: ModelShape, tp: int, ep: int, routing: str, tokens: Floats) -> Floats:
    """Seconds of one expert layer without a table."""
    memory, compute = gpu.fractions(dtype)
    weights = shape.expert_params / tp * DTYPE_BYTES[dtype] / (memory * gpu.hbm_bytes_per_s)
    skew = SKEW if routing != "balanced" and ep > 1 else 1.0
    arithmetic = 2.0 * tokens * shape.experts_per_token * shape.expert_params / (tp * ep)
    loads = touched(shape.experts, shape.experts_per_token, tokens) / ep * weights
    return np.maximum(loads, arithmetic * skew / (compute * gpu.flops(dtype))) + 2 * gpu.kernel_floor_s


def table_key(system: str, dtype: str, family: str, shape: ModelShape, tp: int, ep: int, routing: str) -> str:
    """Key of a measured row; raises ConfigError for the excluded ones."""
    if (system, dtype) in EXCLUDED:
        raise ConfigError(f"{dtype} expert rows on {system} time the wrong kernel and are excluded; use fp8_block")
    return f"{system}|{dtype}|{family}|{shape.hidden}|{shape.expert_ffn}|{tp}|{ep}|{routing}"


def expert_curve(
    gpu: Gpu,
    tables: KernelTables | None,
    dtype: str,
    shape: ModelShape,
    *,
    tp: int,
    ep: int,
    routing: str,
    family: str = "default",
) -> Curve:
    """Seconds of one layer's routed experts by tokens."""
    if routing not in ROUTINGS:
        raise ConfigError(f"moe_routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    if shape.experts % ep:
        raise ConfigError(f"expert_parallel must divide {shape.experts} experts, got {ep}")
    row = _measured(gpu, tables, dtype, shape, tp, ep, routing, family)
    if row is None or tables is None:
        seconds = roofline(gpu, dtype, shape, tp, ep, routing, ROOFLINE_GRID)
        return Curve(name="experts", tokens=ROOFLINE_GRID, seconds=seconds, served=Served.ROOFLINE)
    seconds, source, row_tp, row_ep = row
    tokens, seconds = grid_of(seconds, tables.moe_tokens)
    scale = roofline(gpu, dtype, shape, tp, ep, routing, tokens) / roofline(
        source, dtype, shape, row_tp, row_ep, routing, tokens
    )
    served = Served.INTERPOLATED if bool(np.all(scale == 1.0)) else Served.SCALED
    return Curve(name="experts", tokens=tokens, seconds=seconds * scale, served=served, measured=True)


def _measured(
    gpu: Gpu, tables: KernelTables | None, dtype: str, shape: ModelShape, tp: int, ep: int, routing: str, family: str
) -> tuple[Floats, Gpu, int, int] | None:
    """(row, GPU, TP and EP it was measured on): this GPU's, B200's Triton rows, the nearest split, or None."""
    if tables is None or gpu.table is None or shape.experts_per_token != 8 or shape.experts not in (128, 256):
        return None
    block = shape.experts == 256 or (gpu.table, dtype) in EXCLUDED
    known = "fp8_block" if block and dtype == "fp8" else dtype
    tries = [(gpu.table, family, base_gpu(gpu)), (gpu.table, "default", base_gpu(gpu))]
    if gpu.table in ("gb200", "b200_sxm"):
        b200 = base_gpu_of("b200_sxm")
        tries = [("b200_sxm", "triton", b200), *tries] if family == "triton" else [*tries, ("b200_sxm", "triton", b200)]
    for system, kernel, source in tries:
        row = tables.moe.get(table_key(system, known, kernel, shape, tp, ep, routing))
        if row is not None:
            return row, source, tp, ep
    for near_tp, near_ep in _neighbours(tp, ep):
        row = tables.moe.get(table_key(gpu.table, known, "default", shape, near_tp, near_ep, routing))
        if row is not None:
            return row, base_gpu(gpu), near_tp, near_ep
    return None


def _neighbours(tp: int, ep: int) -> list[tuple[int, int]]:
    """Splits of the same layer to scale from when this one was not measured, nearest first."""
    return [(tp // 2, ep), (tp // 4, ep), (tp * 2, ep), (tp, ep // 2), (tp, ep // 4), (tp // 2, ep // 2)]


def base_gpu_of(system: str) -> Gpu:
    """The built-in GPU of a table system."""
    return next(gpu for gpu in GPUS.values() if gpu.table == system)
