from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from leadout.data.rows import Row, hub_rows, read_rows, task_rows
from leadout.data.tasks import make_task
from leadout.errors import DataError

REAL_DATA = os.environ.get("LEADOUT_DATA")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_of_a_jsonl_file_keep_order_ids_and_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", '{"prompt": "1+1", "answer": 2}\n\n{"prompt": "é", "answer": "3"}\n')
    rows = read_rows(path)
    assert [row.id for row in rows] == ["sums/0", "sums/1"]
    assert [dict(row.columns) for row in rows] == [{"prompt": "1+1", "answer": 2}, {"prompt": "é", "answer": "3"}]
    assert rows[1].where == f"{path} line 3"


def test_rows_of_a_json_list_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.json", json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    assert [row.columns["prompt"] for row in read_rows(path)] == ["a", "b"]


def test_rows_of_a_parquet_file_keep_nested_columns(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"style": "rule", "ground_truth": "4"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (row,) = read_rows(path)
    assert row.value("reward_model.ground_truth") == "4"
    assert row.value("prompt") == [{"role": "user", "content": "hi"}]


def test_only_the_first_rows_are_read_when_a_number_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert [row.columns["prompt"] for row in read_rows(path, 2)] == ["a", "b"]


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"x\.jsonl line 2: expected JSON"):
        read_rows(path)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"line 1: expected UTF-8 text, got byte 0xe9"):
        read_rows(path)


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: expected an object with columns, got list"):
        read_rows(write(tmp_path / "x.jsonl", "[1, 2]\n"))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="expected at least one row, got none"):
        read_rows(write(tmp_path / "x.jsonl", text))


def test_a_missing_file_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data file; check data\.train\.path"):
        read_rows(tmp_path / "gone.jsonl")


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a \.jsonl, \.json, \.parquet file, got \.csv"):
        read_rows(write(tmp_path / "x.csv", "a,b"))


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a Parquet file"):
        read_rows(write(tmp_path / "x.parquet", "no parquet here"))


def test_a_missing_file_names_the_setting_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data file; check data\.eval\.path \(relative"):
        read_rows(tmp_path / "gone.jsonl", None, "data.eval.path")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"prompt": "a\ud83d"}', r"expected whole characters, got half of one \(the lone surrogate \\ud83d\)"),
        (r'{"prompt": "a", "answer": "\uDFFF"}', r"expected whole characters, got half of one"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "expected columns nested a few levels deep"),
        (
            '{"prompt": "a", "answer": ' + "7" * 5000 + "}",
            "expected numbers of ordinary size, got an integer of thousands",
        ),
    ],
)
def test_what_no_tokenizer_can_take_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl line 2: {message}") as caught:
        read_rows(write(tmp_path / "x.jsonl", '{"prompt": "a"}\n' + line + "\n"))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_characters_escaped_in_two_halves_are_whole(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "x.jsonl", r'{"prompt": "\ud83d\ude00"}'))
    assert row.columns["prompt"] == "😀"


def test_a_missing_column_names_the_place_and_the_columns_present() -> None:
    row = Row(id="x/6", where="x.jsonl line 7", columns={"question": "a", "answer": "b"})
    with pytest.raises(DataError) as caught:
        row.value("prompt")
    assert str(caught.value) == "x.jsonl line 7: expected a column 'prompt', got columns question, answer"


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore lines")

    monkeypatch.setattr("leadout.data.hub.check_reachable", lambda endpoint: None)
    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(DataError) as caught:
        hub_rows("openai/gsm8k:main")
    assert "Couldn't reach 'openai/gsm8k' on the Hub; check the id" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_network_the_hub_is_asked_once_and_the_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    offline: list[bool] = []

    def no_answer(endpoint: str) -> None:
        asked.append(endpoint)
        raise OSError("no route")

    def load(*_: Any, **__: Any) -> None:
        offline.append(constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("OfflineModeIsEnabled")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("leadout.data.hub.check_reachable", no_answer)
    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError) as caught:
        hub_rows("openai/gsm8k:main")
    assert str(caught.value) == (
        "cannot load openai/gsm8k:main (split train) from the hub: it is not in the cache and the hub does not answer "
        "(no route); check the id (ID:CONFIGURATION) and the network, or name a local file with path"
    )
    assert (len(asked), offline, constants.HF_HUB_OFFLINE) == (1, [True], False)


def test_hub_rows_ask_for_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(repository: str, configuration: str | None, *, split: str) -> list[dict[str, str]]:
        return [{"question": f"{repository} {configuration} {split} {index}"} for index in range(3)]

    monkeypatch.setattr("leadout.data.hub.check_reachable", lambda endpoint: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    rows = hub_rows("openai/gsm8k:main", "test", 2)
    assert [row.id for row in rows] == ["gsm8k/0", "gsm8k/1"]
    assert rows[1].columns == {"question": "openai/gsm8k main test 1"}


def test_task_rows_carry_the_tasks_name_in_their_ids() -> None:
    rows = task_rows(make_task("arithmetic", {}), 3, seed=0)
    assert [row.id for row in rows] == ["arithmetic/0", "arithmetic/1", "arithmetic/2"]


def test_a_task_makes_a_thousand_rows_when_no_number_is_given() -> None:
    assert len(task_rows(make_task("arithmetic", {}), None, seed=0)) == 1000


@pytest.mark.skipif(REAL_DATA is None, reason="LEADOUT_DATA is unset: no folder with real data sets")
@pytest.mark.parametrize(
    ("name", "count", "first_answer"),
    [("gsm8k_test.jsonl", 1319, "#### 18"), ("aime_2024.jsonl", 30, "204"), ("math_500.jsonl", 500, "3,")],
)
def test_real_files_have_all_their_rows(name: str, count: int, first_answer: str) -> None:
    rows = read_rows(Path(str(REAL_DATA)) / name)
    assert len(rows) == count
    assert first_answer in str(rows[0].columns["answer"])
