"""Make the kernel tables that ship with the simulator from the PyPI package `aiconfigurator-core`.

Usage: ``python benchmarks/simulator_tables.py`` with aiconfigurator-core 0.12.0 and pyarrow installed. Reads the
package's parquet files through `importlib.metadata` (the package itself is never imported), keeps the operators, widths
and row counts the simulator needs, rounds times to 0.1 % steps of their logarithm (error at most 0.1 %) and writes
`src/leadout/sim/tables/kernels.npz`.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.parquet as pq

VERSION = "0.12.0"
QUANTUM_MS = 1e-4
STEP = np.log(1.002)

SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200")
ENGINE = {"a100_sxm": "0.14.0"}
NCCL = {"a100_sxm": "2.27.3"}
GEMM_N = (
    512,
    768,
    1024,
    1536,
    2048,
    2560,
    3072,
    3584,
    4096,
    5120,
    6144,
    7168,
    8192,
    10240,
    12288,
    16384,
    51200,
    65536,
)
GEMM_K = (512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
GEMM_M = (
    *range(1, 17),
    *(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 3584, 4096, 8192, 16384, 32768),
)
HEADS = ((8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (16, 8), (32, 2), (32, 4), (32, 8), (40, 8), (64, 4), (64, 8))
MOE_SHAPES = ((4096, 1536), (2048, 768))
HOPPER = ("h100_sxm", "h200_sxm")

Codes = npt.NDArray[np.uint16]


def data_folder() -> Path:
    """The package's data folder."""
    distribution = metadata.distribution("aiconfigurator-core")
    if distribution.version != VERSION:
        raise SystemExit(f"expected aiconfigurator-core {VERSION}, got {distribution.version}")
    return Path(str(distribution.locate_file("aiconfigurator_core/systems/data")))


def read(path: Path) -> pd.DataFrame:
    """A parquet file as a frame."""
    return pq.read_table(path).to_pandas()


def encode(milliseconds: npt.NDArray[np.float64]) -> Codes:
    """Logarithmic 16-bit code; 0 marks a missing value."""
    codes = np.rint(np.log(np.maximum(milliseconds, QUANTUM_MS * 1.01) / QUANTUM_MS) / STEP)
    return np.where(np.isfinite(milliseconds), np.maximum(codes, 1), 0).astype(np.uint16)


def cube(frame: pd.DataFrame, axes: list[tuple[str, tuple[object, ...]]]) -> npt.NDArray[np.float64]:
    """Median latency by axis values, NaN where there is no row. Composite axes are tuples of columns joined by '/'."""
    columns = []
    for name, values in axes:
        parts = name.split("/")
        lookup = {value: i for i, value in enumerate(values)}
        keys = frame[parts[0]] if len(parts) == 1 else list(zip(*(frame[part] for part in parts), strict=True))
        columns.append(pd.Series([lookup.get(key, -1) for key in keys]))
    index = pd.concat(columns, axis=1)
    index.columns = range(len(axes))
    index["latency"] = frame["latency"].to_numpy()
    index = index[(index[list(range(len(axes)))] >= 0).all(axis=1)]
    medians = index.groupby(list(range(len(axes))))["latency"].median()
    out = np.full([len(values) for _, values in axes], np.nan)
    out[tuple(np.array(list(medians.index)).T)] = medians.to_numpy()
    return out


def gemm(root: Path) -> dict[str, npt.NDArray[np.generic]]:
    """GEMM times [system, dtype, n, k, m]."""
    out = np.full((len(SYSTEMS), 2, len(GEMM_N), len(GEMM_K), len(GEMM_M)), np.nan)
    for s, system in enumerate(SYSTEMS):
        frame = read(root / system / "gemm/vllm" / ENGINE.get(system, "0.24.0") / "gemm_perf.parquet")
        for d, dtype in enumerate(("bfloat16", "fp8")):
            rows = frame[frame.gemm_dtype == dtype].reset_index(drop=True)
            if len(rows):
                out[s, d] = cube(rows, [("n", GEMM_N), ("k", GEMM_K), ("m", GEMM_M)])
    out[:, 1, :, :, 0] = np.nan  # fp8 at one row runs another code path, 2.75x the time of two rows on Blackwell
    return {
        "gemm": encode(out),
        "gemm_n": np.array(GEMM_N),
        "gemm_k": np.array(GEMM_K),
        "gemm_m": np.array(GEMM_M),
    }


BATCHES = tuple(2**i for i in range(12))
KV_LENS = tuple(2**i for i in range(1, 18))
PREFILL = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)


