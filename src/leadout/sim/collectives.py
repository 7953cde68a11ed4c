"""Collectives between the GPUs of a replica: measured inside one NVLink domain, alpha + beta beyond.

Beyond the measured group sizes: latency grows with the logarithm of the group and traffic with (g - 1)/g. A group that
leaves its NVLink domain reduces inside each domain with NCCL first and then across domains over the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.sim.curves import ROOFLINE_GRID, Curve, grid_of
from leadout.sim.gemm import base_gpu
from leadout.sim.hardware import Gpu
from leadout.sim.kernel_tables import Floats, KernelTables, Served

NETWORK_LATENCY_S = 15e-6
"""One hop of a collective between nodes (assumed)."""
NETWORK_FRACTION = 0.7
NVLINK_FRACTION = 0.6
NVLINK_LATENCY_S = 5e-6
BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collectives:
    """Collective times of one GPU type; elements are of two bytes."""

    gpu: Gpu
    tables: KernelTables | None

    def curve(self, op: str, group: int, *, graph: bool = True) -> Curve:
        """Seconds of `op` (all_reduce, all_gather, reduce_scatter, alltoall) over `group` GPUs by elements."""
        inside = min(group, self.gpu.nvlink_domain)
        curve = self._inside(op, inside, graph=graph and inside == group)
        if group == inside:
            return curve
        domains = group / inside
        hops = np.ceil(np.log2(domains))
        volume = BYTES * curve.tokens * (2.0 if op == "all_reduce" else 1.0) * (domains - 1) / domains
        across = 2 * hops * NETWORK_LATENCY_S + volume / (inside * NETWORK_FRACTION * self.gpu.network_bytes_per_s)
        return Curve(name=op, tokens=curve.tokens, seconds=curve.seconds + across, served=Served.EXTRAPOLATED)

    def _inside(self, op: str, group: int, *, graph: bool) -> Curve:
        found = self._measured(op, group, graph=graph)
        if found is not None:
            return found
        sizes = self._sizes(op)
        if sizes and max(sizes) < group:
            base = self._measured(op, max(sizes), graph=graph)
            assert base is not None
            largest = max(sizes)
            growth = np.log2(group / largest) * NVLINK_LATENCY_S
            share = ((group - 1) / group) / ((largest - 1) / largest)
            floor = float(base.seconds[0])
            seconds = floor + growth + (base.seconds - floor) * share
            return Curve(name=op, tokens=base.tokens, seconds=seconds, served=Served.EXTRAPOLATED)
        volume = BYTES * ROOFLINE_GRID * (2.0 if op == "all_reduce" else 1.0) * (group - 1) / group
        seconds = NVLINK_LATENCY_S + volume / (NVLINK_FRACTION * self.gpu.nvlink_bytes_per_s)
        return Curve(name=op, tokens=ROOFLINE_GRID, seconds=seconds, served=Served.ROOFLINE)

    def _sizes(self, op: str) -> list[int]:
        if self.tables is None or self.gpu.table is None:
            return []
        prefix = f"{self.gpu.table}|{op}|nccl|"
        return sorted(int(key.removeprefix(prefix)) for key in self.tables.comm if key.startswith(prefix))

    def _measured(self, op: str, group: int, *, graph: bool) -> Curve | None:
        """The faster of vLLM's own kernel and NCCL at each size, as vLLM chooses by size."""
        if self.tables is None or group not in self._sizes(op):
            return None
        rows: list[Floats] = []
        for kernel in ("graph" if graph else "eager", "nccl"):
            row = self.tables.comm.get(f"{self.gpu.table}|{op}|{kernel}|{group}")
            if row is not None:
                rows.append(row)
        tokens, seconds = grid_of(np.fmin.reduce(np.array(rows)), self.tables.comm_elements)
        scale = base_gpu(self.gpu).nvlink_bytes_per_s / self.gpu.nvlink_bytes_per_s
        served = Served.INTERPOLATED if scale == 1.0 else Served.SCALED
        return Curve(name=op, tokens=tokens, seconds=seconds * scale, served=served, measured=True)
