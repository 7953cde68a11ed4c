"""Whole runs of a tiny model that generate one batch ahead: what differs from a synchronous run, and what must not."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from leadout.errors import CheckpointError, ConfigError
from leadout.metrics import read_rows
from leadout.recipe import load_recipe
from tests.build.tiny_runs import STEPS, learning, recipe, train, unmeasured

AHEAD = {"pipeline__mode": "async", "grpo__importance_sampling_correction": True}


def learner_of(folder, name, step=STEPS):
    """The tensors of `policy` or `draft` after a step."""
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "learner" / name / "model.safetensors")


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_at_staleness_0_rows_rollouts_and_weights_are_those_of_a_synchronous_run(tmp_path, model):
    folders = [
        train(recipe(tmp_path, model, name=mode, pipeline__mode=mode, pipeline__max_staleness=0))[0]
        for mode in ("sync", "async")
    ]
    ours, theirs = (unmeasured(folder) for folder in folders)
    assert ours == theirs
    assert len({(folder / "rollouts.jsonl").read_bytes() for folder in folders}) == 1
    for name in ("policy", "draft"):
        assert_same_tensors(*(learner_of(folder, name) for folder in folders))


@pytest.mark.parametrize("method", ["eagle3", "parallel", "mtp", "small_model"])
def test_every_drafter_learns_along_and_serves_one_version_later(tmp_path, model, small, method):
    folder, printed = train(recipe(tmp_path, model, **AHEAD, **learning(method, small)))
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == [row["draft/version"] for row in rows] == [0, 0, 1, 2]
    assert [row["lag/max"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert all(row["spec/num_draft_tokens"] > 0 and row["draft/loss"] > 0 for row in rows)
    assert len({row["draft/checksum"] for row in rows}) == 3
    assert all(row["exposed/rollout"] <= row["seconds/total"] for row in rows)
    assert "report:" in printed


def test_several_updates_a_step_a_reference_and_an_evaluation_go_with_it(tmp_path, model):
    changes = {
        "grpo__num_iterations": 2,
        "grpo__beta": 0.1,
        "train__mini_batch_size": 3,
        "data__eval": {"task": "arithmetic", "num_rows": 4},
        "eval": {"every": 2, "num_prompts": 2},
    }
    folder, _ = train(recipe(tmp_path, model, **AHEAD, **changes))
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["optimizer_updates"] for row in rows] == [4.0] * STEPS
    assert [row["lag/max"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert [row["step"] for row in rows if "seconds/eval" in row] == [2, 4]
    assert all(row["kl"] >= 0.0 and row["grad_norm"] > 0.0 for row in rows)
    for row in rows:
        exposed = sum(seconds for name, seconds in row.items() if name.startswith("exposed/"))
        assert row["seconds/total"] == pytest.approx(exposed)


def test_stale_rollouts_are_weighted_by_how_much_likelier_they_have_become(tmp_path, model):
    folder, _ = train(recipe(tmp_path, model, **AHEAD))
    rows = read_rows(folder / "metrics.jsonl")
    assert rows[0]["mismatch_kl"] < 1e-6, "the first batch is of the very weights"
    assert all(row["mismatch_kl"] > 1e-6 for row in rows[1:])


def test_the_policy_is_the_same_to_the_bit_whether_the_drafter_learns_or_not(tmp_path, model):
    # Greedy drafts are point masses: tokens are those of plain decoding, whatever the drafter has learnt.
    speculation = {"method": "eagle3", "num_speculative_tokens": 2, "draft_sample_method": "greedy"}
    policies = []
    for enabled in (True, False):
        changes = {"rollout__speculative_config": speculation, "draft__enabled": enabled, "rollout__dtype": "float64"}
        path = recipe(tmp_path, model, name=str(enabled), train__dtype="float64", **AHEAD, **changes)
        policies.append(learner_of(train(path)[0], "policy"))
    assert_same_tensors(*policies)


@pytest.mark.parametrize("method", ["eagle3", "history+eagle3"])
def test_a_broken_run_resumes_as_if_left_alone(tmp_path, model, method):
    # Six prompts in four steps of two: the last step meets prompts of the first ones again.
    speculation = {"method": method, "num_speculative_tokens": 2}
    changes = {
        "rollout__speculative_config": speculation,
        "data__train": {"task": "arithmetic", "num_rows": 6},
        **AHEAD,
    }
    whole, _ = train(recipe(tmp_path, model, name="whole", **changes))
    broken, _ = train(recipe(tmp_path, model, name="broken", **changes))
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    (broken / "closing.json").unlink()
    train(broken / "config.yaml", resume=broken)
    assert unmeasured(broken) == unmeasured(whole)
    assert (broken / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    for name in ("policy", "draft"):
        assert_same_tensors(learner_of(broken, name), learner_of(whole, name))


def test_a_synchronous_run_is_not_resumed_as_an_asynchronous_one(tmp_path, model):
    folder, _ = train(recipe(tmp_path, model, pipeline__max_steps=1))
    path = recipe(tmp_path, model, pipeline__max_steps=2, **AHEAD)
    with pytest.raises(CheckpointError, match="a resumed run keeps its settings"):
        train(path, resume=folder)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.mode=async"], r"expected grpo\.importance_sampling_correction: true, got false"),
        (["pipeline.max_staleness=1"], r"max_staleness 1 needs mode: async, got mode: sync"),
        (
            ["pipeline.mode=async", "pipeline.max_staleness=2"],
            r"pipeline\.max_staleness: expected <= 1, got 2",
        ),
        (
            ["pipeline.mode=async", "grpo.importance_sampling_correction=true", "audit.every=3"],
            r"audit\.every .*expected 0, got 3",
        ),
    ],
)
def test_settings_that_would_learn_from_stale_rollouts_uncorrected_are_refused(tmp_path, model, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe(tmp_path, model), overrides)
