"""Where the figures of a run go: metrics.jsonl always, TensorBoard and W&B when asked for.

One row per finished step. A quantity that does not exist has no key, and what is not finite is left out (JSON has no
NaN) and counted under `nonfinite`. Strings, such as checksums, go to the JSON lines only.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from leadout.errors import CapacityError, ConfigError
from leadout.records import Stage, StepReport

Row = Mapping[str, float | int | str]


def metric_row(report: StepReport) -> dict[str, float | int | str]:
    """A step report as one flat row: `step`, `version`, its metrics, `seconds/STAGE` and `seconds/total`.

    Where stages overlap, `exposed/STAGE` too, which add up to the total.
    """
    row: dict[str, float | int | str] = {"step": report.step, "version": report.version}
    row |= {name: value for name, value in report.metrics.items() if isinstance(value, str) or math.isfinite(value)}
    nonfinite = 2 + len(report.metrics) - len(row)
    if nonfinite:
        row["nonfinite"] = nonfinite
    row |= {f"seconds/{stage}": seconds for stage, seconds in report.seconds.items()}
    if report.exposed is not None:
        row |= {f"exposed/{stage}": seconds for stage, seconds in report.exposed.items()}
    row["seconds/total"] = sum(report.wall.values())
    return row


def wall_seconds(row: Mapping[str, float], stage: Stage) -> float:
    """Seconds by which a stage made the step of a row longer."""
    return row.get(f"exposed/{stage}", row.get(f"seconds/{stage}", 0.0))


def is_disk_full(error: OSError) -> bool:
    """Whether writing failed for want of space or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class JsonLines:
    """A file of one JSON object per line that only ever ends in whole lines written by `append`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the rows, all or none.

        Raises:
            CapacityError: the disk is full; what was written of the rows is taken back.

        """
        text = memoryview("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
        before = self.size
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            self._file.truncate(before)
            self._file.seek(before)
            if is_disk_full(error):
                raise CapacityError(
                    f"disk full: expected room for {len(text)} more bytes in {self._path}; free some and resume the run"
                ) from error
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; a torn last line (no newline) is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Sink(Protocol):
    """Takes the row of each finished step."""

    def write(self, row: Row) -> None:
        """Take one row; its `step` tells where it belongs."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class JsonSink:
    """metrics.jsonl."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def write(self, row: Row) -> None:
        """Append the row; it is in the file when this returns."""
        self._lines.append([row])

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class TensorBoardSink:
    """Event files for TensorBoard, written by tensorboardX.

    Args:
        folder: where the event files go.
        first_step: rows from this step on that an earlier process left are hidden (a resumed run repeats them).

    """

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        tensorboard = _import_or_explain("tensorboardX", "tensorboardX", "tensorboard")
        self._writer = tensorboard.SummaryWriter(logdir=str(folder), purge_step=first_step)

    def write(self, row: Row) -> None:
        """Add one scalar per number."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; the run's id there is its folder's name, so that a resumed run goes on in the same place."""

    def __init__(self, folder: Path) -> None:
        wandb = _import_or_explain("wandb", "leadout[wandb]", "wandb")
        self._run = wandb.init(project="leadout", id=folder.name, name=folder.name, dir=str(folder), resume="allow")

    def write(self, row: Row) -> None:
        """Log the numbers of the row."""
        self._run.log(_numbers(row), step=int(row["step"]))

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def make_sinks(names: Sequence[str], folder: Path, first_step: int) -> list[Sink]:
    """The sinks of `log.to` other than `console`, which is no sink.

    Raises:
        ConfigError: a name is not known, or its package is not installed.

    """
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoardSink(folder / "tensorboard", first_step))
        elif name == "wandb":
            sinks.append(WandbSink(folder))
        elif name != "console":
            raise ConfigError(f"log.to: expected console, tensorboard or wandb, got {name!r}")
    return sinks


class MetricLog:
    """Writes each finished step to every sink, metrics.jsonl first."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, report: StepReport) -> None:
        """Write the step's row everywhere."""
        row = metric_row(report)
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "step" and not isinstance(value, str)}


def _import_or_explain(module: str, package: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log.to: {name} needs the package {package}, which cannot be imported ({error}); "
            f"install it (pip install '{package}') or leave {name} out"
        ) from error
