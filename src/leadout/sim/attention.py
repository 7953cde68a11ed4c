"""Attention: decode over a key-value cache, growth with query length, prefill.

Decode is linear in batch and piecewise linear in context: t = t0(B) + B L bytes / (u M) (a *sum*), so that time
integrates in closed form over a growing context. Measured rows are used only where the cache read is over twice the
L2 cache; smaller rows were measured warm, in a real step the weights pass through L2 between layers, and the line
fitted above it takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.errors import ConfigError
from leadout.sim.curves import ROOFLINE_GRID, Curve, grid_of
from leadout.sim.gemm import base_gpu
from leadout.sim.hardware import DTYPE_BYTES, Gpu
from leadout.sim.kernel_tables import Floats, KernelTables, Served

COLD = 2.0
"""Rows count as cold above this many L2 caches."""
ROOFLINE_LAUNCH_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeAttention:
    """Seconds of one layer of decode attention with one query per row, on the knots of (batch, context)."""

    batches: Floats
    kv_lens: Floats
    seconds: Floats
    """[batch, kv_len]; linear in between."""
    warm: Floats
    """[batch, kv_len]: 1 where the fitted line serves, 0 where a measured row does."""
    served: Served

    def rows(self, batch: Floats) -> Floats:
        """Seconds at whole batches on the context knots: [len(batch), kv_len], linear in batch."""
        out = np.empty((len(batch), len(self.kv_lens)))
        for i in range(len(self.kv_lens)):
            out[:, i] = _linear(batch, self.batches, self.seconds[:, i])
        return out

    def at(self, batch: float, context: float) -> float:
        """Seconds at one (batch, mean context)."""
        row = self.rows(np.array([batch]))[0]
        return float(_linear(np.array([context]), self.kv_lens, row)[0])

    def path(self, batch: float, context: float) -> Served:
        """Which path serves this point."""
        if self.served is not Served.INTERPOLATED:
            return self.served
        if batch > self.batches[-1] or context > self.kv_lens[-1]:
            return Served.EXTRAPOLATED
        i = int(np.searchsorted(self.batches, batch, side="right") - 1)
        j = int(np.searchsorted(self.kv_lens, context, side="right") - 1)
        return Served.FITTED if self.warm[max(i, 0), max(j, 0)] else Served.INTERPOLATED


def _linear(x: Floats, grid: Floats, values: Floats) -> Floats:
    """Linear interpolation that goes on with the last slope beyond the grid and with the first below it."""
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    slope = (values[i + 1] - values[i]) / (grid[i + 1] - grid[i])
    return np.maximum(values[i] + slope * (x - grid[i]), 0.0)


def fit_line(
    batches: Floats, kv_lens: Floats, seconds: Floats, floor: Floats, bytes_per: float, cold: float
) -> tuple[Floats, Floats]:
    """(t0, seconds per byte) by batch of t0(B) + bytes x slope(B), on rows that read at least `cold` bytes.

    Least relative squares for each batch with two cold rows or more; the others take the median slope and, without any
    cold row, the measured floor. t0 is never below that floor. All NaN when no batch has two cold rows.
    """
    read = batches[:, None] * kv_lens[None, :] * bytes_per
    use = np.isfinite(seconds) & (read >= cold)
    slope = np.full(len(batches), np.nan)
    for i in range(len(batches)):
        if use[i].sum() >= 2:
            x, y = read[i][use[i]], seconds[i][use[i]]
            centre_x, centre_y = np.average(x, weights=y**-2), np.average(y, weights=y**-2)
            slope[i] = np.sum((x - centre_x) * (y - centre_y) / y**2) / np.sum(((x - centre_x) / y) ** 2)
    if np.isfinite(slope).any():
        middle = float(np.nanmedian(slope))
        slope = np.clip(np.where(np.isfinite(slope), slope, middle), 0.7 * middle, 1.4 * middle)
    start = floor.copy()
    for i in range(len(batches)):
        if use[i].any() and np.isfinite(slope[i]):
            start[i] = max(float(np.median((seconds[i] - slope[i] * read[i])[use[i]])), float(floor[i]))
    return start, slope


def decode_attention(
    gpu: Gpu, tables: KernelTables | None, heads: int, kv_heads: int, head_dim: int, kv_dtype: str
) -> DecodeAttention:
    """The model of one layer: measured if the tables have (heads, kv_heads), else the nearest with the same ratio."""
    bytes_per = 2.0 * kv_heads * head_dim * DTYPE_BYTES[kv_dtype]
    table = _table(gpu, tables, heads, kv_heads, head_dim, kv_dtype)
    if table is None or tables is None:
        return roofline_attention(gpu, bytes_per)
    seconds, floor, width = table
    scale = base_gpu(gpu).hbm_bytes_per_s / gpu.hbm_bytes_per_s
    start, slope = fit_line(tables.batches, tables.kv_lens, seconds, floor, width, COLD * gpu.l2_bytes)
    if not np.isfinite(slope).all():
        slope = np.full(len(start), 1.0 / (gpu.attention_fraction * base_gpu(gpu).hbm_bytes_per_s))
    read = tables.batches[:, None] * tables.kv_lens[None, :] * width
    line = start[:, None] + slope[:, None] * read
    warm = ~np.isfinite(seconds) | (read < COLD * gpu.l2_bytes)
    # Beyond the last measured context of a batch the line is shifted to go on from the last row.
    filled = np.where(warm, line, seconds)
    for i in range(len(tables.batches)):
        last = np.flatnonzero(~warm[i])
        if last.size:
            filled[i, last[-1] + 1 :] = seconds[i, last[-1]] + slope[i] * (read[i, last[-1] + 1 :] - read[i, last[-1]])
    filled = np.maximum.accumulate(filled, axis=1)
    ratio = (bytes_per / width) if bytes_per != width else 1.0
    served = Served.SCALED if scale != 1.0 or ratio != 1.0 else Served.INTERPOLATED
    return DecodeAttention(
        batches=tables.batches,
        kv_lens=tables.kv_lens,
        seconds=filled * scale * ratio,
        warm=warm.astype(float),
        served=served,
    )


def _table(
    gpu: Gpu, tables: KernelTables | None, heads: int, kv_heads: int, head_dim: int, kv_dtype: str
) -> tuple[Floats, Floats, float] | None:
    """(rows, floors, bytes a token) of the measured shape that reads as many bytes; None without one."""
    if tables is None or gpu.table not in tables.systems or kv_dtype not in tables.dtypes:
        return None
    at = tables.system(str(gpu.table)), tables.dtype(kv_dtype)
    if not bool(np.isfinite(tables.attention[at]).any()):
        return None
    if (heads, kv_heads) in tables.heads:
        index = tables.heads.index((heads, kv_heads))
    else:
        same = [i for i, (_, kv) in enumerate(tables.heads) if kv == kv_heads]
        if not same:
            same = list(range(len(tables.heads)))
        index = min(same, key=lambda i: abs(np.log(tables.heads[i][0] / heads)) + abs(tables.heads[i][1] - kv_heads))
    width = 2.0 * tables.heads[index][1] * 128 * DTYPE_BYTES[kv_dtype]
    return tables.attention[at][index], tables.attention_floor[at][index], width


def roofline_attention(gpu: Gpu, bytes_per: float) -> DecodeAttention:
    """t0 + bytes / (u M) without a table."""
    batches, kv_lens = np.exp2(np.arange(12.0)), np.exp2(np.arange(1.0, 18.0))
    read = batches[:, None] * kv_lens[None, :] * bytes_per
    seconds = ROOFLINE_LAUNCH_S + read / (gpu.attention_fraction * gpu.hbm_bytes_per_s)
    return DecodeAttention(
        batches=batches, kv_lens=kv_lens, seconds=seconds, warm=np.ones_like(seconds), served=Served.ROOFLINE
    )


def latent_attention(tables: KernelTables, rows: Floats) -> DecodeAttention:
    """Measured latent attention: rows as they are, gaps at large batch and context by the last slope."""
    filled = rows.copy()
    width = len(tables.batches)
    for j in range(rows.shape[1]):
        known = np.flatnonzero(np.isfinite(rows[:, j]))
        gaps = np.arange(known[-1] + 1, width) if known.size else np.arange(0)
        filled[gaps, j] = rows[known[-1], j] * tables.batches[gaps] / tables.batches[known[-1]] if known.size else 0.0
    filled = np.maximum.accumulate(np.nan_to_num(filled), axis=1)
    return DecodeAttention(
        batches=tables.batches,
        kv_lens=tables.kv_lens,
        seconds=filled,
        warm=np.zeros_like(filled),
        served=Served.INTERPOLATED,
    )


def prefill_attention(gpu: Gpu, tables: KernelTables | None, heads: int, kv_heads: int, head_dim: int) -> Curve:
    """Seconds of one layer of prefill attention over one prompt, by its length."""
    if tables is not None and gpu.table in tables.systems and (heads, kv_heads) in tables.heads and head_dim == 128:
        row = tables.prefill[tables.system(str(gpu.table)), tables.heads.index((heads, kv_heads))]
        if bool(np.isfinite(row).any()):
            tokens, seconds = grid_of(row, tables.prefill_lens)
            scale = base_gpu(gpu).bf16_flops / gpu.bf16_flops
            served = Served.INTERPOLATED if scale == 1.0 else Served.SCALED
            return Curve(name="prefill attention", tokens=tokens, seconds=seconds * scale, served=served, measured=True)
    flops = 2.0 * heads * head_dim * ROOFLINE_GRID**2
    seconds = flops / (0.5 * gpu.gemm_flops_fraction * gpu.bf16_flops) + gpu.kernel_floor_s
    return Curve(name="prefill attention", tokens=ROOFLINE_GRID, seconds=seconds, served=Served.ROOFLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Factor on decode attention when a row has q = k + 1 queries."""

    per_draft: float = 0.14
    """Growth per drafted token in a kernel made for several queries (FlashInfer on Blackwell, batch 32: 1 + .14 k)."""
    fallback_above: int = 0
    """Largest q the decode kernel takes; above it the prefill kernel runs. 0: no limit."""
    fallback_factor: float = 4.0
    """Cost of that kernel in units of the decode kernel."""

    def factor(self, k: int) -> float:
        """Multiplier for k drafted tokens a row."""
        if k < 0:
            raise ConfigError(f"k must be >= 0, got {k}")
        if self.fallback_above and k + 1 > self.fallback_above:
            return max(self.fallback_factor, 1.0 + self.per_draft * k)
        return 1.0 + self.per_draft * k
