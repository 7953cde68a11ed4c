"""A full disk, told the same way whoever writes: libraries that save tensors report it in words of their own.

`safetensors` raises a `SafetensorError` and `torch.save` a `RuntimeError`; neither is an `OSError`, and neither names
the file. Whoever saves tensors does so inside `writing`.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from leadout.errors import CapacityError

UNREADABLE = (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError)
"""What reading pickled data may raise where the file was never written as such."""

_FULL = ("os error 28", "code: 28", "StorageFull", os.strerror(errno.ENOSPC), "os error 122", os.strerror(errno.EDQUOT))
_TORCH_FULL = ("unexpected pos", "PytorchStreamWriter failed writing")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Save tensors to `path` inside of this block.

    Example: ``with writing(path): save_file(tensors, path)``

    Raises:
        CapacityError: the disk is full; names `path`. Other errors pass through as they are.

    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_disk_full(error):
            raise
        raise CapacityError(
            f"disk full while writing {path}; free some space and run the same command again"
        ) from error


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    known = _FULL if isinstance(error, SafetensorError) else (*_FULL, *_TORCH_FULL)
    return any(words in str(error) for words in known)
