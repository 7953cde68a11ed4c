from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from leadout.errors import CapacityError
from leadout.storage import writing

RUST = 'Error while serializing: I/O error: No space left on device (os error 28) at path "/x/.tmp1"'
TORCH = "[enforce fail at inline_container.cc:672] . unexpected pos 256 vs 150"


@pytest.mark.parametrize(
    "failure",
    [
        SafetensorError(RUST),
        RuntimeError(TORCH),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_is_told_in_one_line_that_names_the_file(failure: Exception) -> None:
    with pytest.raises(CapacityError) as caught, writing(Path("runs/x/model.safetensors")):
        raise failure
    assert str(caught.value) == (
        "disk full while writing runs/x/model.safetensors; free some space and run the same command again"
    )


@pytest.mark.parametrize(
    "failure",
    [SafetensorError("header too small"), RuntimeError("shapes differ"), PermissionError(errno.EACCES, "denied")],
)
def test_other_errors_of_writing_pass_through(failure: Exception) -> None:
    with pytest.raises(type(failure)) as caught, writing(Path("x")):
        raise failure
    assert caught.value is failure
