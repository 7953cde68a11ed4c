from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.bench.bare import bytes_per_second
from leadout.bench.contender import Sample
from leadout.bench.render import render_checks
from leadout.bench.statistics import Ratio
from leadout.bench.targets import TargetPlan, at_least, at_most, stream_share, tie_or_better
from leadout.build import bench_targets
from leadout.build.bench import BenchOptions
from leadout.build.bench_targets import measure_targets
from tests.build.tiny_runs import model_folder

TINY = TargetPlan(
    context=8,
    peer_batches=(1, 2),
    peer_tokens=6,
    peer_repeats=1,
    round_batches=(1, 4, 6),
    round_tokens=40,
    round_repeats=2,
    auto_cells=(("good", 2, 24, 2), ("bad", 1, 8, 2), ("ngram", 1, 8, 2)),
    tail_pairs=1,
    contexts=(8, 64),
    context_rows=2,
    context_tokens=6,
    context_repeats=2,
)


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(value=value, low=low, high=high, pairs=15, of_pairs=value)


def test_limits_hold_for_the_ratio_itself():
    assert at_least("x", ratio(2.0, 1.8, 2.2), 2.0).met
    assert not at_least("x", ratio(1.99, 1.8, 2.2), 2.0).met
    assert at_most("x", ratio(1.35, 1.3, 1.5), 1.35).met
    assert not at_most("x", ratio(1.36, 1.3, 1.4), 1.35).met


@pytest.mark.parametrize(
    ("value", "low", "high", "met"),
    [
        (1.10, 1.05, 1.20, True),
        (0.99, 0.96, 1.01, True),
        (0.97, 0.96, 1.02, False),  # too slow
        (0.99, 0.98, 0.999, False),  # surely slower
        (0.99, 0.94, 1.05, False),  # not known well enough
    ],
)
def test_a_tie_needs_value_and_interval(value, low, high, met):
    assert tie_or_better("x", ratio(value, low, high)).met is met


def test_the_share_of_the_streaming_limit_is_least_time_over_time():
    check = stream_share(weight_bytes=200, bytes_per_second=1000.0, step_seconds=0.25)
    assert (check.measured, check.met) == (0.8, True)


def test_the_whole_plan_runs_and_peers_that_are_missing_are_stated(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_targets, "PEERS", ("vllm",))
    model = str(model_folder(tmp_path / "model", context=512))
    missing = tmp_path / "vllm" / "bin" / "python"
    shown = []
    options = BenchOptions(model=model, dtype="float32", threads=1, vllm_python=missing)
    report = measure_targets(options, TINY, tell=lambda line: None, show=shown.append)
    assert [line.split("; make")[0] for line in report.notes] == [f"skipped: --against vllm: no {missing}"]
    assert report.peers == {}
    names = [check.name for check in report.checks]
    assert names == [
        "batch 1: bound of the round cost",
        "batch 1: round cost, k=3",
        "batch 1: share of the streaming limit",
        "batch 1: speedup at length 2.8",
        "batch 4: bound of the round cost",
        "batch 4: round cost, k=3",
        "batch 4: speedup at length 2.8",
        "batch 6: bound of the round cost",
        "batch 6: round cost, k=3",
        "batch 6: speedup at length 2.8",
        "good, batch 2: auto / plain",
        *[name for name in names if name.startswith("good, batch 2: auto / best fixed")],
        "good, batch 2: plain again / plain",
        "bad, batch 1: auto / plain",
        *[name for name in names if name.startswith("bad, batch 1: auto / best fixed")],
        "bad, batch 1: plain again / plain",
        "ngram, batch 1: auto / plain",
        *[name for name in names if name.startswith("ngram, batch 1: auto / best fixed")],
        "ngram, batch 1: plain again / plain",
        "long tail, 64 rows: auto / plain",
        "batch 2: step at context 64 / 8",
    ]
    lengths = [cell.line("k=3").acceptance_length for cell in report.cells if cell.name.startswith("rounds")]
    assert all(length is not None and 2.0 < length < 3.6 for length in lengths)
    assert shown == list(report.cells)
    assert json.loads(json.dumps(report.to_json()))["checks"][0]["name"] == names[0]
    assert render_checks(report.checks).row_count == len(names)


def test_the_peers_of_the_plan_are_measured_against_plain(tmp_path, monkeypatch):
    from leadout.bench.peers import contender

    monkeypatch.setattr(bench_targets, "PEERS", ("vllm",))
    fake = Path(__file__).with_name("fake_server.py")
    # The fake takes its name for its character.
    link = tmp_path / "server.py"
    link.write_text(fake.read_text().replace("sys.argv[1]", "'fine'"))
    monkeypatch.setattr(contender.start_peer, "__kwdefaults__", {"server": link})
    model = str(model_folder(tmp_path / "model", context=512))
    options = BenchOptions(model=model, dtype="float32", threads=1, vllm_python=Path(sys.executable))
    plan = replace(TINY, peer_repeats=2)
    monkeypatch.setattr(bench_targets, "_round_costs", lambda session: None)
    monkeypatch.setattr(bench_targets, "_auto", lambda session: None)
    monkeypatch.setattr(bench_targets, "_long_tail", lambda session: None)
    monkeypatch.setattr(bench_targets, "_contexts", lambda session: None)
    report = measure_targets(options, plan, tell=lambda line: None, show=lambda cell: None)
    assert [check.name for check in report.checks] == ["batch 1: plain / vllm", "batch 2: plain / vllm"]
    assert report.cells[1].line("vllm").tokens_per_second.median == 24.0
    assert report.peers["vllm"]["idle_cpu_seconds"] == 0.0


def test_the_memorys_rate_is_the_median_of_its_readings():
    readings = [Sample(seconds=seconds, tokens=0, peak_bytes=0) for seconds in (0.5, 0.25, 0.125)]
    assert bytes_per_second(readings) == 4.0
