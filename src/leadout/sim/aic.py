"""The full kernel tables of the optional package `aiconfigurator-core`.

The tables are parquet files found through `importlib.metadata`; the package itself is not imported for them.
Linux x86-64, Python below 3.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leadout.errors import ConfigError
from leadout.sim.kernel_tables import Floats, KernelTables

VERSION = "0.12.0"
SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200")
ENGINE = {"a100_sxm": "0.14.0"}
NCCL = {"a100_sxm": "2.27.3"}
DTYPES = ("bfloat16", "fp8")
HOPPER = ("h100_sxm", "h200_sxm")
LATENT_EXPERTS = (7168, 2048)
"""Widths of DeepSeek-V3's 256 experts."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Axis values to keep; None keeps all there are."""

    gemm_n: tuple[int, ...] | None = None
    gemm_k: tuple[int, ...] | None = None
    gemm_m: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    moe_shapes: tuple[tuple[int, int], ...] | None = None


def data_folder() -> Path:
    """The package's data folder; raises ConfigError when it is not installed in the version known."""
    try:
        distribution = metadata.distribution("aiconfigurator-core")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"tables: aic needs the package aiconfigurator-core {VERSION} (extra leadout[aic]); `shipped` does not"
        ) from None
    if distribution.version != VERSION:
        raise ConfigError(f"tables: aic needs aiconfigurator-core {VERSION}, found {distribution.version}")
    return Path(str(distribution.locate_file("aiconfigurator_core/systems/data")))


@cache
def full_tables() -> KernelTables:
    """Everything the package has for the operators the simulator knows."""
    return read_tables(data_folder(), Selection())


def read_tables(root: Path, selection: Selection) -> KernelTables:
    """Read the parquet files of all systems."""
    gemm, (ns, ks, ms) = _gemm(root, selection)
    attention = _attention(root, selection)
    moe, tokens = _moe(root, selection)
    mla = {} if selection.moe_shapes is not None else _mla(root)
    comm, elements = _comm(root)
    return KernelTables(
        systems=SYSTEMS,
        dtypes=DTYPES,
        gemm_n=ns,
        gemm_k=ks,
        gemm_m=ms,
        gemm=gemm,
        **attention,
        moe_tokens=tokens,
        moe=moe,
        mla=mla,
        comm_elements=elements,
        comm=comm,
    )


def _read(path: Path, where: Mapping[str, object] | None = None) -> Columns:
    """Columns of a parquet file, rows filtered by equality; latency in seconds."""
    table = import_module("pyarrow.parquet").read_table(path)
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "power"}
    keep = np.ones(len(columns["latency"]), dtype=bool)
    for name, value in (where or {}).items():
        if name in columns:
            keep &= columns[name] == value
    out = {name: values[keep] for name, values in columns.items()}
    out["latency"] = out["latency"].astype(float) * 1e-3
    return out


def _cube(values: Floats, keys: Sequence[npt.NDArray[Any]], axes: Sequence[Sequence[Any]]) -> Floats:
    """Median of `values` by axis position; NaN where there is none. Rows off the axes are dropped."""
    index = np.zeros(len(values), dtype=np.int64)
    valid = np.ones(len(values), dtype=bool)
    for key, axis in zip(keys, axes, strict=True):
        lookup = {value: i for i, value in enumerate(axis)}
        position = np.array([lookup.get(item, -1) for item in key.tolist()], dtype=np.int64)
        valid &= position >= 0
        index = index * len(axis) + position
    index, values = index[valid], values[valid]
    out = np.full(int(np.prod([len(axis) for axis in axes])), np.nan)
    order = np.argsort(index, kind="stable")
    unique, start = np.unique(index[order], return_index=True)
    for cell, group in zip(unique, np.split(values[order], start[1:]), strict=True):
        out[cell] = np.median(group)
    return out.reshape([len(axis) for axis in axes])


