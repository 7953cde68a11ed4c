"""The full tables of the optional package hold the shipped ones."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest

from leadout.sim.kernel_tables import shipped_tables
from leadout.sim.project import project
from tests.sim.scenarios import small


def installed() -> bool:
    try:
        return metadata.version("aiconfigurator-core") == "0.12.0"
    except metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not installed(), reason="aiconfigurator-core 0.12.0 is not installed")


def test_shipped_values_are_the_packages_rounded_by_at_most_0_2_percent():
    from leadout.sim.aic import full_tables

    ours, full = shipped_tables(), full_tables()
    for i, n in enumerate(ours.gemm_n):
        for j, k in enumerate(ours.gemm_k):
            at = list(full.gemm_n).index(n), list(full.gemm_k).index(k)
            rows = full.gemm[:, :, at[0], at[1]][:, :, [list(full.gemm_m).index(m) for m in ours.gemm_m]]
            assert np.array_equal(np.isfinite(rows), np.isfinite(ours.gemm[:, :, i, j]))
            assert float(np.nanmax(np.abs(ours.gemm[:, :, i, j] / rows - 1.0), initial=0.0)) < 0.002
    for key, row in ours.moe.items():
        assert float(np.nanmax(np.abs(row / full.moe[key][np.isin(full.moe_tokens, ours.moe_tokens)] - 1))) < 0.002


def test_the_full_grids_give_nearly_the_same_step():
    shipped, full = project(small()).step_s, project(small("tables=aic")).step_s
    assert full == pytest.approx(shipped, rel=0.03)


def test_latent_attention_and_256_experts_come_with_the_full_tables():
    words = ("model=DeepSeek-V3", "gpu=H200", "gpus=128", "generation.tensor_parallel=16", "precision.weights=fp8")
    parts = {part.name: part.served.value for part in project(small(*words, "tables=aic")).breakdown}
    assert "kv_b" not in parts
    assert parts["experts"] in ("measured", "interpolated")
    assert parts["attention"] == "interpolated"
    roofline = {part.name: part.served.value for part in project(small(*words)).breakdown}
    assert roofline["experts"] == "roofline"
