"""`leadout simulate` and `leadout plan` on the command line: what is used, and what is refused rather than ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim.machines import write_profile

SCENARIO = """
gpus: 4
workload: {num_prompts: 4, num_generations: 4, prompt_length: 10, lengths: {mean: 60, cv: 0.5, cap: 128}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_profile_beside_a_scenario_takes_the_place_of_its_tables(
    scenario: Path, tmp_path: Path, leadout_run: Any
) -> None:
    profile, out = write_profile(tmp_path, [("none", 0)]), tmp_path / "out.json"
    code, text, _ = leadout_run("simulate", scenario, "--profile", profile, "--json", out)
    data = json.loads(out.read_text())
    assert code == 0
    assert data["seconds"]["train"] == 1.0
    assert data["served"] == {"calibrated": 1.0}
    assert "aiconfigurator" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--paper", "--published"), "expected one of --paper, --published, --run, got --paper and --published"),
        (("--paper", "SCENARIO"), "--paper does not use a scenario"),
        (("--published", "SCENARIO", "--html", "x.html"), "--published does not use a scenario, --html"),
        (("--run", "RUN", "--baseline", "x.log"), "--run does not use --baseline"),
        (("--run", "RUN", "--save-run", "x"), "--run does not use --save-run"),
        (("--run", "RUN", "--second-opinion", "aic"), "--run does not use --second-opinion"),
        (("--run", "RUN", "SCENARIO"), "--run does not use a scenario"),
        (("--paper", "--profile", "x.json"), "--paper does not use --profile"),
        (("SCENARIO", "--validate"), "--validate needs --run RUN"),
        (("--paper", "--validate"), "--validate needs --run RUN"),
        (("SCENARIO", "--profile", "PROFILE", "--baseline", "LOG"), "a baseline fits constants that a profile"),
        (("SCENARIO", "--profile", "PROFILE", "--second-opinion", "aic"), "--second-opinion compares kernel tables"),
        ((), "expected a scenario file, --paper, --published or --run RUN"),
    ],
)
def test_what_would_be_ignored_is_refused_in_one_line(
    words: tuple[str, ...], message: str, scenario: Path, tmp_path: Path, leadout_run: Any
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"seconds/train": 4.0}\n')
    names = {"SCENARIO": scenario, "RUN": tmp_path, "LOG": log, "PROFILE": write_profile(tmp_path, [("none", 0)])}
    code, out, err = leadout_run("simulate", *(names.get(word, word) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_an_asynchronous_scenario_is_not_saved_as_a_run(scenario: Path, tmp_path: Path, leadout_run: Any) -> None:
    words = ("generation.gpus=2", "pipeline.mode=async", "pipeline.max_staleness=1")
    code, out, err = leadout_run("simulate", scenario, *words, "--save-run", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("error: --save-run writes stages one after another") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_simulated_run_is_replayed_without_a_profile(scenario: Path, tmp_path: Path, leadout_run: Any) -> None:
    folder = tmp_path / "run"
    assert leadout_run("simulate", scenario, "--save-run", folder)[0] == 0
    assert leadout_run("simulate", "--run", folder)[0] == 0
    code, _, err = leadout_run("simulate", "--run", folder, "--profile", write_profile(tmp_path, [("none", 0)]))
    assert code == 2
    assert "is a simulated run" in err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_an_unknown_gpu_is_named_by_both_commands(command: str, scenario: Path, leadout_run: Any) -> None:
    code, out, err = leadout_run(command, scenario, "gpu=H300")
    assert (code, out) == (2, "")
    assert err == ("error: gpu must be one of A100, H100, H200, B200, GB200 or a mapping of constants, got 'H300'\n")
