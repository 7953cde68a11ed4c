"""Whole runs of a tiny model: what they leave behind, and that speculation and drafter training change nothing else."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from leadout.build.drafter import new_head
from leadout.build.generator import make_decoder
from leadout.config import Draft
from leadout.errors import CheckpointError, LeadoutError, TrainingError
from leadout.metrics import read_rows
from leadout.models.loading import iter_weights, read_config
from leadout.models.spec import DecoderSpec
from leadout.recipe import load_recipe
from tests.build.tiny_runs import STEPS, learning, model_folder, recipe, start, train, unmeasured


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    return train(recipe(tmp_path_factory.mktemp("finished"), model, log__benchmark=True))


def test_a_finished_run_holds_recipe_metrics_rollouts_checkpoints_comparison_and_report(finished):
    folder, printed = finished
    assert load_recipe(folder / "config.yaml").rollout.num_generations == 3
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS * 2 * 3
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    closing = json.loads((folder / "closing.json").read_text())
    assert closing["comparisons"] and all(each["speedup"] > 0 for each in closing["comparisons"])
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "report:" in printed


def test_every_row_has_the_figures_of_all_stages_and_of_the_drafter(finished):
    rows = read_rows(finished[0] / "metrics.jsonl")
    stages = ("data", "refit", "rollout", "reward", "train", "total")
    expected = {
        *("step", "version", "reward", "reward_std", "frac_reward_zero_std", "loss", "entropy", "mismatch_kl"),
        *("completions/mean_length", "completions/clipped_ratio", "tokens/completion"),
        *("spec/num_drafts", "spec/num_draft_tokens", "spec/num_accepted_tokens", "spec/acceptance_length"),
        *("draft/loss", "draft/grad_norm", "draft/version", "draft/checksum", "draft/expected_acceptance_length"),
        *(f"seconds/{stage}" for stage in stages),
    }
    for number, row in enumerate(rows):
        assert expected <= row.keys(), expected - row.keys()
        assert (row["version"], row["draft/version"]) == (number, number)
        assert row["mismatch_kl"] < 1e-6
        assert row["reward_std"] > 0
        assert row["grad_norm"] > 0
        assert row["spec/num_draft_tokens"] > 0
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert len({row["draft/checksum"] for row in rows}) == STEPS


def test_the_drafter_gets_better_at_guessing_this_policy(tmp_path, model):
    path = recipe(tmp_path, model, optim__learning_rate=0.0, pipeline__max_steps=6, data__train__num_rows=2)
    folder, _ = train(path, "rollout.num_generations=8", "draft.passes=6", "draft.vocab_size=257")
    lengths = [row["draft/expected_acceptance_length"] for row in read_rows(folder / "metrics.jsonl")]
    assert lengths[-1] > lengths[0] + 0.05


def test_the_expected_acceptance_is_known_with_speculation_off_too(tmp_path, model):
    path = recipe(tmp_path, model, pipeline__max_steps=1)
    folder, _ = train(path, "rollout.speculative_config.num_speculative_tokens=0")
    (row,) = read_rows(folder / "metrics.jsonl")
    assert row["draft/expected_acceptance_length"] > 1.0
    assert row["draft/loss"] > 0
    assert row.get("spec/num_draft_tokens", 0) == 0


def policy_after(folder, step=1):
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "learner" / "policy" / "model.safetensors")


def test_the_policy_is_the_same_to_the_bit_whether_the_drafter_learns_or_not(tmp_path, model):
    policies, drafts = [], []
    for enabled in ("true", "false"):
        path = recipe(tmp_path, model, pipeline__max_steps=1, name=enabled)
        folder, _ = train(path, f"draft.enabled={enabled}")
        policies.append(policy_after(folder))
        drafts.append("draft/loss" in read_rows(folder / "metrics.jsonl")[0])
        rollouts = (folder / "rollouts.jsonl").read_text()
    assert drafts == [True, False]
    assert policies[0].keys() == policies[1].keys()
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    start_weights = load_file(model / "model.safetensors")
    assert not torch.equal(policies[0]["model.norm.weight"], start_weights["model.norm.weight"])
    assert rollouts == (tmp_path / "runs" / "true" / "rollouts.jsonl").read_text()


@pytest.mark.parametrize("method", ["parallel", "mtp", "small_model", "history+small_model"])
def test_every_drafter_that_learns_is_refitted_each_step(tmp_path, model, small, method):
    folder, _ = train(recipe(tmp_path, model, name="on", **learning(method, small)))
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["draft/version"] for row in rows] == list(range(STEPS))
    assert len({row["draft/checksum"] for row in rows}) == STEPS
    assert all(row["spec/num_draft_tokens"] > 0 and row["draft/loss"] > 0 for row in rows)
    assert rows[-1]["draft/loss"] < rows[0]["draft/loss"]


@pytest.mark.parametrize("method", ["parallel", "mtp", "small_model"])
def test_the_policys_update_does_not_depend_on_any_drafters_learning(tmp_path, model, small, method):
    policies = []
    for enabled in (True, False):
        changes = {**learning(method, small), "draft__enabled": enabled, "pipeline__max_steps": 1}
        folder, _ = train(recipe(tmp_path, model, name=str(enabled), **changes))
        policies.append(policy_after(folder))
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])


@pytest.mark.parametrize("method", ["parallel", "mtp", "small_model"])
def test_a_run_with_any_learning_drafter_resumes_as_if_left_alone(tmp_path, model, small, method):
    changes = learning(method, small)
    whole, _ = train(recipe(tmp_path, model, name="whole", **changes))
    broken, _ = train(recipe(tmp_path, model, name="broken", **changes))
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    (broken / "closing.json").unlink()
    train(broken / "config.yaml", resume=broken)
    assert unmeasured(broken) == unmeasured(whole)
    drafts = [folder / "checkpoints" / "step_000004" / "learner" / "draft" for folder in (whole, broken)]
    one, other = (load_file(folder / "model.safetensors") for folder in drafts)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_small_model_learns_only_when_asked(tmp_path, model, small):
    changes = {**learning("small_model", small), "draft__enabled": "auto", "pipeline__max_steps": 1}
    folder, _ = train(recipe(tmp_path, model, **changes))
    (row,) = read_rows(folder / "metrics.jsonl")
    assert row["spec/num_draft_tokens"] > 0
    assert not [key for key in row if key.startswith("draft/")]


def test_the_policys_own_multi_token_head_drafts_where_it_has_one(tmp_path):
    policy = tmp_path / "policy"
    model_folder(policy)
    spec = DecoderSpec.from_config(read_config(policy))
    decoder = make_decoder(spec, dict(iter_weights(policy)), dtype="float64", max_len=64, device=torch.device("cpu"))
    head = new_head(Draft(), decoder, dict(iter_weights(policy)), (), seed=7, temperature=1.0, keep=(), method="mtp")
    tensors = load_file(policy / "model.safetensors")
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    config = read_config(policy) | {"num_nextn_predict_layers": 1}
    (policy / "config.json").write_text(json.dumps(config))
    changes = {**learning("mtp", ""), "pipeline__max_steps": 1}
    folder, _ = train(recipe(tmp_path, policy, **changes))
    started = load_file(folder / "draft_start" / "model.safetensors")
    assert all(torch.equal(started[f"model.mtp_layers.0.{n}"], t) for n, t in head.state_dict().items())


@pytest.mark.parametrize("method", ["ngram", None])
def test_runs_without_a_trained_drafter_report_none(tmp_path, model, method):
    speculation = None if method is None else {"method": method, "num_speculative_tokens": 3}
    folder, _ = train(recipe(tmp_path, model, rollout__speculative_config=speculation, pipeline__max_steps=2))
    rows = read_rows(folder / "metrics.jsonl")
    assert not [key for row in rows for key in row if key.startswith("draft/")]
    assert (sum(row.get("spec/num_draft_tokens", 0) for row in rows) > 0) == (method == "ngram")


def test_plain_and_looked_up_runs_in_float64_have_the_same_rollouts(tmp_path, model):
    texts = []
    lookups = [(name, {"method": name, "num_speculative_tokens": 3}) for name in ("ngram", "history")]
    for name, speculation in [("plain", None), *lookups]:
        path = recipe(tmp_path, model, name=name, rollout__speculative_config=speculation, rollout__dtype="float64")
        folder, _ = train(path, "train.dtype=float64", "pipeline.max_steps=2")
        lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
        texts.append([(line["step"], line.get("completion", line.get("text"))) for line in lines])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 12


def test_memory_for_few_rows_gives_the_rollouts_of_many(tmp_path, model):
    texts = []
    for name, memory in (("many", 1.0), ("few", 2.5e-4)):
        path = recipe(tmp_path, model, name=name, rollout__kv_cache_memory=memory, rollout__dtype="float64")
        folder, _ = train(path, "train.dtype=float64", "pipeline.max_steps=1")
        texts.append((folder / "rollouts.jsonl").read_text())
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, model):
    folder, _ = train(recipe(tmp_path_factory.mktemp("unbroken"), model))
    return folder


def kill_after(arguments: tuple[str, ...], step: int) -> None:
    """Start a run and kill it the moment it reports this step."""
    process = start(*arguments)
    assert process.stdout is not None
    reported = any(line.startswith(f"step {step}/") for line in iter(process.stdout.readline, ""))
    process.kill()
    _, err = process.communicate()
    assert reported, err


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_run_resumes_to_the_metrics_and_rollouts_of_one_that_was_left_alone(tmp_path, model, unbroken, step):
    path = recipe(tmp_path, model)
    folder = tmp_path / "runs" / "run"
    kill_after(("train", str(path)), step)
    resumed, _ = train(folder / "config.yaml", resume=folder)
    assert resumed == folder
    assert unmeasured(folder) == unmeasured(unbroken)
    assert (folder / "rollouts.jsonl").read_bytes() == (unbroken / "rollouts.jsonl").read_bytes()
    for name, tensor in policy_after(unbroken, STEPS).items():
        assert torch.equal(policy_after(folder, STEPS)[name], tensor)


def test_a_resumed_run_drafts_from_the_history_of_before(tmp_path, model):
    speculation = {"method": "history+eagle3", "num_speculative_tokens": 2}
    # Six prompts in four steps of two: the last step meets prompts of the first ones again.
    changes = {"rollout__speculative_config": speculation, "data__train": {"task": "arithmetic", "num_rows": 6}}
    whole, _ = train(recipe(tmp_path, model, name="whole", **changes))
    broken, _ = train(recipe(tmp_path, model, name="broken", **changes))
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    (broken / "closing.json").unlink()
    train(broken / "config.yaml", resume=broken)
    assert unmeasured(broken) == unmeasured(whole)
    lines = (whole / "rollouts.jsonl").read_bytes()
    assert (broken / "rollouts.jsonl").read_bytes() == lines


def test_a_resumed_run_keeps_its_settings_but_may_go_on_longer(tmp_path, model):
    path = recipe(tmp_path, model, pipeline__max_steps=2)
    folder, _ = train(path)
    with pytest.raises(CheckpointError, match=r"optim\.learning_rate: 0\.001, got 0\.5"):
        train(path, "optim.learning_rate=0.5", resume=folder)
    train(path, "pipeline.max_steps=3", resume=folder)
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3]
    assert load_recipe(folder / "config.yaml").pipeline.max_steps == 3


def test_a_resumed_run_may_drop_its_audit_and_take_it_up_again(tmp_path, model):
    path = recipe(tmp_path, model, pipeline__max_steps=1, audit={"every": 1, "tokens": 64})
    folder, _ = train(path)
    train(path, "pipeline.max_steps=2", "audit.every=0", resume=folder)
    train(path, "pipeline.max_steps=3", "audit.every=1", resume=folder)
    rows = list(read_rows(folder / "metrics.jsonl"))
    assert ["audit/log_e" in row for row in rows] == [True, False, True]


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path, model):
    path = recipe(tmp_path, model, reward=[{"function": "tests.build.rewards:wrong_length"}])
    with pytest.raises(LeadoutError):
        train(path)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_policy_that_is_no_longer_finite_stops_the_run_before_a_checkpoint(tmp_path, model):
    path = recipe(tmp_path, model, checkpoint__every=1)
    with pytest.raises(TrainingError, match=r"lower optim\.learning_rate"):
        train(path, "optim.learning_rate=1e30")
    assert not list((tmp_path / "runs").glob("run/checkpoints/*"))
