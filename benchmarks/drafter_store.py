"""The measured cells of the comparison of drafters, one file each, and the options that they were measured with.

A cell lies in ``OUT/cells/STAGE/NAME.json`` beside its settings, and is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from benchmarks.drafter_cells import Cell, Options
from leadout.bench.statistics import Ratio
from leadout.errors import CheckpointError, ConfigError
from leadout.pipeline.folder import write_json

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A drafter trained here."""

    folder: Path
    rollouts: int
    rollout_seconds: float
    train_seconds: float
    expected_length: float
    """On held-out rollouts of the training's own data, of the kept drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The policy tuned to the task."""

    folder: Path
    updates: int | None
    rewards: tuple[float, float] | None = None
    """Mean of the first and of the last tenth of the updates; None for a given policy."""
    entropies: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What the engine saw at a fixed k."""

    length: float | None
    """Tokens per row-round that drafted; None where nothing was drafted."""
    error: float | None
    """Its standard error; rollouts are independent."""
    drafted: float
    """Share of row-rounds that drafted, of those with room for it."""
    rates: tuple[float, ...]
    """Accepted at position i, of those verified there: all before it were accepted."""
    rounds: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One drafter at one batch size, against plain decoding in turn."""

    speedup: dict[str, Ratio]
    """Tokens per second / those of plain, by contender (k=3, auto)."""
    round_cost: Ratio | None
    """Seconds of a round with k=3 / of a plain step."""
    draft_cost: float | None
    """Seconds of it spent drafting / of a plain step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Acceptance length at each step of a run; None where a step drafted nothing."""

    lengths: tuple[float | None, ...]


class Store:
    """The output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def path(self, cell: Cell) -> Path:
        """Where it lies once it is measured."""
        return self._path(f"{cell.stage}/{cell.name}")

    def has(self, name: str) -> bool:
        """Whether STAGE/NAME is measured."""
        return self._path(name).is_file()

    def read(self, kind: type[R], name: str) -> R | None:
        """The record of STAGE/NAME. Raises CheckpointError for a file that holds something else."""
        if not self.has(name):
            return None
        try:
            return TypeAdapter(kind).validate_python(self._held(name)["record"])
        except ValidationError as error:
            raise CheckpointError(
                f"{self._path(name)}: expected a {kind.__name__} record; delete it to measure it again"
            ) from error

    def write(self, cell: Cell, record: Any) -> None:
        """Whole or not at all."""
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = TypeAdapter(type(record)).dump_python(record, mode="json")
        write_json(path, {"settings": _plain(cell.settings), "record": values})

    def check(self, cell: Cell) -> None:
        """Raises ConfigError where it is measured, but with other settings."""
        if not self.path(cell).is_file():
            return
        held, now = self._held(f"{cell.stage}/{cell.name}")["settings"], _plain(cell.settings)
        wrong = sorted(key for key in held.keys() | now.keys() if held.get(key) != now.get(key))
        if wrong:
            raise ConfigError(
                f"{self.path(cell)} was measured with {wrong[0]} {held.get(wrong[0])}, now {now.get(wrong[0])}; "
                "repeat the earlier options, delete the file, or name another --out"
            )

    def _path(self, name: str) -> Path:
        return self.out / "cells" / f"{name}.json"

    def _held(self, name: str) -> dict[str, Any]:
        try:
            held: dict[str, Any] = json.loads(self._path(name).read_text(encoding="utf-8"))
            if not held.keys() >= {"settings", "record"}:
                raise ValueError("no settings or no record")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path(name)}: expected a measured cell, got {error}; delete it to measure it again"
            ) from error
        return held


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return plain


def read_options(out: Path, given: Mapping[str, Any]) -> Options:
    """Options of this call, of the folder, and the defaults, in this order; heads of both are kept.

    Raises:
        ConfigError: a value of the wrong type.

    """
    file = out / "options.json"
    held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    merged = {**held, **given}
    heads = [*held.get("head", ()), *(str(path) for path in given.get("head", ()))]
    merged["head"] = list(dict.fromkeys(heads))
    try:
        options = Options.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{name}: {first['msg']}, got {first['input']!r}") from error
    names = [path.name for path in options.head]
    if len(set(names)) != len(names):
        raise ConfigError(f"--head: expected folders of different names, got {', '.join(map(str, options.head))}")
    return options


def write_options(out: Path, options: Options) -> None:
    """Keep them for the next call."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "options.json", options.model_dump(mode="json"))
