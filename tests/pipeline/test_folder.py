import errno
from pathlib import Path

import pytest

from leadout.errors import CapacityError, CheckpointError, ConfigError
from leadout.pipeline.folder import RunFolder, write_json, write_text


def test_a_new_folder_holds_its_config(tmp_path):
    folder = RunFolder.create(tmp_path / "runs" / "a", "seed: 1\n")
    assert folder.config.read_text() == "seed: 1\n"
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]


def test_a_folder_with_content_is_refused_naming_resume(tmp_path):
    RunFolder.create(tmp_path / "a", "")
    with pytest.raises(
        ConfigError, match=r"but it has content; choose another name, or .* leadout train --resume .*/a"
    ):
        RunFolder.create(tmp_path / "a", "")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        RunFolder.create(tmp_path / "a", "")


def test_opening_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.yaml in it"):
        RunFolder.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_file_is_replaced_as_a_whole(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": 2})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 2\n}\n'
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    write_text(path, "old")

    def fail(self, text, encoding):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(CapacityError, match=r"expected room for 3 bytes in .*x\.txt"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
