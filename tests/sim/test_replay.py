"""Calibrated machines: profiles, replay of recorded rounds, the validation gate."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from leadout.errors import ConfigError, DataError
from leadout.records import Stage
from leadout.sim.profile import Profile, load_profile
from leadout.sim.project import project
from leadout.sim.replay import Cell, judge, read_cells, replay_step, validated
from leadout.sim.replay_report import replay_report, validate_report
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"machine": "m", "rounds": [], "probe_s": NaN}', "probe_s: Input should be a finite number"),
        (b"{", "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
    ],
)
def test_a_profile_that_is_wrong_is_one_line_with_the_file(tmp_path, content, message):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"profile\.json: {message}") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


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


def cell(error: float, speedup: float | None = 0.0) -> Cell:
    return Cell(name="c", stage_errors={Stage.ROLLOUT: error}, speedup_error=speedup, repeatability=0.01)


def test_the_gate_needs_the_median_and_nine_of_ten_cells():
    assert judge([cell(0.05)] * 9 + [cell(0.5)]).passed
    assert not judge([cell(0.05)] * 8 + [cell(0.5)] * 2).passed
    assert not judge([cell(0.12)] * 10).passed
    assert not judge([cell(0.01, speedup=0.2)] * 10).passed


def test_errors_are_factors_whichever_way_they_go():
    assert judge([cell(np.log(1.1) - 1e-9)] * 5 + [cell(-np.log(1.1) + 1e-9)] * 5).passed
    assert not judge([cell(-np.log(1.1) - 1e-9)] * 10).passed
    assert judge([cell(-np.log(1.2) + 1e-9)] * 4 + [cell(0.0)] * 6).within == 1.0
    assert judge([cell(-np.log(1.2) - 1e-9)] * 4 + [cell(0.0)] * 6).within == 0.6


def test_without_a_speedup_there_is_no_verdict():
    with pytest.raises(DataError, match="with drafts beside plain"):
        judge([cell(0.01, speedup=None)])


ROUND = 0.012 + 1e-6 * 11
"""Seconds of the first plain round of two rows with prompts of ten tokens."""


def measured_cell(measured: list[float], plain: list[float] | None = None, probe: float = 0.1) -> dict[str, object]:
    """Two rows of one round after their first token, three drafts each."""
    pairs: list[dict[str, object]] = [
        {"probe_before": 0.5 * probe, "probe_after": 1.5 * probe, "measured": {"rollout": seconds}}
        for seconds in measured
    ]
    row: dict[str, object] = {"name": "b2", "method": "eagle3", "k": 3, "slots": 2, "group": 2, "prompts": [8, 12]}
    row["run"] = {"lengths": [5, 5], "rounds": [1, 1], "drafted": {"3": 1.0}}
    if plain is not None:
        row["plain"] = {"lengths": [2, 2], "rounds": [1, 1], "drafted": {"0": 1.0}}
        pairs = [{**pair, "plain_measured": seconds} for pair, seconds in zip(pairs, plain, strict=True)]
    return {**row, "pairs": pairs}


def test_predictions_are_scaled_by_the_probes(tmp_path):
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(measured_cell([4 * ROUND] * 5, [3 * ROUND] * 5, probe=0.2)) + "\n")
    (found,) = read_cells(path, profile())
    assert found.stage_errors[Stage.ROLLOUT] == pytest.approx(0.0, abs=1e-9)
    assert found.unpaired[Stage.ROLLOUT] == pytest.approx(-np.log(2.0))
    # Predicted 1 / 2, measured 3 / 4, whatever the pace.
    assert found.speedup_error == pytest.approx(0.5 / 0.75 - 1.0)


def test_a_machine_is_held_against_itself_pair_by_pair():
    slower = [2 * ROUND * 1.1**i for i in range(5)]
    found = validated(measured_cell(slower, [ROUND] * 5), profile())
    assert found.repeatability == pytest.approx(np.log(1.1))
    assert found.speedup_repeatability == pytest.approx(np.log(1.1))
    assert found.stage_errors[Stage.ROLLOUT] == pytest.approx(-2 * np.log(1.1))


def test_a_stage_that_counts_but_is_not_in_the_profile_fails():
    row = measured_cell([2 * ROUND] * 5, [ROUND] * 5)
    pairs = [{**pair, "measured": {"rollout": 2 * ROUND, "refit": ROUND, "data": 1e-4}} for pair in row["pairs"]]
    found = validated({**row, "pairs": pairs}, profile())
    assert found.stage_errors[Stage.REFIT] == -np.inf
    assert set(found.stage_errors) == {Stage.ROLLOUT, Stage.REFIT}
    assert judge([found]).within == 0.0


def test_five_pairs_are_the_least():
    with pytest.raises(DataError, match="cell b2: expected at least 5 pairs, got 4"):
        validated(measured_cell([1.0] * 4), profile())


def test_the_verdict_is_shown_beside_the_machine_against_itself(tmp_path):
    (tmp_path / "cells.jsonl").write_text(json.dumps(measured_cell([2 * ROUND] * 5, [ROUND] * 5)) + "\n")
    path = tmp_path / "profile.json"
    path.write_text(profile().model_dump_json())
    console = Console(width=160, record=True, file=io.StringIO())
    shown, data = validate_report(tmp_path, path)
    console.print(shown)
    assert "1 cells: median 0.0% (gate 10 %), within 20 %: 100% (90 %), the machine against itself 0.0%" in (
        console.export_text()
    )
    assert (data["passed"], data["by_cell"][0]["name"]) == (True, "b2")


def test_drafters_read_prompts_of_their_own():
    own = {
        "draft": {"1": 0.001},
        "verify": {"2": 0.01},
        "prompt": {"seconds_per_token": 0.5, "seconds_per_sample": 2.0},
    }
    raw = json.loads(profile().model_dump_json()) | {
        "drafters": {"eagle3": own},
        "prefill": {"seconds_per_sample": 1.0},
    }
    ours = Profile.model_validate(raw)
    run = recorded([2.0] * 4, rounds=[1] * 4, drafted={3: 1.0})
    spent = [replay_step(run, each, "eagle3", slots=4, group=2)[Stage.ROLLOUT] for each in (ours, profile())]
    assert spent[0] - spent[1] == pytest.approx(2 * (1.0 + 2.0 + 0.5 * 10))
    plain = recorded([2.0] * 4, rounds=[1] * 4, drafted={0: 1.0})
    spent = [replay_step(plain, each, "eagle3", slots=4, group=2)[Stage.ROLLOUT] for each in (ours, profile())]
    assert spent[0] - spent[1] == pytest.approx(2 * 1.0)


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
