"""Kernel tables: excluded rows stay out, and measured rows are predicted when they are left out."""

from __future__ import annotations

import sys
from importlib import resources

import numpy as np
import pytest

from leadout.errors import CapacityError, ConfigError
from leadout.sim.attention import COLD, decode_attention
from leadout.sim.experts import expert_curve, table_key
from leadout.sim.gemm import GemmModel
from leadout.sim.hardware import DTYPE_BYTES, GPUS, override
from leadout.sim.kernel_tables import Served, shipped_tables
from leadout.sim.shapes import MODELS
from leadout.sim.validation import Errors, attention_rows, curve_rows, gemm_rows, gemm_shapes

TABLES = shipped_tables()
MOE = MODELS["Qwen3-235B-A22B"]


def report(errors: Errors) -> None:
    sys.stdout.write(
        f"{errors.name}: median {errors.median:.3f} p90 {errors.p90:.3f} worst {errors.worst:.2f} n {errors.n}\n"
    )


def test_product_rows_left_out_are_predicted():
    *each, pooled = gemm_rows(TABLES)
    for errors in (*each, pooled):
        report(errors)
    assert pooled.median < 0.05 and pooled.p90 < 0.18
    assert max(errors.median for errors in each) < 0.08


def test_product_shapes_left_out_are_predicted():
    errors = gemm_shapes(TABLES)
    report(errors)
    assert errors.median < 0.06 and errors.p90 < 0.18


def test_attention_rows_left_out_are_predicted():
    every, cold = attention_rows(TABLES)
    report(every)
    report(cold)
    assert every.median < 0.03
    assert cold.median < 0.02 and cold.p90 < 0.08


def test_expert_and_all_reduce_rows_left_out_are_predicted():
    experts, reduce = curve_rows(TABLES)
    report(experts)
    report(reduce)
    assert experts.median < 0.03
    assert reduce.median < 0.04


def test_tables_are_small_and_carry_their_notice():
    folder = resources.files("leadout.sim") / "tables"
    assert len((folder / "kernels.npz").read_bytes()) < 300_000
    notice = (folder / "NOTICE").read_text()
    assert all(word in notice for word in ("aiconfigurator-core 0.12.0", "Apache-2.0", "Modified"))


def test_block_fp8_products_cannot_be_looked_up():
    with pytest.raises(ConfigError, match="fp8_block"):
        GemmModel(gpu=GPUS["GB200"], dtype="fp8_block", tables=TABLES).curve(4096, 4096)


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_fp8_expert_rows_of_hopper_are_never_used(name):
    system = str(GPUS[name].table)
    assert not [key for key in TABLES.moe if key.startswith(f"{system}|fp8|")]
    with pytest.raises(ConfigError, match="wrong kernel"):
        table_key(system, "fp8", "default", MOE, 4, 1, "balanced")
    curve = expert_curve(GPUS[name], TABLES, "fp8", MOE, tp=4, ep=1, routing="balanced")
    block = TABLES.moe[table_key(system, "fp8_block", "default", MOE, 4, 1, "balanced")]
    at_64 = block[list(TABLES.moe_tokens).index(64)]
    assert float(curve.at(np.array([64.0]))[0]) == pytest.approx(at_64, rel=1e-12)


def test_fp8_products_of_one_row_are_not_in_the_table():
    dtype, one = TABLES.dtype("fp8"), list(TABLES.gemm_m).index(1)
    assert np.isnan(TABLES.gemm[:, dtype, :, :, one]).all()
    curve = GemmModel(gpu=GPUS["GB200"], dtype="fp8", tables=TABLES).curve(4096, 4096)
    assert float(curve.at(np.array([1.0]))[0]) == float(curve.at(np.array([2.0]))[0])


