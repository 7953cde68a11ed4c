"""The folder of a run: what lies where, and how it begins.

runs/NAME/
  config.yaml      the resolved recipe
  metrics.jsonl    one row per step
  rollouts.jsonl   one line per rollout
  checkpoints/     step_000010/, … (`leadout.pipeline.checkpoint`)
  closing.json     the closing comparison
  report.html
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from leadout.errors import CapacityError, CheckpointError, ConfigError
from leadout.metrics import is_disk_full


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: into a temporary name beside it, then renamed.

    Raises:
        CapacityError: the disk is full.

    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise CapacityError(
                f"disk full: expected room for {len(text)} bytes in {path}; free some and try again"
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as a JSON file, whole or not at all; raises CapacityError as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


class RunFolder:
    """Paths inside one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.checkpoints = path / "checkpoints"
        self.closing = path / "closing.json"
        self.report = path / "report.html"

    @property
    def resume_command(self) -> str:
        """What to type to go on with this run."""
        return f"leadout train --resume {self.path}"

    @classmethod
    def create(cls, path: Path, config_text: str) -> RunFolder:
        """A new folder with its config.yaml.

        Raises:
            ConfigError: something is there already.
            CapacityError: the disk is full.

        """
        folder = cls(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"run folder {path}: expected a new or empty folder, but it has content; "
                f"choose another name, or go on with that run: {folder.resume_command}"
            )
        path.mkdir(parents=True, exist_ok=True)
        write_text(folder.config, config_text)
        return folder

    def discard_if_unused(self) -> None:
        """Remove the folder if no step was finished in it, so that the same command can be given again."""
        used = self.metrics.exists() and self.metrics.stat().st_size > 0
        if not used and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir())):
            shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run to resume or to report on.

        Raises:
            CheckpointError: it is not a run folder.

        """
        folder = cls(path)
        if not folder.config.is_file():
            found = "no such folder" if not path.exists() else "no config.yaml in it"
            raise CheckpointError(
                f"expected the folder of a run, got {path} ({found}); name a folder such as runs/NAME"
            )
        return folder
