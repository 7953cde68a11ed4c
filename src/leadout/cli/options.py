"""Checks of option values that typer does not make."""

from __future__ import annotations

import math
import os
from pathlib import Path

import typer

from leadout.errors import ConfigError


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which pass every bound that typer checks."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def check_target(path: Path | None, option: str) -> None:
    """Before the work, not after it: raises ConfigError where `option` names a file that cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is not there"
        raise ConfigError(f"{option}: expected a file in a folder that exists, {path} {problem}; name another file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option}: expected a regular file, {path} is a device or a pipe; name another file")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option}: expected a folder to write in, {path.parent} is read-only; name another file")
