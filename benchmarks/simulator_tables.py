"""Make the kernel tables that ship with the simulator from the PyPI package `aiconfigurator-core`.

Usage: ``python benchmarks/simulator_tables.py`` with aiconfigurator-core 0.12.0 and pyarrow installed. Reads the
package's parquet files (`leadout.sim.aic`; the package itself is never imported), keeps the operators, widths and row
counts the simulator needs, rounds times to 0.2 % steps of their logarithm (error at most 0.1 %) and writes
`src/leadout/sim/tables/kernels.npz`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from leadout.sim.aic import Selection, data_folder, read_tables
from leadout.sim.kernel_tables import QUANTUM_S, STEP, Floats

SELECTION = Selection(
    gemm_n=(
        *(512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384),
        *(51200, 65536),
    ),
    gemm_k=(512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384),
    gemm_m=(
        *range(1, 17),
        *(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048),
        *(2560, 3072, 3584, 4096, 8192, 16384, 32768),
    ),
    heads=(
        *((8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (16, 8), (32, 2), (32, 4), (32, 8), (40, 8), (64, 4), (64, 8)),
    ),
    moe_shapes=((4096, 1536), (2048, 768)),
)


def encode(seconds: Floats) -> npt.NDArray[np.uint16]:
    """Logarithmic 16-bit code; 0 marks a missing value."""
    present = np.isfinite(seconds)
    codes = np.rint(np.log(np.where(present, seconds, 1.0) / QUANTUM_S) / STEP)
    return np.where(present, np.maximum(codes, 1), 0).astype(np.uint16)


def main() -> None:
    """Write the file and print its size."""
    tables = read_tables(data_folder(), SELECTION)
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "systems": np.array(tables.systems),
        "gemm": encode(tables.gemm),
        "gemm_n": tables.gemm_n.astype(np.int64),
        "gemm_k": tables.gemm_k.astype(np.int64),
        "gemm_m": tables.gemm_m.astype(np.int64),
        "attention": encode(tables.attention),
        "attention_floor": encode(tables.attention_floor),
        "attention_heads": np.array(tables.heads),
        "attention_batch": tables.batches.astype(np.int64),
        "attention_kv": tables.kv_lens.astype(np.int64),
        "prefill": encode(tables.prefill),
        "prefill_isl": tables.prefill_lens.astype(np.int64),
        "moe": encode(np.array(list(tables.moe.values()))),
        "moe_key": np.array(list(tables.moe)),
        "moe_tokens": tables.moe_tokens.astype(np.int64),
        "comm": encode(np.array(list(tables.comm.values()))),
        "comm_key": np.array(list(tables.comm)),
        "comm_elements": tables.comm_elements.astype(np.int64),
    }
    target = Path(__file__).parent.parent / "src/leadout/sim/tables/kernels.npz"
    temporary = target.with_name("kernels.tmp.npz")
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(target)
    filled = {name: int((value > 0).sum()) for name, value in arrays.items() if value.dtype == np.uint16}
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB, values {filled}")


if __name__ == "__main__":
    main()
