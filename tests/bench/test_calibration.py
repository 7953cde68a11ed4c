from __future__ import annotations

import json

import pytest

from leadout.bench.calibration import RoundTimes, draft_curve, drafter_times, fit_line, pass_curve, round_grids
from leadout.bench.limits import product_flops, read_bandwidth
from leadout.bench.native import NativeContender
from leadout.bench.set_acceptance import SetAcceptance
from leadout.bench.workload import Workload
from leadout.build.bench import BenchOptions
from leadout.build.bench_calibrate import ROUNDS, calibrate
from leadout.build.bench_machine import BenchMachine, DrafterChoice
from leadout.config import BenchMethod
from leadout.draft_length.controller import FixedLength
from leadout.draft_length.costs import CostProfile
from leadout.errors import ConfigError
from leadout.records import Stage
from leadout.sim.profile import load_profile
from leadout.sim.replay import replay_step
from tests.build.tiny_runs import model_folder
from tests.sim.test_replay import recorded


def times() -> dict[tuple[int, int, int], RoundTimes]:
    """A round takes (1 + k) x rows seconds and one more per 100 tokens of context, drafting 0.1 k of it.

    The first draft also reads a prompt of `context` tokens a row: half a second and a millisecond a token.
    """
    return {
        (k, rows, context): RoundTimes(
            whole=[99.0, (1 + k) * rows + context / 100, 0.0],
            draft=[0.1 * k] * 3,
            verify=[(1.0 + k) * rows] * 3,
            first_draft=[0.1 * k + 0.5 * rows + rows * context / 1000] * 2 if k else [0.0],
            prompts=rows,
            prompt_tokens=rows * context,
        )
        for k in (0, 1, 3)
        for rows in (1, 2)
        for context in (100, 300)
    }


def test_grids_are_medians_and_lengths_between_lie_on_the_line():
    grids = {grid.k: grid for grid in round_grids("eagle3", times())}
    assert list(grids) == [0, 1, 2, 3]
    assert [grids[k].method for k in grids] == ["none", "eagle3", "eagle3", "eagle3"]
    assert grids[3].seconds == ((5.0, 7.0), (9.0, 11.0))
    assert grids[2].seconds == ((4.0, 6.0), (7.0, 9.0))
    assert grids[0].contexts == (100.0, 300.0)


def test_curves_are_by_tokens_and_by_rows():
    assert pass_curve(times(), drafts=False) == {1: 1.0, 2: 2.0}
    assert pass_curve(times(), drafts=True) == {2: 2.0, 4: 4.0, 8: 8.0}
    assert draft_curve(times()) == {1: pytest.approx(0.1), 2: pytest.approx(0.1)}


def test_a_drafter_reads_prompts_before_its_first_draft():
    found = drafter_times(times())
    assert found.prompt.seconds_per_sample == pytest.approx(0.5)
    assert found.prompt.seconds_per_token == pytest.approx(1e-3)
    assert found.verify == {2: 2.0, 4: 4.0, 8: 8.0}


def test_a_line_counts_samples_where_they_are_given():
    line = fit_line([1.0, 4.0, 2.0, 8.0], [1.0 + 2 * 1 + 3 * 1, 1.0 + 2 * 4 + 3 * 4, 8.0, 29.0], [1.0, 4.0, 1.0, 4.0])
    assert (line.fixed_s, line.seconds_per_token) == (pytest.approx(1.0), pytest.approx(2.0))
    assert line.seconds_per_sample == pytest.approx(3.0)


