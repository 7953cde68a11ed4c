"""Draining rollouts in closed form against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.errors import CapacityError
from leadout.sim.drain import Intervals, Slots, decode_seconds, merge_lockstep, order_events
from leadout.sim.engine import EngineTerms
from leadout.sim.forward import Layout
from leadout.sim.hardware import GPUS
from leadout.sim.kernel_tables import shipped_tables
from leadout.sim.shapes import MODELS, draft_shape
from leadout.sim.step_model import StepTable, build_step_model

PROMPT = 100.0


def model(engine: EngineTerms | None = None, method: str | None = None):
    shape = MODELS["Qwen3-8B"]
    layout = Layout(gpu=GPUS["H100"], tables=shipped_tables())
    drafter = draft_shape(method, shape) if method else None
    return build_step_model(shape, layout, engine or EngineTerms(), drafter)


def lengths(n: int, seed: int = 0) -> np.ndarray:
    return np.rint(np.exp(np.random.default_rng(seed).normal(6.5, 0.8, n))).clip(1, 6000)


def token_by_token(table: StepTable, work: np.ndarray, slots: int) -> float:
    """Plain decoding as a loop: one step a token for all live rows, waiting rows admitted in order."""
    waiting = list(work - 1.0)
    live: list[list[float]] = []
    total = 0.0
    while waiting or live:
        while waiting and len(live) < slots:
            live.append([waiting.pop(0), PROMPT + 1.0])
        live = [row for row in live if row[0] > 0]
        if live:
            context = sum(row[1] for row in live) / len(live)
            total += float(table.at(np.array([len(live)]), np.array([context]))[0])
            live = [[left - 1.0, context + 1.0] for left, context in live]
            live = [row for row in live if row[0] > 0]
    return total


@pytest.mark.parametrize("slots", [64, 7])
def test_closed_form_equals_a_loop_over_tokens(slots):
    work, table = lengths(24), model().table(0, 64)
    intervals = order_events(work, PROMPT, Slots(rows=slots))
    closed = float(decode_seconds(intervals, table, 1.0).sum())
    assert closed == pytest.approx(token_by_token(table, work, slots), rel=1e-6)


def test_closed_form_equals_a_loop_over_rounds_across_the_graph_and_launch_kinks():
    table = model(EngineTerms(max_num_seqs=16, launch_s=0.02), "eagle3").table(3, 64)
    for rows, start, rounds in ((40, 50.0, 4000), (9, 10.0, 3000), (8, 1000.0, 2000)):
        growth = 2.77
        exact = sum(float(table.at(np.array([rows]), np.array([start + growth * j]))[0]) for j in range(rounds))
        closed = table.integrate(np.array([rows]), np.array([start]), growth, np.array([float(rounds)]))
        assert float(closed[0]) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("slots", [Slots(rows=64), Slots(rows=9), Slots(rows=64, tokens=20_000.0)])
def test_tokens_out_are_the_sum_of_lengths(slots):
    work = lengths(40, seed=3)
    intervals = order_events(work, PROMPT, slots)
    made = float((intervals.rows_N * intervals.span_N).sum()) + len(work)
    assert made == pytest.approx(work.sum(), rel=1e-12)


def test_live_rows_never_exceed_the_slots_and_context_never_the_cache():
    slots = Slots(rows=11, tokens=15_000.0)
    intervals = order_events(lengths(60, seed=5), PROMPT, slots)
    peak = intervals.context_N + intervals.rows_N * intervals.span_N
    assert int(intervals.rows_N.max()) <= slots.rows
    assert float(peak.max()) <= slots.tokens + 1e-6


def test_a_cache_that_overflows_pays_recomputed_prefill():
    roomy = order_events(lengths(30, seed=1), PROMPT, Slots(rows=64))
    tight = order_events(lengths(30, seed=1), PROMPT, Slots(rows=64, tokens=12_000.0))
    assert roomy.recomputed == 0.0
    assert tight.recomputed > 0.0
    assert float(tight.prefill_tokens_N.sum()) == pytest.approx(
        float(roomy.prefill_tokens_N.sum()) + tight.recomputed, rel=1e-9
    )


def test_a_rollout_that_cannot_fit_the_cache_is_refused():
    with pytest.raises(CapacityError, match=r"lengths\.cap"):
        order_events(np.array([5000.0]), PROMPT, Slots(rows=4, tokens=4000.0))


def test_a_group_shares_its_prompt_only_with_the_prefix_cache():
    work = lengths(12)
    shared = order_events(work, PROMPT, Slots(rows=64), 4)
    alone = order_events(work, PROMPT, Slots(rows=64), 4, prefix_cache=False)
    assert float(shared.prefill_tokens_N.sum()) == 3 * PROMPT
    assert float(alone.prefill_tokens_N.sum()) == 12 * PROMPT


def test_lockstep_ranks_move_at_the_pace_of_the_fullest():
    a = order_events(np.array([11.0, 101.0]), PROMPT, Slots(rows=8))
    b = order_events(np.array([51.0, 51.0, 51.0]), PROMPT, Slots(rows=8))
    merged: Intervals = merge_lockstep([a, b])
    assert merged.start_N.tolist() == [0.0, 10.0, 50.0]
    assert merged.rows_N.tolist() == [3, 3, 1]
    assert float(merged.span_N.sum()) == 100.0
