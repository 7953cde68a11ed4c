"""Gates against measurements: the kernel tables left out row by row, published inter-token and serving times.

Everything here recomputes its figures; documents and tests print what these functions return.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leadout.sim.attention import COLD
from leadout.sim.engine import EngineTerms
from leadout.sim.forward import Layout
from leadout.sim.gemm import GemmModel
from leadout.sim.hardware import DTYPE_BYTES, GPUS, Gpu
from leadout.sim.kernel_tables import Floats, KernelTables, shipped_tables
from leadout.sim.shapes import find_model
from leadout.sim.step_model import StepModel, build_step_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute relative errors of one family of predictions."""

    name: str
    median: float
    p90: float
    worst: float
    n: int


def errors_of(name: str, values: Floats) -> Errors:
    """Summary of absolute relative errors."""
    size = np.abs(values)
    return Errors(
        name=name,
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        worst=float(size.max()),
        n=len(size),
    )


def left_out(grid: Floats, row: Floats, *, logarithmic: bool) -> Iterator[tuple[float, float]]:
    """(grid value, relative error) of every inner point predicted from its two neighbours."""
    present = np.flatnonzero(np.isfinite(row))
    for before, here, after in zip(present, present[1:], present[2:], strict=False):
        x0, x, x1 = (np.log(grid[i]) if logarithmic else grid[i] for i in (before, here, after))
        y0, y1 = (np.log(row[i]) if logarithmic else row[i] for i in (before, after))
        value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        yield float(grid[here]), float((np.exp(value) if logarithmic else value) / row[here] - 1.0)


def gemm_rows(tables: KernelTables) -> list[Errors]:
    """One row count left out, 16 <= m <= 1024: each (GPU, dtype), then pooled."""
    out, pooled = [], []
    for gpu, dtype, rows in _gemm(tables):
        found = [
            error
            for row in rows.reshape(-1, rows.shape[-1])
            for m, error in left_out(tables.gemm_m, row, logarithmic=True)
            if 16 <= m <= 1024
        ]
        out.append(errors_of(f"product rows, {gpu.name} {dtype}", np.array(found)))
        pooled += found
    return [*out, errors_of("product rows, pooled", np.array(pooled))]


def gemm_shapes(tables: KernelTables) -> Errors:
    """A whole (n, k) left out and predicted by utilisation."""
    found: list[Floats] = []
    for gpu, dtype, rows in _gemm(tables):
        for i, n in enumerate(tables.gemm_n):
            for j, k in enumerate(tables.gemm_k):
                present = np.isfinite(rows[i, j])
                if present.any():
                    model = GemmModel(gpu=gpu, dtype=dtype, tables=tables, exclude=(int(n), int(k)))
                    guess = model.curve(int(n), int(k)).at(tables.gemm_m[present])
                    found.append(guess / rows[i, j][present] - 1.0)
    return errors_of("product shapes", np.concatenate(found))


def _gemm(tables: KernelTables) -> Iterator[tuple[Gpu, str, Floats]]:
    for gpu in GPUS.values():
        for dtype in tables.dtypes:
            rows = tables.gemm[tables.system(str(gpu.table)), tables.dtype(dtype)]
            if np.isfinite(rows).any():
                yield gpu, dtype, rows


def attention_rows(tables: KernelTables) -> tuple[Errors, Errors]:
    """One context length left out: over all rows, and where the cache read exceeds twice L2."""
    every, cold = [], []
    for gpu in GPUS.values():
        for dtype in tables.dtypes:
            cube = tables.attention[tables.system(str(gpu.table)), tables.dtype(dtype)]
            for (_, kv_heads), plane in zip(tables.heads, cube, strict=True):
                width = 2.0 * kv_heads * 128 * DTYPE_BYTES[dtype]
                for batch, row in zip(tables.batches, plane, strict=True):
                    for context, error in left_out(tables.kv_lens, row, logarithmic=False):
                        every.append(error)
                        if batch * context * width > COLD * gpu.l2_bytes:
                            cold.append(error)
    return (
        errors_of("decode attention, all rows", np.array(every)),
        errors_of("decode attention, beyond twice L2", np.array(cold)),
    )


def curve_rows(tables: KernelTables) -> tuple[Errors, Errors]:
    """One token count left out of the expert rows, one size left out of the all-reduce rows."""
    experts = [e for row in tables.moe.values() for _, e in left_out(tables.moe_tokens, row, logarithmic=True)]
    reduce = [
        error
        for key, row in tables.comm.items()
        if "|all_reduce|" in key
        for _, error in left_out(tables.comm_elements, row, logarithmic=True)
    ]
    return errors_of("expert layers", np.array(experts)), errors_of("all-reduce", np.array(reduce))