def engine_version(system: str) -> str:
    """vLLM's version in the tables of a system."""
    return ENGINE.get(system, "0.24.0")


def _gemm(root: Path, selection: Selection) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    frames = {s: _read(root / s / "gemm/vllm" / engine_version(s) / "gemm_perf.parquet") for s in SYSTEMS}
    axes = []
    for name, chosen in (("n", selection.gemm_n), ("k", selection.gemm_k), ("m", selection.gemm_m)):
        every = sorted({int(v) for frame in frames.values() for v in np.unique(frame[name])})
        axes.append(list(chosen) if chosen is not None else every)
    out = np.full((len(SYSTEMS), len(DTYPES), *(len(axis) for axis in axes)), np.nan)
    for i, system in enumerate(SYSTEMS):
        frame = frames[system]
        for j, dtype in enumerate(DTYPES):
            mine = frame["gemm_dtype"] == dtype
            if mine.any():
                out[i, j] = _cube(frame["latency"][mine], [frame[name][mine] for name in "nkm"], axes)
    # One row in fp8 runs another code path, 2.75 times two rows on Blackwell.
    out[:, DTYPES.index("fp8"), :, :, [m == 1 for m in axes[2]]] = np.nan
    n, k, m = (np.array(axis, dtype=float) for axis in axes)
    return out, (n, k, m)


def _attention(root: Path, selection: Selection) -> dict[str, Any]:
    folders = {s: root / s / "attention/vllm" / engine_version(s) for s in SYSTEMS}
    where = {"head_dim": 128, "window_size": 0}
    decode = {s: _read(f / "generation_attention_perf.parquet", where) for s, f in folders.items()}
    context = {s: _read(f / "context_attention_perf.parquet", {**where, "batch_size": 1}) for s, f in folders.items()}
    every = {
        pair
        for frame in decode.values()
        for pair in zip(frame["num_heads"].tolist(), frame["num_key_value_heads"].tolist(), strict=True)
    }
    heads = selection.heads or tuple(sorted(every))
    batches = tuple(2**i for i in range(12))
    kv_lens = tuple(2**i for i in range(1, 18))
    prompts = sorted({int(v) for frame in context.values() for v in np.unique(frame["isl"]) if v >= 16})
    rows = np.full((len(SYSTEMS), len(DTYPES), len(heads), len(batches), len(kv_lens)), np.nan)
    prefill = np.full((len(SYSTEMS), len(heads), len(prompts)), np.nan)
    for i, system in enumerate(SYSTEMS):
        frame = decode[system]
        for j, dtype in enumerate(DTYPES):
            mine = frame["kv_cache_dtype"] == dtype
            keys = [_pairs(frame, mine), frame["batch_size"][mine], (frame["isl"] + frame["step"])[mine]]
            if mine.any():
                rows[i, j] = _cube(frame["latency"][mine], keys, [heads, batches, kv_lens])
        frame = context[system]
        mine = frame["kv_cache_dtype"] == "bfloat16"
        prefill[i] = _cube(frame["latency"][mine], [_pairs(frame, mine), frame["isl"][mine]], [heads, prompts])
    short = [k for k, length in enumerate(kv_lens) if length <= 16]
    floor = np.min(np.where(np.isfinite(rows[..., short]), rows[..., short], np.inf), axis=-1)
    return {
        "heads": tuple((int(q), int(kv)) for q, kv in heads),
        "batches": np.array(batches, dtype=float),
        "kv_lens": np.array(kv_lens, dtype=float),
        "attention": rows,
        "attention_floor": np.where(np.isfinite(floor), floor, np.nan),
        "prefill_lens": np.array(prompts, dtype=float),
        "prefill": prefill,
    }


