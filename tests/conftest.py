"""Fixtures of every test that runs a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from leadout.cli.main import run


@pytest.fixture
def leadout_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process: its exit code, and what it wrote to stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leadout", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
