"""What is set once for the whole process, before anything runs: threads, memory of freed tensors, foreign output."""

from __future__ import annotations

import ctypes
import platform

import torch
import transformers

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEEP = 1 << 30
_AHEAD = 64 << 20


def prepare_process(threads: int) -> None:
    """`threads`: of PyTorch and the native kernels; 0 leaves the number alone."""
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Let glibc's allocator hand freed tensors out again; whether it could be told.

    By default it returns blocks from some megabytes on to the system at once, and fresh pages are zeroed when they are
    first touched: a tenth of a training step's processor time. The peak of memory stays what it was.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_THRESHOLD, _KEEP), (_M_TRIM_THRESHOLD, _KEEP), (_M_TOP_PAD, _AHEAD))
    return all(mallopt(name, value) for name, value in settings)