def _pairs(frame: Columns, mine: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    pairs = np.empty(int(mine.sum()), dtype=object)
    pairs[:] = list(zip(frame["num_heads"][mine].tolist(), frame["num_key_value_heads"][mine].tolist(), strict=True))
    return pairs


def _moe(root: Path, selection: Selection) -> tuple[dict[str, Floats], Floats]:
    wanted = ("moe_dtype", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size", "distribution")
    found: dict[str, dict[int, list[float]]] = {}
    for system in SYSTEMS:
        versions = [(engine_version(system), "default")] + ([("0.22.0", "triton")] if system == "b200_sxm" else [])
        for version, kernel in versions:
            path = root / system / "moe/vllm" / version / "moe_perf.parquet"
            frame = _read(path, {"topk": 8})
            names = (*wanted, "num_tokens", "latency", "num_experts")
            for row in zip(*(frame[name].tolist() for name in names), strict=True):
                dtype, hidden, inter, tp, ep, distribution, tokens, latency, experts = row
                if experts != (256 if (hidden, inter) == LATENT_EXPERTS else 128):
                    continue
                if dtype not in (*DTYPES, "fp8_block") or distribution not in ("balanced", "power_law_1.2"):
                    continue
                if selection.moe_shapes is not None and (hidden, inter) not in selection.moe_shapes:
                    continue
                if system in HOPPER and dtype == "fp8":  # the per-tensor CUTLASS kernel, not the one that serves
                    continue
                key = f"{system}|{dtype}|{kernel}|{hidden}|{inter}|{tp}|{ep}|{distribution}"
                found.setdefault(key, {}).setdefault(int(tokens), []).append(float(latency))
    axis = sorted({tokens for rows in found.values() for tokens in rows})
    curves = {
        key: np.array([float(np.median(rows[t])) if t in rows else np.nan for t in axis]) for key, rows in found.items()
    }
    return dict(sorted(curves.items())), np.array(axis, dtype=float)


def _mla(root: Path) -> dict[str, Floats]:
    """Latent attention of DeepSeek-V3, bf16 projections, one layer: a row of kv_lens by batches each."""
    batches, kv_lens = [2**i for i in range(12)], [2**i + 1 for i in range(1, 18)]
    out: dict[str, Floats] = {}
    for system in SYSTEMS:
        path = root / system / "mla/vllm" / engine_version(system) / "mla_generation_module_perf.parquet"
        if not path.is_file():
            continue
        frame = _read(path, {"gemm_type": "bfloat16", "mla_dtype": "bfloat16"})
        for dtype in DTYPES:
            for heads in np.unique(frame["num_heads"]).tolist():
                mine = (frame["kv_cache_dtype"] == dtype) & (frame["num_heads"] == heads)
                keys = [frame["batch_size"][mine], (frame["isl"] + frame["step"])[mine]]
                out[f"{system}|{dtype}|{heads}"] = _cube(frame["latency"][mine], keys, [batches, kv_lens])
    return out


def _comm(root: Path) -> tuple[dict[str, Floats], Floats]:
    found: dict[str, dict[int, list[float]]] = {}
    for system in SYSTEMS:
        custom = _read(root / system / "comm/vllm" / engine_version(system) / "custom_allreduce_perf.parquet")
        nccl = _read(
            root / system / "comm/nccl" / NCCL.get(system, "2.29.2") / "nccl_perf.parquet", {"nccl_dtype": "half"}
        )
        for frame, own in ((custom, True), (nccl, False)):
            names = ("op_name", "kernel_source", "num_gpus", "message_size", "latency")
            for op, source, gpus, size, latency in zip(*(frame[name].tolist() for name in names), strict=True):
                if op in COLLECTIVES and gpus > 1:
                    kernel = source.removeprefix("vLLM_custom_") if own else "nccl"
                    key = f"{system}|{op}|{kernel}|{gpus}"
                    found.setdefault(key, {}).setdefault(int(size), []).append(float(latency))
    axis = [2**i for i in range(7, 30)]
    curves = {
        key: np.array([float(np.median(rows[s])) if s in rows else np.nan for s in axis]) for key, rows in found.items()
    }
    return dict(sorted(curves.items())), np.array(axis, dtype=float)