def test_warm_attention_rows_are_replaced_by_the_line_fitted_above_l2():
    gpu = GPUS["GB200"]
    model = decode_attention(gpu, TABLES, 32, 8, 128, "bfloat16")
    rows = TABLES.attention[TABLES.system("gb200"), 0, TABLES.heads.index((32, 8))]
    read = TABLES.batches[:, None] * TABLES.kv_lens * 8 * 128 * 2 * DTYPE_BYTES["bfloat16"]
    warm = read < COLD * gpu.l2_bytes
    assert bool((model.warm[warm] == 1).all())
    four, context = list(TABLES.batches).index(4), list(TABLES.kv_lens).index(4096)
    assert model.path(4, 4096) is Served.FITTED
    assert model.seconds[four, context] > 1.3 * rows[four, context]


def test_cold_attention_rows_are_used_as_measured():
    model = decode_attention(GPUS["H100"], TABLES, 32, 8, 128, "bfloat16")
    rows = TABLES.attention[TABLES.system("h100_sxm"), 0, TABLES.heads.index((32, 8))]
    batch, context = list(TABLES.batches).index(64), list(TABLES.kv_lens).index(8192)
    assert model.at(64, 8192) == pytest.approx(rows[batch, context], rel=1e-12)


def test_unmeasured_widths_are_interpolated_and_measured_ones_say_so():
    products = GemmModel(gpu=GPUS["GB200"], dtype="bfloat16", tables=TABLES)
    wide = products.curve(24576, 4096)
    assert wide.path(64) is Served.INTERPOLATED
    assert float(wide.at(np.array([64.0]))[0]) == pytest.approx(32.5e-6, rel=0.08)
    assert products.curve(12288, 4096).path(64) is Served.MEASURED
    assert products.curve(12288, 4096).path(70) is Served.INTERPOLATED


def test_beyond_the_grid_time_follows_the_roofline_and_is_marked():
    curve = GemmModel(gpu=GPUS["H100"], dtype="bfloat16", tables=TABLES).curve(4096, 4096)
    last = float(curve.at(np.array([32768.0]))[0])
    assert float(curve.at(np.array([65536.0]))[0]) == pytest.approx(2 * last, rel=1e-9)
    assert curve.path(65536) is Served.EXTRAPOLATED


def test_over_four_times_the_grid_is_refused():
    curve = GemmModel(gpu=GPUS["H100"], dtype="bfloat16", tables=TABLES).curve(4096, 4096)
    with pytest.raises(CapacityError, match="last measured row"):
        curve.at(np.array([140000.0]))


def test_an_overridden_constant_scales_the_operators_it_bounds():
    faster = override(GPUS["H100"], {"hbm_bytes_per_s": 6.7e12, "kernel_floor_s": 1e-12})
    curve = GemmModel(gpu=faster, dtype="bfloat16", tables=TABLES).curve(4096, 4096)
    base = GemmModel(gpu=GPUS["H100"], dtype="bfloat16", tables=TABLES).curve(4096, 4096)
    assert curve.path(1) is Served.SCALED
    small = float(curve.at(np.array([1.0]))[0]) / float(base.at(np.array([1.0]))[0])
    large = float(curve.at(np.array([16384.0]))[0]) / float(base.at(np.array([16384.0]))[0])
    assert small < 0.5
    assert large == pytest.approx(1.0, abs=0.02)


def test_an_excluded_shape_falls_back_to_its_nearest_split():
    curve = expert_curve(GPUS["H100"], TABLES, "fp8", MOE, tp=8, ep=1, routing="power_law_1.2")
    half = expert_curve(GPUS["H100"], TABLES, "fp8", MOE, tp=4, ep=1, routing="power_law_1.2")
    assert curve.served is Served.SCALED
    assert 0.4 < float(curve.at(np.array([256.0]))[0]) / float(half.at(np.array([256.0]))[0]) < 1.0


@pytest.mark.parametrize(
    ("tokens", "microseconds"), [(1, 20), (4, 54), (16, 90), (64, 168), (256, 221), (1024, 261), (4096, 462)]
)
def test_expert_layer_of_the_235b_on_gb200_matches_the_published_row(tokens, microseconds):
    curve = expert_curve(GPUS["GB200"], TABLES, "bfloat16", MOE, tp=4, ep=1, routing="power_law_1.2")
    assert float(curve.at(np.array([float(tokens)]))[0]) == pytest.approx(microseconds * 1e-6, rel=0.03)
