import errno
import json
import math
import sys

import pytest

from leadout.errors import CapacityError, ConfigError
from leadout.metrics import JsonLines, JsonSink, MetricLog, TensorBoardSink, make_sinks, metric_row, read_rows
from leadout.records import Stage, StepReport


def report(**metrics):
    return StepReport(step=3, version=2, seconds={Stage.ROLLOUT: 2.0, Stage.TRAIN: 1.0}, metrics=metrics)


def test_row_holds_step_version_metrics_and_seconds():
    assert metric_row(report(reward=0.5, **{"draft/checksum": "00ff"})) == {
        "step": 3,
        "version": 2,
        "reward": 0.5,
        "draft/checksum": "00ff",
        "seconds/rollout": 2.0,
        "seconds/train": 1.0,
        "seconds/total": 3.0,
    }


def test_nonfinite_values_are_left_out_and_counted():
    row = metric_row(report(loss=math.nan, kl=math.inf, reward=1.0))
    assert (row["nonfinite"], row["reward"]) == (2, 1.0)
    assert "loss" not in row and "kl" not in row


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    MetricLog([JsonSink(lines)]).write(report(reward=0.25))
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.25]
    lines.close()


def test_lines_are_appended_to_what_is_there(tmp_path):
    path = tmp_path / "x.jsonl"
    for number in (1, 2):
        lines = JsonLines(path)
        lines.append([{"a": number}])
        lines.close()
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_torn_last_line_is_not_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert read_rows(path) == [{"a": 1}]


class FullDisk:
    """A file that takes `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return self.file.write(data[:taken])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path)
    lines.append([{"a": 1}])
    lines._file = FullDisk(lines._file, room=4)
    with pytest.raises(CapacityError, match=r"disk full: expected room for .* more bytes in .*x\.jsonl"):
        lines.append([{"a": 2}, {"a": 3}])
    lines.close()
    assert path.read_text() == '{"a": 1}\n'


def test_tensorboard_gets_the_numbers_and_not_the_strings(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write({"step": 1, "reward": 0.5, "draft/checksum": "00ff"})
    sink.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "tb").iterdir())
    assert b"reward" in written
    assert b"00ff" not in written and b"checksum" not in written


class FakeWandb:
    """The part of wandb that is used."""

    def __init__(self):
        self.inits, self.logged, self.finished = [], [], False

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_gets_the_numbers_under_the_folders_name(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (sink,) = make_sinks(["console", "wandb"], tmp_path / "run7", first_step=1)
    sink.write({"step": 4, "reward": 0.5, "draft/checksum": "00ff"})
    sink.close()
    assert (wandb.inits[0]["id"], wandb.inits[0]["resume"]) == ("run7", "allow")
    assert (wandb.logged, wandb.finished) == ([(4, {"reward": 0.5})], True)


def test_a_missing_logger_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb needs the package leadout\[wandb\].*pip install"):
        make_sinks(["wandb"], tmp_path, first_step=1)


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected console, tensorboard or wandb, got 'mlflow'"):
        make_sinks(["mlflow"], tmp_path, first_step=1)


def test_rows_are_valid_json(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError):
        lines.append([{"a": math.nan}])
    lines.close()
    assert (tmp_path / "m.jsonl").read_text() == ""
    assert json.loads(json.dumps(metric_row(report(loss=math.nan)), allow_nan=False))["nonfinite"] == 1
