"""What is printed, written and drawn."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from leadout.cli.simulate import simulate as simulate_command
from leadout.sim.charts import heat_map, scaled_steps, write_html
from leadout.sim.present import render, served_shares, to_json
from leadout.sim.setup import Workbench
from leadout.sim.simulate import simulate
from tests.sim.machines import calibrated
from tests.sim.scenarios import small

EAGLE = ("speculation.method=eagle3", "speculation.num_speculative_tokens=3")


def shown(outcome) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(render(outcome))
    return console.export_text()


@pytest.fixture(scope="module")
def outcome():
    return simulate(small(*EAGLE, "price_per_gpu_hour=2.0"))


def test_json_holds_stages_ranges_memory_and_paths(outcome):
    data = json.loads(json.dumps(to_json(outcome)))
    assert sum(data["exposed"].values()) == pytest.approx(data["step_s"])
    assert sum(data["served"].values()) == pytest.approx(1.0)
    assert data["cost_per_100_steps"] == pytest.approx(100 * data["step_s"] / 3600 * 2.0 * 8)
    assert data["ranges"]["step_speedup"]["low"] > 0


def test_the_round_adds_up_to_the_step_tables_seconds(outcome):
    projection = outcome.projection
    rows, context, k = projection.breakdown_at
    import numpy as np

    from leadout.sim.setup import prepare

    table = prepare(projection.scenario).model.table(k, rows)
    seconds = float(table.at(np.array([rows]), np.array([context]))[0])
    assert sum(part.seconds for part in projection.breakdown) == pytest.approx(seconds, rel=1e-6)
    assert sum(served_shares(projection).values()) == pytest.approx(1.0)


def test_the_table_says_break_even_cost_and_verdict(outcome):
    text = shown(outcome)
    for words in ("break-even", "100 steps:", "speculation against plain", "served by", "aiconfigurator-core 0.12.0"):
        assert words in text


def test_the_report_is_one_file_with_four_pictures(outcome, tmp_path):
    write_html(outcome, tmp_path / "r.html", Workbench())
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("data:image", "")


def test_a_price_without_speculation_is_the_price_alone():
    text = shown(simulate(small("price_per_gpu_hour=2.0")))
    assert "100 steps: " in text
    assert "saved" not in text and "with speculation" not in text


def test_a_calibrated_machine_is_drawn_at_its_own_draft_lengths(tmp_path):
    scenario = calibrated(tmp_path, *EAGLE)
    axes = heat_map(scenario, Workbench()).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "3", "5"]
    one = calibrated(tmp_path, *EAGLE, ks=(3,))
    assert [label.get_text() for label in heat_map(one, Workbench()).axes[0].get_xticklabels()] == ["3"]


def test_a_calibrated_answer_rests_on_its_profile_alone(tmp_path):
    outcome = simulate(calibrated(tmp_path, *EAGLE))
    write_html(outcome, tmp_path / "r.html", Workbench())
    page, text, data = (tmp_path / "r.html").read_text(), shown(outcome), to_json(outcome)
    assert page.count("data:image/png;base64,") == 4
    for words in (page, text, json.dumps(data)):
        assert "aiconfigurator" not in words
        assert "profile.json" in words
    assert "memory of a generating GPU" not in text
    assert data["memory"] is None


def test_the_heat_map_draws_the_line_of_no_gain():
    figure = heat_map(small(*EAGLE), Workbench())
    assert figure.axes[0].get_xlabel() == "draft length k"


def test_scaling_leaves_out_what_does_not_fit():
    points = scaled_steps(small("model=Qwen3-32B", "generation.tensor_parallel=8"), Workbench())
    assert [gpus for gpus, _ in points] == [8, 16, 32]


def test_the_command_writes_json(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(simulate_command)
    path = tmp_path / "s.yaml"
    path.write_text("gpus: 8\nworkload: {num_prompts: 4, num_generations: 4, lengths: {mean: 300, cap: 1024}}\n")
    result = CliRunner().invoke(app, [str(path), "gpu=H200", "--json", str(tmp_path / "o.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "o.json").read_text())["scenario"]["gpu"] == "H200"


def test_the_simulator_never_imports_torch():
    code = (
        "import sys, leadout.sim.simulate, leadout.sim.plan, leadout.sim.paper_report, leadout.sim.published, "
        "leadout.sim.charts, leadout.sim.baseline, leadout.sim.replay_report, leadout.sim.second_opinion; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
