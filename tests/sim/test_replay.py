"""Calibrated machines: profiles, replay of recorded rounds, the validation gate."""

from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.errors import ConfigError, DataError
from leadout.records import Stage
from leadout.sim.profile import Profile, load_profile
from leadout.sim.project import project
from leadout.sim.replay import Cell, judge, read_cells, replay_step
from leadout.sim.replay_report import replay_report
from leadout.sim.runs import RecordedStep
from tests.sim.scenarios import small


def profile() -> Profile:
    """A plain step costs 10 ms + 1 ms a row + 1 us a token of mean context; a round of three drafts twice that."""
    grids = [
        {
            "method": method,
            "k": k,
            "rows": [1, 16],
            "contexts": [0.0, 1000.0],
            "seconds": [[factor * (0.01 + 0.001 * b + 1e-6 * c) for c in (0.0, 1000.0)] for b in (1, 16)],
        }
        for method, k, factor in (("none", 0, 1.0), ("eagle3", 3, 2.0))
    ]
    train = {"fixed_s": 1.0, "seconds_per_token": 1e-3}
    return Profile.model_validate({"machine": "toy", "rounds": grids, "train": train, "probe_s": 0.1})


def recorded(lengths, rounds=None, drafted=None) -> RecordedStep:
    lengths = np.array(lengths, dtype=float)
    return RecordedStep(
        step=1,
        seconds={},
        lengths=lengths,
        prompts=np.full(len(lengths), 10.0),
        rounds=np.array(rounds, dtype=float) if rounds is not None else np.full(len(lengths), np.nan),
        drafted=drafted or {},
    )


def test_plain_rollouts_are_replayed_step_by_step():
    ours = replay_step(recorded([5.0, 3.0]), profile(), "none", slots=2, group=1)
    by_hand = 0.0
    for step in range(4):
        rows = 2 if step < 2 else 1
        by_hand += 0.01 + 0.001 * rows + 1e-6 * (10 + 1 + step)
    assert ours[Stage.ROLLOUT] == pytest.approx(by_hand, rel=1e-12)
    assert ours[Stage.TRAIN] == pytest.approx(1.0 + 1e-3 * 28)


def test_recorded_rounds_set_the_pace_under_drafting():
    ours = replay_step(recorded([9.0], rounds=[4], drafted={3: 1.0}), profile(), "eagle3", slots=1, group=1)
    by_hand = sum(2 * (0.011 + 1e-6 * (11 + 2 * j)) for j in range(4))
    assert ours[Stage.ROLLOUT] == pytest.approx(by_hand, rel=1e-12)


def test_a_draft_length_that_was_not_calibrated_is_named():
    with pytest.raises(ConfigError, match="no rounds of eagle3 at k=5"):
        profile().table("eagle3", 5, 4)


def test_a_profile_is_read_from_json(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile().model_dump_json())
    assert load_profile(path) == profile()
    with pytest.raises(DataError, match="bench --calibrate"):
        load_profile(tmp_path / "none.json")


def test_a_run_folder_is_replayed_beside_its_measurements(tmp_path):
    (tmp_path / "config.yaml").write_text("rollout: {num_generations: 2, speculative_config: {method: eagle3}}\n")
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "seconds/rollout": 0.5, "seconds/train": 2, "tokens/prompt": 10}) + "\n"
    )
    rows = [
        {"step": 1, "draw": 7, "token_ids": [1, 2, 3, 4, 5], "drafted": [3, 3], "accepted": [1, 1]} for _ in range(2)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "profile.json"
    path.write_text(profile().model_dump_json())
    _, data = replay_report(tmp_path, path)
    assert data["steps"][0]["measured"] == {"rollout": 0.5, "train": 2.0}
    assert data["steps"][0]["predicted"]["rollout"] == pytest.approx(2 * 2 * 0.012, rel=0.01)
    assert data["steps"][0]["predicted"]["train"] == pytest.approx(1.0 + 1e-3 * (10 + 2 * 10))


def cell(error: float, speedup: float = 0.0) -> Cell:
    return Cell(name="c", stage_errors={Stage.ROLLOUT: error}, speedup_error=speedup, repeatability=0.01)


def test_the_gate_needs_the_median_and_nine_of_ten_cells():
    assert judge([cell(0.05)] * 9 + [cell(0.5)]).passed
    assert not judge([cell(0.05)] * 8 + [cell(0.5)] * 2).passed
    assert not judge([cell(0.12)] * 10).passed
    assert not judge([cell(0.01, speedup=0.2)] * 10).passed


def test_predictions_are_scaled_by_the_probes(tmp_path):
    pair = {
        "probe_before": 0.2,
        "probe_after": 0.2,
        "measured": {"rollout": 2.0},
        "predicted": {"rollout": 1.0},
        "plain_measured": 3.0,
        "plain_predicted": 1.5,
    }
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps({"name": "b4", "pairs": [pair] * 5}) + "\n")
    (found,) = read_cells(path, profile())
    assert found.stage_errors[Stage.ROLLOUT] == pytest.approx(0.0, abs=1e-12)
    assert found.speedup_error == pytest.approx(0.0, abs=1e-12)


def test_a_calibrated_machine_can_be_projected(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile().model_dump_json())
    scenario = small(
        *("gpus=1", f"profile={path}", "workload.num_prompts=1", "workload.num_generations=2"),
        *("workload.lengths={mean: 5, cv: 0, cap: 8}", "workload.prompt_length=10"),
    )
    projection = project(scenario)
    by_hand = sum(0.012 + 1e-6 * (11 + j) for j in range(4))
    assert projection.rollout_s == pytest.approx(by_hand, rel=1e-12)
    assert projection.seconds[Stage.TRAIN] == pytest.approx(1.0 + 1e-3 * 30)
    assert [part.served.value for part in projection.breakdown] == ["calibrated"]
