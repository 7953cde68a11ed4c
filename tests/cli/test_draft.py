from __future__ import annotations

from pathlib import Path

import pytest

from leadout.cli.draft import _dataset, _datasets
from leadout.errors import ConfigError
from leadout.models.loading import read_config
from tests.build.tiny_runs import model_folder, write_questions


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("policy")))


def test_layers_are_cut_and_told(leadout_run, policy, tmp_path):
    code, out, err = leadout_run("draft", "init", "--model", policy, "--layers", "3,0", "--out", str(tmp_path / "d"))
    assert code == 0
    assert out.strip() == f"{tmp_path / 'd'}: 2 layers of 32, vocabulary 257"
    assert "method=small_model" in err
    assert read_config(tmp_path / "d")["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("layers", "words"), [("a,b", "expected numbers with commas"), ("9", "between 0 and 3, got 9")]
)
def test_impossible_layers_are_one_line(leadout_run, policy, tmp_path, layers, words):
    code, _, err = leadout_run("draft", "init", "--model", policy, "--layers", layers, "--out", str(tmp_path / "d"))
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_a_folder_that_is_not_there_is_one_line(leadout_run):
    code, _, err = leadout_run("draft", "info", "./nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "./nowhere, which is not there" in err


def test_a_head_is_trained_from_the_command_line_and_fits_its_policy(leadout_run, policy, tmp_path):
    questions, out = write_questions(tmp_path / "sums.jsonl"), str(tmp_path / "head")
    options = ["--rollouts", "64", "--passes", "1", "--max-completion-length", "8", "--held-out", "2"]
    code, told, _ = leadout_run(
        "draft", "train", "--model", policy, "--data", f"{questions}@question", "--out", out, *options
    )
    assert code == 0
    assert "best: acceptance length" in told
    code, told, _ = leadout_run("draft", "info", out, "--model", policy)
    assert code == 0
    assert "states entering 0, 2, 4" in told


def test_an_unknown_loss_is_one_line(leadout_run, policy, tmp_path):
    arguments = ["--model", policy, "--data", "arithmetic", "--out", str(tmp_path / "x"), "--loss-fn", "mse"]
    code, _, err = leadout_run("draft", "train", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "expected ce, kl, tv, lk or a sum such as ce+tv" in err


def test_data_sets_are_named_by_file_task_or_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for name in ("train", "plain"):
        (tmp_path / "rows" / f"{name}.jsonl").write_text("{}")
    assert _dataset("rows/train.jsonl@question")[0] == "train"
    assert _dataset("rows/train.jsonl@question")[1].prompt_key == "question"
    assert _dataset("arithmetic") == ("arithmetic", _dataset("arithmetic")[1])
    assert _dataset("hub:openai/gsm8k@question")[0] == "openai_gsm8k"
    assert _dataset("hub:openai/gsm8k@question")[1].hub == "openai/gsm8k"
    assert _dataset("rows/plain.jsonl")[1].path == Path("rows/plain.jsonl")


def test_files_of_one_name_in_different_folders_have_names_of_their_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("{}")
    found = _datasets([f"{tmp_path}/a/train.jsonl", f"{tmp_path}/b/train.jsonl", "arithmetic", "arithmetic@7000"])
    assert list(found) == ["train", "train-2", "arithmetic", "arithmetic-2"]
    assert found["train-2"].path == tmp_path / "b" / "train.jsonl"
    assert (found["arithmetic"].num_rows, found["arithmetic-2"].num_rows) == (None, 7000)
    with pytest.raises(ConfigError, match="--data arithmetic: expected every data set once, got this one twice"):
        _datasets(["arithmetic", "arithmetic"])


def test_a_missing_data_file_names_the_option(leadout_run, policy, tmp_path):
    code, _, err = leadout_run(
        "draft", "train", "--model", policy, "--data", "gone.jsonl", "--out", str(tmp_path / "x")
    )
    assert (code, err) == (2, "error: gone.jsonl: no such data file; check --data (relative to where you run)\n")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "small_model"), "--method small_model needs --start"),
        (("--layer-ids", "2,15"), "--layer-ids: expected three layers, such as 2,15,27, got '2,15'"),
        (("--method", "mtp", "--format", "speculators"), "--format speculators is for --method eagle3 and parallel"),
        (("--method", "mtp", "--vocab-size", "64"), "--method mtp drafts from its whole vocabulary"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(leadout_run, policy, tmp_path, options, words):
    arguments = ["--model", policy, "--data", "arithmetic", "--out", str(tmp_path / "x"), *options]
    code, _, err = leadout_run("draft", "train", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert not (tmp_path / "x").exists()


def test_a_parallel_head_is_trained_and_audited_from_the_command_line(leadout_run, policy, tmp_path):
    questions, out = write_questions(tmp_path / "sums.jsonl"), str(tmp_path / "head")
    options = ["--rollouts", "64", "--passes", "1", "--max-completion-length", "8", "--held-out", "2"]
    options += ["--method", "parallel", "--format", "speculators"]
    data = f"{questions}@question"
    code, told, err = leadout_run("draft", "train", "--model", policy, "--data", data, "--out", out, *options)
    assert code == 0
    assert f"speculative_config.method=parallel rollout.speculative_config.model={out}" in err
    code, told, _ = leadout_run("draft", "info", out, "--model", policy)
    assert (code, "all in one pass" in told) == (0, True)
    audit = ["--model", policy, "--draft", out, "--tokens", "300", "--dtype", "float32"]
    code, told, _ = leadout_run("audit", *audit)
    assert code in (0, 3)
    assert "drafter parallel" in told