def attention(root: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Decode attention [system, kv dtype, heads, batch, kv_len] and prefill attention at batch 1 [system, heads, isl]."""
    decode = np.full((len(SYSTEMS), 2, len(HEADS), len(BATCHES), len(KV_LENS)), np.nan)
    floor = np.full((len(SYSTEMS), 2, len(HEADS), len(BATCHES)), np.nan)
    prefill = np.full((len(SYSTEMS), len(HEADS), len(PREFILL)), np.nan)
    for s, system in enumerate(SYSTEMS):
        folder = root / system / "attention/vllm" / ENGINE.get(system, "0.24.0")
        for name in ("generation", "context"):
            frame = read(folder / f"{name}_attention_perf.parquet")
            frame = frame[frame.head_dim == 128]
            if "window_size" in frame:
                frame = frame[frame.window_size == 0]
            frame = frame.assign(kv_len=frame.isl + (frame.step if name == "generation" else 0)).reset_index(drop=True)
            for d, dtype in enumerate(("bfloat16", "fp8")):
                rows = frame[frame.kv_cache_dtype == dtype].reset_index(drop=True)
                if not len(rows):
                    continue
                if name == "context" and d == 0:
                    rows = rows[rows.batch_size == 1].reset_index(drop=True)
                    prefill[s] = cube(rows, [("num_heads/num_key_value_heads", HEADS), ("isl", PREFILL)])
                elif name == "generation":
                    axes = [("num_heads/num_key_value_heads", HEADS), ("batch_size", BATCHES), ("kv_len", KV_LENS)]
                    decode[s, d] = cube(rows, axes)  # type: ignore[arg-type]
                    short = rows[rows.kv_len <= 16].reset_index(drop=True)
                    floor[s, d] = np.nanmin(
                        cube(short, [*axes[:2], ("kv_len", (2, 4, 8, 16))]),  # type: ignore[list-item]
                        axis=-1,
                    )
    return {
        "attention": encode(decode),
        "attention_floor": encode(floor),
        "attention_heads": np.array(HEADS),
        "attention_batch": np.array(BATCHES),
        "attention_kv": np.array(KV_LENS),
        "prefill": encode(prefill),
        "prefill_isl": np.array(PREFILL),
    }


TOKENS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    *(6144, 8192, 12288, 16384, 20480, 32768, 65536),
)


def moe(root: Path) -> dict[str, npt.NDArray[np.generic]]:
    """MoE layer times, one row of `moe_key` (system, dtype, kernel, hidden, inter, tp, ep, distribution) each."""
    keys: list[str] = []
    rows: list[npt.NDArray[np.float64]] = []
    wanted = ["system", "moe_dtype", "family", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size", "distribution"]
    for system in SYSTEMS:
        versions = [(ENGINE.get(system, "0.24.0"), "default")] + ([("0.22.0", "triton")] if system == "b200_sxm" else [])
        for version, family in versions:
            frame = read(root / system / "moe/vllm" / version / "moe_perf.parquet").assign(system=system, family=family)
            frame = frame[(frame.num_experts == 128) & (frame.topk == 8)]
            frame = frame[frame.moe_dtype.isin(["bfloat16", "fp8", "fp8_block"])]
            frame = frame[frame.distribution.isin(["balanced", "power_law_1.2"])]
            if system in HOPPER:
                frame = frame[frame.moe_dtype != "fp8"]  # the per-tensor CUTLASS kernel, not the one that serves
            shapes = [tuple(shape) in MOE_SHAPES for shape in frame[["hidden_size", "inter_size"]].to_numpy()]
            for key, group in frame[shapes].groupby(wanted):
                medians = group.groupby("num_tokens")["latency"].median()
                keys.append("|".join(str(part) for part in key))
                rows.append(np.array([medians.get(tokens, np.nan) for tokens in TOKENS]))
    return {"moe": encode(np.array(rows)), "moe_key": np.array(keys), "moe_tokens": np.array(TOKENS)}


ELEMENTS = tuple(2**i for i in range(7, 30))


def communication(root: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Collective times, one row of `comm_key` (system, op, kernel, GPUs) each, by elements of two bytes."""
    keys: list[str] = []
    rows: list[npt.NDArray[np.float64]] = []
    for system in SYSTEMS:
        custom = read(root / system / "comm/vllm" / ENGINE.get(system, "0.24.0") / "custom_allreduce_perf.parquet")
        nccl = read(root / system / "comm/nccl" / NCCL.get(system, "2.29.2") / "nccl_perf.parquet")
        nccl = nccl[nccl.nccl_dtype == "half"].assign(kernel_source="nccl")
        frame = pd.concat([custom, nccl])
        for (op, kernel, gpus), group in frame.groupby(["op_name", "kernel_source", "num_gpus"]):
            if op not in ("all_reduce", "all_gather", "reduce_scatter", "alltoall") or gpus < 2:
                continue
            medians = group.groupby("message_size")["latency"].median()
            keys.append("|".join((system, op, kernel.removeprefix("vLLM_custom_"), str(gpus))))
            rows.append(np.array([medians.get(size, np.nan) for size in ELEMENTS]))
    return {"comm": encode(np.array(rows)), "comm_key": np.array(keys), "comm_elements": np.array(ELEMENTS)}


def main() -> None:
    """Write the file and print its size."""
    root = data_folder()
    arrays = {**gemm(root), **attention(root), **moe(root), **communication(root)}
    arrays["systems"] = np.array(SYSTEMS)
    target = Path(__file__).parent.parent / "src/leadout/sim/tables/kernels.npz"
    temporary = target.with_name("kernels.tmp.npz")
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(target)
    filled = {name: int((value > 0).sum()) for name, value in arrays.items() if value.dtype == np.uint16}
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB, values {filled}")


if __name__ == "__main__":
    main()
