"""GPUs as the simulator sees them: peak rates, memory, links, and achieved fractions for the roofline path.

Sources: vendors' data sheets (dense rates); achieved fractions derived from the vLLM kernel tables. A GPU may be named,
named with constants overridden (then table rows are scaled by the ratio of rooflines), or given whole (roofline only).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from leadout.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2.0, "fp8": 1.0}
"""Bytes per stored number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator. Rates are per second, one GPU, dense; links are one way."""

    name: str
    table: str | None
    """System name in the kernel tables; None for a GPU without measured kernels."""
    bf16_flops: float
    fp8_flops: float
    """Equal to `bf16_flops` where the chip has no FP8 units."""
    hbm_bytes: float
    hbm_bytes_per_s: float
    l2_bytes: float
    nvlink_bytes_per_s: float
    nvlink_domain: int
    """GPUs that reach one another over NVLink."""
    network_bytes_per_s: float
    host_bytes_per_s: float
    gemm_memory_fraction: float
    """u_m: share of memory bandwidth a weight-streaming product reaches."""
    gemm_flops_fraction: float
    """u_f: share of peak FLOP/s a large product reaches."""
    fp8_memory_fraction: float
    fp8_flops_fraction: float
    attention_fraction: float
    """Share of memory bandwidth decode attention reaches."""
    kernel_floor_s: float = 3e-6
    """t_0: the shortest a kernel takes."""

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in `dtype`."""
        return self.fp8_flops if dtype == "fp8" else self.bf16_flops

    def fractions(self, dtype: str) -> tuple[float, float]:
        """(u_m, u_f) of products in `dtype`."""
        if dtype == "fp8":
            return self.fp8_memory_fraction, self.fp8_flops_fraction
        return self.gemm_memory_fraction, self.gemm_flops_fraction


_HOPPER: dict[str, Any] = {
    "bf16_flops": 989e12,
    "fp8_flops": 1979e12,
    "l2_bytes": 50e6,
    "nvlink_bytes_per_s": 450e9,
    "nvlink_domain": 8,
    "network_bytes_per_s": 50e9,
    "host_bytes_per_s": 64e9,
    "gemm_memory_fraction": 0.75,
    "gemm_flops_fraction": 0.80,
    "fp8_memory_fraction": 0.57,
    "fp8_flops_fraction": 0.63,
    "attention_fraction": 0.91,
}
_BLACKWELL: dict[str, Any] = {
    "l2_bytes": 126e6,
    "nvlink_bytes_per_s": 900e9,
    "network_bytes_per_s": 50e9,
    "gemm_memory_fraction": 0.62,
    "gemm_flops_fraction": 0.70,
    "fp8_memory_fraction": 0.40,
    "fp8_flops_fraction": 0.50,
    "attention_fraction": 0.95,
}

GPUS: dict[str, Gpu] = {
    "A100": Gpu(
        name="A100",
        table="a100_sxm",
        bf16_flops=312e12,
        fp8_flops=312e12,
        hbm_bytes=80e9,
        hbm_bytes_per_s=2.04e12,
        l2_bytes=40e6,
        nvlink_bytes_per_s=300e9,
        nvlink_domain=8,
        network_bytes_per_s=25e9,
        host_bytes_per_s=32e9,
        gemm_memory_fraction=0.70,
        gemm_flops_fraction=0.82,
        fp8_memory_fraction=0.70,
        fp8_flops_fraction=0.82,
        attention_fraction=0.88,
    ),
    "H100": Gpu(name="H100", table="h100_sxm", hbm_bytes=80e9, hbm_bytes_per_s=3.35e12, **_HOPPER),
    "H200": Gpu(name="H200", table="h200_sxm", hbm_bytes=141e9, hbm_bytes_per_s=4.8e12, **_HOPPER),
    "B200": Gpu(
        name="B200",
        table="b200_sxm",
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        hbm_bytes=180e9,
        hbm_bytes_per_s=7.7e12,
        nvlink_domain=8,
        host_bytes_per_s=64e9,
        **_BLACKWELL,
    ),
    "GB200": Gpu(
        name="GB200",
        table="gb200",
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        hbm_bytes=186e9,
        hbm_bytes_per_s=8.0e12,
        nvlink_domain=72,
        host_bytes_per_s=450e9,
        **_BLACKWELL,
    ),
}
"""Built-in GPUs by name."""

CONSTANTS = tuple(field.name for field in fields(Gpu) if field.name not in ("name", "table"))
"""Constants that a scenario may override."""


def find_gpu(name: str) -> Gpu:
    """The built-in GPU of that name; raises ConfigError naming the known ones."""
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"gpu must be one of {', '.join(GPUS)} or a mapping of constants, got {name!r}")
    return found


def override(base: Gpu, constants: dict[str, float]) -> Gpu:
    """`base` with constants replaced; raises ConfigError on an unknown one or one that no GPU can have."""
    for name, value in constants.items():
        if name not in CONSTANTS:
            raise ConfigError(f"gpu.{name} is not a constant of a GPU; known: {', '.join(CONSTANTS)}")
        if not math.isfinite(value):
            raise ConfigError(f"gpu.{name} must be a finite number, got {value}")
        if value <= 0:
            raise ConfigError(f"gpu.{name} must be > 0, got {value}")
        if name.endswith("_fraction") and value > 1:
            raise ConfigError(f"gpu.{name} is a share of the peak and must be <= 1, got {value}")
        if name == "nvlink_domain" and value != int(value):
            raise ConfigError(f"gpu.nvlink_domain must be a whole number of GPUs, got {value}")
    typed: dict[str, Any] = {
        name: int(value) if name == "nvlink_domain" else float(value) for name, value in constants.items()
    }
    return replace(base, **typed)
