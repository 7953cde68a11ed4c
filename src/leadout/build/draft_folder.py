"""The folder of an offline drafter training: opened for one process, and where an interrupted training stands.

Part of `leadout.build.draft_training`, which says what lies in it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leadout.errors import CheckpointError, ConfigError
from leadout.pipeline.folder import write_json
from leadout.storage import UNREADABLE

_STATE: dict[str, type] = {"trainer": dict, "done": int, "best": dict, "seconds": dict, "rows": int, "last": str}
"""What a state file holds."""


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other trainings out of a folder; raises ConfigError where one is at work."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{out}: another training is at work there; wait for it or name another folder"
            ) from error
        yield


def check_new(out: Path) -> None:
    """Refuse a folder that holds something, but for a training."""
    if out.exists() and not (out / "plan.json").is_file():
        held = not out.is_dir() or any(entry.name != ".lock" for entry in out.iterdir())
        if held:
            raise ConfigError(f"expected a new or empty folder for the draft head, got {out}; name another one")


def open_folder(out: Path, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where this very training stands, if the folder holds its beginning; a new folder is made ready.

    Raises:
        ConfigError: it holds a training with other settings.
        CheckpointError: one of its files is damaged.

    """
    file, state = out / "plan.json", out / "state.pt"
    begun = state.is_file() or (out / "rollouts").is_dir()
    if file.is_file() and begun:
        held = _read_plan(file)
        wrong = sorted(name for name in held.keys() | fingerprint.keys() if held.get(name) != fingerprint.get(name))
        if wrong:
            raise ConfigError(
                f"{out} holds a training with other settings ({', '.join(wrong)}); repeat them or name another folder"
            )
        if state.is_file():
            return _read_state(state)
    # Nothing was learnt yet: whatever was measured is measured again.
    (out / "metrics.jsonl").unlink(missing_ok=True)
    write_json(file, dict(fingerprint))
    return None


def read_metrics(out: Path, rows: int) -> str:
    """The first `rows` lines of `metrics.jsonl`; those after them belong to what is done again."""
    file = out / "metrics.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected {rows} lines, got {error}; start anew in another folder") from error
    if len(lines) < rows:
        raise CheckpointError(f"{file}: expected {rows} lines, got {len(lines)}; start anew in another folder")
    return "".join(lines[:rows])


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}; start anew in another folder") from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{file}: expected the settings of a training; start anew in another folder")
    return held


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, *UNREADABLE) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(f"{file}: expected a whole file, got {reason}; start anew in another folder") from error
    held = state if isinstance(state, dict) else {}
    odd = sorted(name for name, kind in _STATE.items() if type(held.get(name)) is not kind)
    if odd:
        raise CheckpointError(
            f"{file}: expected where a training stands, got none or something else for {', '.join(odd)}; "
            "start anew in another folder"
        )
    found: dict[str, Any] = state
    return found
