"""Baselines: logs of four trainers, and what is fitted to them."""

from __future__ import annotations

import json

import pytest

from leadout.errors import DataError
from leadout.records import Stage
from leadout.sim.baseline import fit_baseline, read_baseline, render_fit, rows_of
from leadout.sim.project import project
from leadout.sim.sections import Baseline
from tests.sim.scenarios import small


def write(tmp_path, text: str):
    path = tmp_path / "log"
    path.write_text(text)
    return path


def test_our_own_metrics_are_read_without_the_first_step(tmp_path):
    rows = [
        {"step": i, "seconds/rollout": 10.0 if i else 99.0, "seconds/train": 4.0, "completions/mean_length": 800}
        for i in range(3)
    ]
    found = read_baseline(write(tmp_path, "\n".join(json.dumps(row) for row in rows)))
    assert found.seconds == {"rollout": 10.0, "train": 4.0}
    assert found.mean_length == 800


def test_a_log_of_an_asynchronous_run_is_refused(tmp_path):
    row = {"step": 1, "seconds/rollout": 10.0, "seconds/train": 4.0, "exposed/rollout": 6.0}
    with pytest.raises(DataError, match=r"of an asynchronous run.*expected one with pipeline\.mode: sync"):
        read_baseline(write(tmp_path, json.dumps(row)))


def test_verl_console_lines_add_reference_and_old_log_probabilities(tmp_path):
    line = (
        "step:1 - timing_s/gen:357.2 - timing_s/old_log_prob:60.5 - timing_s/ref:47.5 - timing_s/update_actor:270.0 "
        "- response_length/mean:7012.5 - response_length/max:28672 - response_length/clip_ratio:0.031"
    )
    found = read_baseline(write(tmp_path, line))
    assert found.seconds == {"rollout": 357.2, "logprob": 108.0, "train": 270.0}
    assert found.clip_ratio == 0.031


def test_nemo_timing_blocks_are_read(tmp_path):
    block = "Timing:\n  • generation: 58.0s (51.8%)\n  • policy_training: 28.0s (25.0%)\n  • weight_sync: 5.0s (4.5%)\n"
    found = read_baseline(write(tmp_path, block))
    assert found.seconds == {"rollout": 58.0, "train": 28.0, "refit": 5.0}


def test_trl_printed_dicts_are_read(tmp_path):
    line = (
        "{'completions/mean_length': 512.0, 'completions/clipped_ratio': 0.1, 'completions/max_length': 1024.0, "
        "'profiling/Time taken: GRPOTrainer.vLLM.generate': 12.5, "
        "'profiling/Time taken: GRPOTrainer.compute_loss': 3.5}"
    )
    found = read_baseline(write(tmp_path, line))
    assert found.seconds == {"rollout": 12.5, "train": 3.5}
    assert rows_of(line)[0]["completions/clipped_ratio"] == 0.1


def test_a_log_without_stage_times_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no stage times"):
        read_baseline(write(tmp_path, "loss 1.0\n"))


def test_the_fit_recovers_constants_and_leaves_no_residual():
    truth = small("engine.host_s=0.004", "training.mfu=0.22", "training.logprob_mfu=0.31", "refit.fixed_s=6")
    measured = project(truth)
    block = Baseline.model_validate({"seconds": {stage.value: value for stage, value in measured.seconds.items()}})
    fitted = fit_baseline(small(), block)
    assert fitted.constants["engine.host_s"] == pytest.approx(0.004, rel=1e-3)
    assert fitted.constants["training.mfu"] == pytest.approx(0.22, rel=1e-6)
    assert fitted.constants["training.logprob_mfu"] == pytest.approx(0.31, rel=1e-6)
    assert fitted.constants["refit.fixed_s"] == pytest.approx(6.0, rel=1e-6)
    for stage in (Stage.ROLLOUT, Stage.TRAIN, Stage.LOGPROB, Stage.REFIT):
        assert abs(fitted.residual(stage)) < 1e-2


def test_what_no_constant_can_explain_stays_as_residual():
    fitted = fit_baseline(small(), Baseline.model_validate({"seconds": {"rollout": 1.0}}))
    assert fitted.constants["engine.host_s"] == 0.0
    assert fitted.residual(Stage.ROLLOUT) > 1.0
    assert render_fit(fitted) is not None


def test_length_figures_of_the_log_set_the_law():
    block = Baseline.model_validate(
        {"seconds": {"train": 20.0}, "mean_length": 2000.0, "max_length": 3000.0, "clip_ratio": 0.2}
    )
    lengths = fit_baseline(small(), block).scenario.workload.lengths
    assert lengths.mean == 2000.0 and lengths.cap == 3000
    assert 0.3 < lengths.cv < 0.9


def test_generation_that_nemo_calls_exposed_is_not_the_rollout_stage(tmp_path):
    block = "  • exposed_generation: 3.0s\n  • policy_training: 28.0s\n"
    assert read_baseline(write(tmp_path, block)).seconds == {"train": 28.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seconds/train": -4.0}, "seconds/train must be a number >= 0, got -4"),
        ({"seconds/train": float("nan")}, "seconds/train must be a number >= 0, got nan"),
        (
            {"seconds/train": 4.0, "completions/clipped_ratio": 1.5},
            r"clipped_ratio must be a share in \[0, 1\], got 1.5",
        ),
        ({"seconds/train": 4.0, "completions/mean_length": -1}, "mean_length must be a number >= 0, got -1"),
    ],
)
def test_a_number_that_cannot_be_names_the_file_and_the_field(tmp_path, row, message):
    path = write(tmp_path, json.dumps(row))
    with pytest.raises(DataError, match=f"--baseline: {path}: .*{message}") as caught:
        read_baseline(path)
    assert "\n" not in str(caught.value)
