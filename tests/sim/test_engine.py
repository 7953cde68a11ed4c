"""Engine terms: the graph ceiling, padding, launch that overlaps, attention by query length, collectives."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.errors import ConfigError
from leadout.sim.attention import QueryGrowth
from leadout.sim.collectives import Collectives
from leadout.sim.engine import EngineTerms
from leadout.sim.experts import touched
from leadout.sim.forward import Layout
from leadout.sim.hardware import GPUS
from leadout.sim.kernel_tables import Served, shipped_tables
from leadout.sim.shapes import MODELS, draft_shape
from leadout.sim.step_model import build_step_model

TABLES = shipped_tables()


@pytest.mark.parametrize(
    ("terms", "ceiling"),
    [
        (EngineTerms(max_num_seqs=128), 256),
        (EngineTerms(max_num_seqs=1024), 512),
        (EngineTerms(cudagraph_capture_sizes=(1, 2, 64)), 64),
        (EngineTerms(enforce_eager=True), 0),
    ],
)
def test_the_graph_covers_twice_the_rows_in_tokens_but_at_most_512(terms, ceiling):
    assert terms.graph_ceiling == ceiling


def test_tokens_are_padded_to_the_next_captured_size_inside_the_graph_only():
    terms = EngineTerms(max_num_seqs=128)
    assert terms.padded(np.array([3.0, 9.0, 256.0, 257.0])).tolist() == [4.0, 16.0, 256.0, 257.0]


def test_out_of_the_graph_a_round_takes_the_larger_of_kernels_and_launch():
    shape, layout = MODELS["Qwen3-8B"], Layout(gpu=GPUS["GB200"], tables=TABLES)
    drafter = draft_shape("eagle3", shape)

    def seconds(terms: EngineTerms, rows: int) -> float:
        table = build_step_model(shape, layout, terms, drafter).table(3, 128)
        return float(table.at(np.array([rows]), np.array([2000.0]))[0])

    inside, out = EngineTerms(max_num_seqs=128), EngineTerms(max_num_seqs=128, launch_s=0.0325)
    assert seconds(out, 64) == seconds(inside, 64)
    free, held = seconds(EngineTerms(max_num_seqs=128, launch_s=0.0), 65), seconds(out, 65)
    slower = seconds(EngineTerms(max_num_seqs=128, launch_s=0.0425), 65)
    assert held > free
    assert slower - held == pytest.approx(0.01, abs=1e-12)
    assert held < free + 0.0325


def test_attention_grows_with_queries_and_falls_back_above_a_limit():
    growth = QueryGrowth(per_draft=0.14, fallback_above=4, fallback_factor=4.5)
    assert [growth.factor(k) for k in (0, 3, 4)] == pytest.approx([1.0, 1.42, 4.5])


def test_expected_experts_under_uniform_routing():
    counts = touched(128, 8, np.array([1.0, 4.0, 8.0, 16.0, 32.0, 64.0]))
    assert np.rint(counts).tolist() == [8.0, 29.0, 52.0, 82.0, 112.0, 126.0]


def test_a_group_across_nodes_pays_the_network_and_is_marked():
    h100 = Collectives(gpu=GPUS["H100"], tables=TABLES)
    inside, across = h100.curve("all_reduce", 8), h100.curve("all_reduce", 16)
    size = np.array([262_144.0])
    assert inside.served is Served.INTERPOLATED
    assert across.served is Served.EXTRAPOLATED
    assert float(across.at(size)[0]) > float(inside.at(size)[0]) + 30e-6


def test_eager_all_reduce_is_slower_than_in_the_graph():
    gb200 = Collectives(gpu=GPUS["GB200"], tables=TABLES)
    size = np.array([4096.0])
    assert float(gb200.curve("all_reduce", 4).at(size)[0]) == pytest.approx(5.4e-6, rel=0.05)
    assert float(gb200.curve("all_reduce", 4, graph=False).at(size)[0]) > 1.3 * 5.4e-6


def test_negative_constants_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.host_s must be >= 0"):
        EngineTerms(host_s=-1.0)


def test_the_whole_product_stack_of_the_8b_matches_the_corrected_figures():
    published = {
        "GB200": (2.93, 2.89, 3.10, 3.65, 5.23, 7.11, 9.8, 17.0),
        "B200": (2.98, 3.01, 3.19, 3.77, 5.57, 8.1, 9.9, 19.5),
        "H100": (5.56, 6.15, 6.08, 7.41, 9.72, 14.3, 18.9, 38.2),
    }
    tokens = np.array([1.0, 64.0, 128.0, 256.0, 512.0, 768.0, 1024.0, 2048.0])
    for name, milliseconds in published.items():
        model = build_step_model(MODELS["Qwen3-8B"], Layout(gpu=GPUS[name], tables=TABLES), EngineTerms())
        ours = (model.policy.body_seconds(tokens) + model.policy.head_seconds(tokens)) * 1e3
        assert ours == pytest.approx(np.array(milliseconds), rel=0.06)