def test_a_line_has_no_negative_part():
    line = fit_line([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    assert (line.fixed_s, line.seconds_per_token) == (pytest.approx(1.0), pytest.approx(2.0))
    flat = fit_line([1.0, 2.0], [4.0, 2.0])
    assert (flat.fixed_s, flat.seconds_per_token) == (pytest.approx(3.0), 0.0)
    assert fit_line([1.0, 3.0], [0.0, 2.0]).fixed_s == 0.0


def test_limits_are_rates():
    assert read_bandwidth(num_bytes=1 << 22, repeats=2) > 1e8
    assert product_flops(size=64, repeats=2) > 1e6


def test_a_calibrated_machine_is_read_by_the_simulator_and_by_the_choice_of_draft_lengths(tmp_path):
    policy = str(model_folder(tmp_path / "policy", context=128))
    options = BenchOptions(model=policy, batch_sizes=(1, 3), context=16, dtype="float32", threads=1)
    profile = calibrate(options, tell=lambda line: None, passes=1)
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json())
    read = load_profile(path)
    assert read.draft_lengths("eagle3") == [0, 1, 2, 3, 4, 5]
    assert [grid.rows for grid in read.rounds] == [(1, 3)] * 6
    assert read.rounds[0].contexts[0] == 16.0 + ROUNDS // 2
    assert {part.name for part in read.parts} == {"forward", "sampler", "draft", "host"}
    seconds = replay_step(recorded([9.0, 5.0], rounds=[4, 2], drafted={3: 1.0}), read, "eagle3", slots=2, group=1)
    assert all(seconds[stage] > 0.0 for stage in (Stage.ROLLOUT, Stage.REFIT, Stage.TRAIN))
    costs = CostProfile.read(path, "eagle3")
    assert sorted(costs.forward.points()) == [1, 3]
    assert sorted(costs.verify.points()) == [2, 4, 6, 12, 18]
    assert costs.forward.points()[3] == json.loads(path.read_text())["forward"]["3"]


def test_several_drafters_share_one_profile_and_its_plain_rounds(tmp_path):
    policy = str(model_folder(tmp_path / "policy", context=128))
    options = BenchOptions(model=policy, batch_sizes=(2,), context=16, dtype="float32", threads=1)
    drafters: dict[BenchMethod, str | None] = {"ngram": None, "small_model": policy, "parallel": None, "mtp": None}
    profile = calibrate(options, tell=lambda line: None, drafters=drafters, passes=1)
    assert [grid.k for grid in profile.rounds if grid.method == "none"] == [0]
    for method in drafters:
        assert profile.draft_lengths(method) == [0, 1, 2, 3, 4, 5]
        assert sorted(profile.drafters[method].verify) == [4, 8, 12]
    drafts = [(part.method, part.tokens_per_row) for part in profile.parts if part.name == "draft"]
    assert drafts == [("parallel", 3), ("mtp", 1)]
    assert profile.prefill_seconds("small_model", 1, 16.0) > profile.prefill_seconds("none", 1, 16.0)


def test_many_rows_take_fewer_turns_and_rounds(tmp_path):
    policy = str(model_folder(tmp_path / "policy", context=128))
    told: list[str] = []
    options = BenchOptions(model=policy, batch_sizes=(66, 1), method="none", context=8, dtype="float32", threads=1)
    profile = calibrate(options, tell=told.append, passes=3)
    assert told[:5] == [
        "rounds of 1 rows, 1 of 3",
        "rounds of 66 rows, 1 of 2",
        "rounds of 1 rows, 2 of 3",
        "rounds of 66 rows, 2 of 2",
        "rounds of 1 rows, 3 of 3",
    ]
    assert (list(profile.forward), profile.drafters) == ([1, 66], {})


def test_a_context_without_room_for_a_longer_one_is_refused(tmp_path):
    policy = str(model_folder(tmp_path / "policy", context=128))
    with pytest.raises(ConfigError, match="--context: expected fewer than 107 tokens"):
        calibrate(BenchOptions(model=policy, context=110, dtype="float32", threads=1), tell=lambda line: None)


def test_a_look_up_made_full_drafts_k_in_every_row_of_every_round(tmp_path):
    policy = str(model_folder(tmp_path / "policy", context=128))
    machine = BenchMachine(policy, max_len=64, dtype="float32", threads=1)
    workload = Workload(name="w", prompts=machine.prompts(3, 8), lengths=(12,) * 3)
    for method in ("ngram", "history"):
        choice = DrafterChoice(method=method, rule=SetAcceptance(0.0), full=True)
        generator = machine.generator(choice, rows=3, max_len=workload.longest)
        contender = NativeContender("x", generator, FixedLength(3), drafts=True)
        rollouts, seconds = contender.timed_rollouts(workload, 0)
        drafted = [rollout.rounds.drafted.tolist() for rollout in rollouts]
        assert drafted == [[3] * 8 + [2, 1, 0]] * 3
        assert seconds > 0.0
