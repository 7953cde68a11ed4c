"""Measured kernel times as arrays: the file that ships with the package, decoded once.

Times in seconds. NaN where the source has no row. Axes are spelled out in each field. Rows known to be wrong are not
in the file (`fp8_block` products, `fp8` expert layers on H100 and H200, `fp8` products of one row) and looking one up
raises, so that nobody adds them back unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from leadout.errors import ConfigError

Floats = npt.NDArray[np.float64]

STEP = float(np.log(1.002))
QUANTUM_S = 1e-7


class Served(StrEnum):
    """Which path gave a number, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    FITTED = "fitted"
    SCALED = "scaled"
    EXTRAPOLATED = "extrapolated"
    ROOFLINE = "roofline"
    ASSUMED = "assumed"
    CALIBRATED = "calibrated"


RANK = {served: i for i, served in enumerate(Served)}


def worst(*paths: Served) -> Served:
    """The least trustworthy of several paths."""
    return max(paths, key=RANK.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTables:
    """Kernel times in seconds, by operator."""

    systems: tuple[str, ...]
    dtypes: tuple[str, ...]
    gemm_n: Floats
    gemm_k: Floats
    gemm_m: Floats
    gemm: Floats
    """[system, dtype, n, k, m]"""
    heads: tuple[tuple[int, int], ...]
    """(query, key-value) heads on one GPU."""
    batches: Floats
    kv_lens: Floats
    attention: Floats
    """One layer of decode attention, one query per row: [system, kv dtype, heads, batch, kv_len]"""
    attention_floor: Floats
    """The same at 16 keys or fewer: [system, kv dtype, heads, batch]"""
    prefill_lens: Floats
    prefill: Floats
    """One layer of prefill attention, one prompt: [system, heads, prompt length]"""
    moe_tokens: Floats
    moe: dict[str, Floats]
    """One expert layer by "system|dtype|kernel|hidden|inter|tp|ep|distribution": [tokens]"""
    mla: dict[str, Floats]
    """One latent-attention layer with its projections by "system|kv dtype|heads": [batch, kv_len]; extra only"""
    comm_elements: Floats
    comm: dict[str, Floats]
    """One collective by "system|op|kernel|gpus": [elements of two bytes]"""

    def system(self, name: str) -> int:
        """Index of a system."""
        return self.systems.index(name)

    def dtype(self, name: str) -> int:
        """Index of a dtype; the excluded ones raise."""
        if name not in self.dtypes:
            raise ConfigError(f"no product table in {name!r}; known: {', '.join(self.dtypes)}")
        return self.dtypes.index(name)


def decode(codes: npt.NDArray[np.uint16]) -> Floats:
    """Seconds from 16-bit logarithmic codes; 0 is NaN."""
    seconds = QUANTUM_S * np.exp(codes.astype(np.float64) * STEP)
    return np.where(codes == 0, np.nan, seconds)


@cache
def shipped_tables() -> KernelTables:
    """The tables inside the package."""
    with (resources.files("leadout.sim") / "tables" / "kernels.npz").open("rb") as file, np.load(file) as data:
        moe, comm = decode(data["moe"]), decode(data["comm"])
        return KernelTables(
            systems=tuple(str(name) for name in data["systems"]),
            dtypes=("bfloat16", "fp8"),
            gemm_n=data["gemm_n"].astype(float),
            gemm_k=data["gemm_k"].astype(float),
            gemm_m=data["gemm_m"].astype(float),
            gemm=decode(data["gemm"]),
            heads=tuple((int(q), int(kv)) for q, kv in data["attention_heads"]),
            batches=data["attention_batch"].astype(float),
            kv_lens=data["attention_kv"].astype(float),
            attention=decode(data["attention"]),
            attention_floor=decode(data["attention_floor"]),
            prefill_lens=data["prefill_isl"].astype(float),
            prefill=decode(data["prefill"]),
            moe_tokens=data["moe_tokens"].astype(float),
            moe={str(key): moe[i] for i, key in enumerate(data["moe_key"])},
            mla={},
            comm_elements=data["comm_elements"].astype(float),
            comm={str(key): comm[i] for i, key in enumerate(data["comm_key"])},
        )
