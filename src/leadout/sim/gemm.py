"""Matrix products: measured rows, widths in between by utilisation, roofline.

t(m; n, k) = max(n k b / (u_m M), 2 m n k / (u_f F)) + t_0 is the roofline: n outputs, k inputs, m rows, b bytes a
weight, M bytes/s, F FLOP/s. Utilisation of a measured row is roofline / measured; an unmeasured (n, k) takes the mean
of its three nearest measured shapes' utilisations at the same m, weighted by inverse squared distance in (log n,
log k).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.sim.curves import ROOFLINE_GRID, Curve, grid_of
from leadout.sim.hardware import DTYPE_BYTES, GPUS, Gpu
from leadout.sim.kernel_tables import Floats, KernelTables, Served

NEIGHBOURS = 3


def roofline(gpu: Gpu, dtype: str, n: float, k: float, m: Floats) -> Floats:
    """Seconds of one product without a table."""
    memory, compute = gpu.fractions(dtype)
    weights = n * k * DTYPE_BYTES[dtype] / (memory * gpu.hbm_bytes_per_s)
    return np.maximum(weights, 2.0 * m * n * k / (compute * gpu.flops(dtype))) + gpu.kernel_floor_s


def ideal(gpu: Gpu, dtype: str, n: Floats | float, k: Floats | float, m: Floats) -> Floats:
    """What utilisation is measured against: smooth maximum of traffic and arithmetic at peak rates, and a launch."""
    bytes_per = DTYPE_BYTES[dtype]
    traffic = (n * k * bytes_per + m * (k * bytes_per + n * 2.0)) / gpu.hbm_bytes_per_s
    arithmetic = 2.0 * m * n * k / gpu.flops(dtype)
    return (traffic**4 + arithmetic**4) ** 0.25 + gpu.kernel_floor_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmModel:
    """Product times on one GPU in one dtype."""

    gpu: Gpu
    dtype: str
    tables: KernelTables | None
    """None: roofline only."""
    exclude: tuple[int, int] | None = None
    """A shape to leave out, for validation."""

    def _rows(self) -> Floats | None:
        if self.tables is None or self.gpu.table is None or self.gpu.table not in self.tables.systems:
            return None
        rows = self.tables.gemm[self.tables.system(self.gpu.table), self.tables.dtype(self.dtype)]
        return rows if bool(np.isfinite(rows).any()) else None

    def curve(self, n: int, k: int, name: str = "gemm") -> Curve:
        """Seconds by rows m of a product with n outputs and k inputs."""
        rows = self._rows()
        if rows is None or self.tables is None:
            seconds = roofline(self.gpu, self.dtype, n, k, ROOFLINE_GRID)
            return Curve(name=name, tokens=ROOFLINE_GRID, seconds=seconds, served=Served.ROOFLINE)
        exact = self._exact(rows, n, k)
        if exact is not None:
            tokens, seconds = grid_of(exact, self.tables.gemm_m)
            served, measured = Served.INTERPOLATED, True
        else:
            tokens, seconds = self._by_utilisation(rows, n, k)
            served, measured = Served.INTERPOLATED, False
        scale, changed = self._override_ratio(n, k, tokens)
        return Curve(
            name=name,
            tokens=tokens,
            seconds=seconds * scale,
            served=Served.SCALED if changed else served,
            measured=measured,
        )

    def _exact(self, rows: Floats, n: int, k: int) -> Floats | None:
        assert self.tables is not None
        at_n, at_k = np.flatnonzero(self.tables.gemm_n == n), np.flatnonzero(self.tables.gemm_k == k)
        if not (at_n.size and at_k.size) or (n, k) == self.exclude:
            return None
        row = rows[at_n[0], at_k[0]]
        return row if bool(np.isfinite(row).any()) else None

    def _by_utilisation(self, rows: Floats, n: int, k: int) -> tuple[Floats, Floats]:
        assert self.tables is not None and self.gpu.table is not None
        tables, base = self.tables, base_gpu(self.gpu)
        grid_n, grid_k = np.meshgrid(tables.gemm_n, tables.gemm_k, indexing="ij")
        present = np.isfinite(rows).any(axis=-1)
        if self.exclude is not None:
            present &= ~((grid_n == self.exclude[0]) & (grid_k == self.exclude[1]))
        n_all, k_all, t_all = grid_n[present], grid_k[present], rows[present]
        distance = np.log(n_all / n) ** 2 + np.log(k_all / k) ** 2
        nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        m = tables.gemm_m
        ideals = ideal(base, self.dtype, n_all[nearest, None], k_all[nearest, None], m[None, :])
        utilisation = np.log(ideals / t_all[nearest])
        weights = 1.0 / (distance[nearest, None] + 0.01)
        weights = np.where(np.isfinite(utilisation), weights, 0.0)
        total = weights.sum(axis=0)
        mean = (weights * np.nan_to_num(utilisation)).sum(axis=0) / np.where(total > 0, total, np.nan)
        return grid_of(ideal(base, self.dtype, n, k, m) * np.exp(-mean), m)

    def _override_ratio(self, n: int, k: int, m: Floats) -> tuple[Floats, bool]:
        base = base_gpu(self.gpu)
        ratio = roofline(self.gpu, self.dtype, n, k, m) / roofline(base, self.dtype, n, k, m)
        return ratio, bool(np.any(ratio != 1.0))


def base_gpu(gpu: Gpu) -> Gpu:
    """The built-in GPU whose tables `gpu` uses."""
    return next((known for known in GPUS.values() if known.table == gpu.table), gpu)
