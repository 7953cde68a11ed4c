"""Stage data, first half: files, hub data sets and procedural tasks -> rows.

A row keeps its columns as they came, an id that is stable over epochs, and where it lies, so that every later
complaint can name the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from leadout.data.hub import load_from_hub
from leadout.errors import DataError
from leadout.interfaces import Task

DEFAULT_TASK_ROWS = 1000
"""Rows of a procedural task when no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One data row. Example: ``Row(id="gsm8k/0", where="gsm8k.jsonl line 1", columns={"question": "…"})``."""

    id: str
    """Data set and index; the same in every epoch and run."""
    where: str
    """File and line (or row), for messages."""
    columns: Mapping[str, object]
    """Everything the row holds, under its own names."""

    def value(self, key: str) -> object:
        """The column `key`; a dot reaches into nested columns (``reward_model.ground_truth``).

        Raises:
            DataError: no such column; names the columns present.

        """
        if key in self.columns:
            return self.columns[key]
        found: Any = self.columns
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                present = ", ".join(self.columns) or "none"
                raise DataError(f"{self.where}: expected a column {key!r}, got columns {present}")
            found = found[part]
        return found


def read_rows(path: Path, num_rows: int | None = None, setting: str = "data.train.path") -> list[Row]:
    """The first `num_rows` rows of a .jsonl, .json or .parquet file (all by default).

    `setting` is what named the file, for the message when it is not there.

    Raises:
        DataError: no such file, another format, a broken line, or no rows.

    """
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: expected a {', '.join(readers)} file, got {path.suffix or 'no extension'}")
    if not path.is_file():
        raise DataError(f"{path}: no such data file; check {setting} (relative to where you run)")
    rows: list[Row] = []
    for where, columns in islice(readers[path.suffix](path), num_rows):
        if not isinstance(columns, dict):
            raise DataError(f"{where}: expected an object with columns, got {type(columns).__name__}")
        rows.append(Row(id=f"{path.stem}/{len(rows)}", where=where, columns=columns))
    return _not_empty(rows, str(path))


def hub_rows(name: str, split: str = "train", num_rows: int | None = None) -> list[Row]:
    """Rows of a hub data set, through the `datasets` library; ``openai/gsm8k:main`` names a configuration.

    Raises:
        DataError: not found, not reachable, no such split, or no rows.

    """
    from datasets.exceptions import DatasetsError

    repository, _, configuration = name.partition(":")
    try:
        loaded = load_from_hub(repository, configuration or None, split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot load {name} (split {split}) from the hub: {reason}; check the id (ID:CONFIGURATION) and the "
            "network, or name a local file with path"
        ) from error
    count = len(loaded) if num_rows is None else min(num_rows, len(loaded))
    short = repository.rsplit("/", 1)[-1]
    rows = [
        Row(id=f"{short}/{index}", where=f"{name} ({split}) row {index + 1}", columns=dict(loaded[index]))
        for index in range(count)
    ]
    return _not_empty(rows, name)


def task_rows(task: Task, num_rows: int | None, seed: int) -> list[Row]:
    """Rows made by a procedural task, the same for the same seed."""
    made = task.rows(num_rows or DEFAULT_TASK_ROWS, seed)
    return [
        Row(id=f"{task.name}/{index}", where=f"task {task.name} row {index + 1}", columns=columns)
        for index, columns in enumerate(made)
    ]


def _not_empty(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise DataError(f"{name}: expected at least one row, got none")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _parse(line, where)


def _json(path: Path) -> Iterator[tuple[str, object]]:
    rows = _parse(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of objects, got {type(rows).__name__}; one object a line is .jsonl")
    for index, columns in enumerate(rows):
        yield f"{path} row {index + 1}", columns


def _parse(text: bytes, where: str) -> object:
    try:
        parsed = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: expected JSON, got {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where}: expected columns nested a few levels deep, got far deeper JSON") from error
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise DataError(f"{where}: expected numbers of ordinary size, got an integer of thousands of digits") from error
    _refuse_half_characters(text, parsed, where)
    return parsed


def _refuse_half_characters(text: bytes, parsed: object, where: str) -> None:
    r"""JSON may escape half of a character (``\ud83d`` alone), which no tokenizer and no file can hold."""
    if b"\\ud" not in text.lower():
        return
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise DataError(
            f"{where}: expected whole characters, got half of one (the lone surrogate \\u{half:04x}); "
            "write the character itself, or both halves"
        ) from error


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        index = 0
        for batch in table.iter_batches():
            for columns in batch.to_pylist():
                index += 1
                yield f"{path} row {index}", columns
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: expected a Parquet file, got {str(error).splitlines()[0]}") from error