def kernel_gates(tables: KernelTables | None = None) -> list[Errors]:
    """All kernel gates, in the order of the documentation."""
    tables = tables or shipped_tables()
    return [*gemm_rows(tables), gemm_shapes(tables), *attention_rows(tables), *curve_rows(tables)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published number beside ours."""

    name: str
    measured: float
    predicted: float
    kernels: float | None = None
    """The same without host time."""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1.0


INTER_TOKEN = {
    "Qwen3-8B": (8113.0, 0.52, {8: 9.70, 16: 11.9, 32: 16.9, 64: 26.6, 82: 27.9}),
    "Qwen3-14B": (7059.0, 0.55, {8: 14.4, 16: 17.3, 32: 21.6, 59: 28.1}),
}
"""Median inter-token milliseconds on one H100, vLLM, thinking on GPQA (ML.ENERGY): mean length, CV, by batch."""


def inter_token_points() -> list[Point]:
    """Nine H100 points. Host 1.0 ms + 0.01 ms a row was read off these very points."""
    out = []
    for name, (mean, cv, points) in INTER_TOKEN.items():
        model = step_model(name, "H100", "bfloat16", engine=EngineTerms(host_s=1.0e-3, host_per_layer_s=0.0))
        context = 250.0 + mean * (1.0 + cv**2) / 2.0
        table = model.table(0, 128)
        for batch, milliseconds in points.items():
            seconds = float(table.at(np.array([batch]), np.array([context]))[0])
            host = float(model.engine.host(model.policy.shape.layers, np.array([float(batch)]))[0])
            out.append(
                Point(
                    name=f"{name}, batch {batch}",
                    measured=milliseconds,
                    predicted=seconds * 1e3,
                    kernels=(seconds - host) * 1e3,
                )
            )
    return out


def step_model(
    name: str,
    gpu: str,
    dtype: str,
    *,
    tp: int = 1,
    ep: int = 1,
    kv: str = "bfloat16",
    engine: EngineTerms | None = None,
) -> StepModel:
    """A replica of a built-in model on measured kernels."""
    layout = Layout(
        gpu=GPUS[gpu],
        tables=shipped_tables(),
        tensor_parallel=tp,
        expert_parallel=ep,
        dtype=dtype,
        kv_dtype=kv,
    )
    return build_step_model(find_model(name), layout, engine or EngineTerms(max_num_seqs=1024))


SYSTEM_GPU = {gpu.table: gpu.name for gpu in GPUS.values()}


def serving_points(path: Path) -> list[Point]:
    """Serving rows: TPOT = t_dec(B, ISL + OSL / 2) + B / OSL x t_prefill(ISL), host included; FP4 rows are left out."""
    models: dict[tuple[object, ...], StepModel] = {}
    out = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        quant = row.get("gemm_quant_mode")
        if quant == "nvfp4" or not row.get("silicon_tpot_ms"):
            continue
        point = _serving(row, "fp8" if quant else "bfloat16", models)
        if point is not None:
            out.append(point)
    return out


def _serving(row: Mapping[str, object], dtype: str, models: dict[tuple[object, ...], StepModel]) -> Point | None:
    number = {key: float(str(row[key])) for key in ("tp_size", "batch_size", "isl", "osl", "silicon_tpot_ms")}
    name = str(row["model_path"]).split("/")[-1].removesuffix("-Instruct").removesuffix("-Instruct-FP8")
    name = name.removesuffix("-FP8")
    shape, tp = find_model(name), int(number["tp_size"])
    ep = int(float(str(row.get("moe_ep_size") or 1))) if shape.is_moe else 1
    ep = ep if ep in (1, tp) else 1
    key = (name, row["system"], dtype, tp, ep)
    if key not in models:
        models[key] = step_model(name, SYSTEM_GPU[str(row["system"])], dtype, tp=tp, ep=max(ep, 1))
    model, batch = models[key], int(number["batch_size"])
    if batch < 1 or number["osl"] < 2:
        return None
    context = number["isl"] + number["osl"] / 2.0
    decode = float(model.table(0, batch).at(np.array([batch]), np.array([context]))[0])
    prefill = batch / number["osl"] * model.prefill_seconds(1, number["isl"])
    return Point(
        name=f"{name} {SYSTEM_GPU[str(row['system'])]} {row['backend']} {dtype} TP{tp} EP{ep} "
        f"{number['isl']:.0f}/{number['osl']:.0f} batch {batch}",
        measured=number["silicon_tpot_ms"],
        predicted=(decode + prefill) * 1e3,
    )
