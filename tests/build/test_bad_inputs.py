"""What a user can get wrong ends in one line on standard error, code 2, and no folder left behind."""

from __future__ import annotations

import json
import sys

import pytest

from leadout.cli.main import run
from leadout.models.eagle3_io import write_eagle3
from tests.build.tiny_runs import model_folder, recipe
from tests.models.eagle3_fakes import tiny_head


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Runs the command line; the one line it must answer with."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["leadout", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        assert ended.value.code == 2, captured.err
        assert captured.err.count("\n") == 1, captured.err
        assert not (tmp_path / "runs").exists()
        return captured.err

    return call


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.num_promts=3", ["rollout.num_promts", "rollout.num_prompts"]),
        ("seed=abc", ["seed", "integer", "abc"]),
        ("rollout.temperature=0", ["rollout.temperature", "> 0"]),
        ("data.train={path: gone.jsonl}", ["gone.jsonl"]),
        ("data.train={task: arithmetik}", ["arithmetik", "arithmetic"]),
        ("data.max_prompt_length=5", ["5", "data.overlong"]),
        ("rollout.max_model_len=8", ["data.overlong"]),
        ("rollout.max_model_len=100000", ["128", "100000"]),
        *(
            (f"rollout.speculative_config={{method: {method}, model: gone}}", ["speculative_config.model: ", "gone"])
            for method in ("eagle3", "parallel", "small_model", "history+eagle3", "history+small_model")
        ),
        ("rollout.speculative_config={method: ngram, prompt_lookup_min: 4}", ["prompt_lookup_min", "4"]),
        ("draft.vocab_size=9999", ["draft.vocab_size", "257", "9999"]),
        ("draft.layer_ids=[1, 2, 9]", ["draft.layer_ids", "9"]),
        ("draft.layer_ids=[3, 1, 2]", ["draft.layer_ids", "rising order"]),
        ("draft.layer_ids=[1, 1, 2]", ["draft.layer_ids", "each once"]),
        ("model=./nowhere", ["nowhere"]),
        ("reward=[{function: nosuch}]", ["nosuch"]),
        ("rollout.kv_cache_memory=1e-7", ["rollout.kv_cache_memory"]),
        (
            "rollout.speculative_config={num_speculative_tokens: auto, leadout: {cost_profile: gone.json}}",
            ["cost_profile", "gone.json"],
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path, model, refused, override, words):
    message = refused("train", str(recipe(tmp_path, model)), override)
    for word in words:
        assert word in message


def test_a_data_row_without_the_prompt_column_is_named_by_its_line(tmp_path, model, refused):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "1"}\n{"question": "b"}\n')
    message = refused("train", str(recipe(tmp_path, model, data__train={"path": str(data)})))
    assert "rows.jsonl" in message and "prompt" in message and "2" in message


def test_broken_json_is_named_by_its_line(tmp_path, model, refused):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": \n')
    message = refused("train", str(recipe(tmp_path, model, data__train={"path": str(data)})))
    assert "rows.jsonl" in message and "2" in message


def test_a_prompt_longer_than_the_context_is_named(tmp_path, model, refused):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "a" * 200, "answer": "1"}) + "\n")
    message = refused("train", str(recipe(tmp_path, model, data__train={"path": str(data)})))
    assert "127" in message and "data.overlong" in message


def test_dropping_every_prompt_is_refused(tmp_path, model, refused):
    path = recipe(tmp_path, model, data__max_prompt_length=2, data__overlong="drop")
    assert "prompt" in refused("train", str(path))


def test_messages_without_a_chat_template_are_refused(tmp_path, refused):
    model = model_folder(tmp_path / "plain", template=False)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}) + "\n")
    message = refused("train", str(recipe(tmp_path, model, data__train={"path": str(data)})))
    assert "data.apply_chat_template" in message


def test_a_draft_of_another_model_is_refused(tmp_path, model, refused):
    write_eagle3(tiny_head(), tmp_path / "draft")
    message = refused("train", str(recipe(tmp_path, model)), f"rollout.speculative_config.model={tmp_path / 'draft'}")
    assert str(tmp_path / "draft") in message


def test_a_folder_that_is_no_draft_is_refused(tmp_path, model, refused):
    message = refused("train", str(recipe(tmp_path, model)), f"rollout.speculative_config.model={model}")
    assert str(model) in message


def test_a_run_of_the_same_name_is_left_alone(tmp_path, model, monkeypatch, capsys):
    taken = tmp_path / "runs" / "run"
    taken.mkdir(parents=True)
    (taken / "notes.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["leadout", "train", str(recipe(tmp_path, model))])
    with pytest.raises(SystemExit) as ended:
        run()
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert "--resume" in err
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]


def test_evaluating_a_missing_file_is_refused(model, refused):
    assert "gone.jsonl" in refused("eval", "--model", str(model), "--data", "gone.jsonl")
