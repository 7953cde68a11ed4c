"""What this machine can do at most: bytes streamed from memory a second, operations of large products a second.

A plain step at batch 1 reads every weight once, so bytes of weights / streaming rate is the least it can take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

_READ_BYTES = 512 << 20
"""Far beyond any cache."""
_SIZE = 1536
_REPEATS = 5


def read_bandwidth(num_bytes: int = _READ_BYTES, repeats: int = _REPEATS) -> float:
    """Bytes per second of reading an array once, with the threads of torch; the best of several loops and repeats."""
    # numpy asks for huge pages, through which memory streams faster.
    array = torch.from_numpy(np.ones(num_bytes // 4, np.float32))
    whole = array.view(torch.int32)
    loops: tuple[Callable[[], object], ...] = (array.sum, whole.amax, lambda: torch.dot(array, array))
    return max(num_bytes / _least_seconds(loop, repeats) for loop in loops)


def product_flops(size: int = _SIZE, repeats: int = _REPEATS) -> float:
    """Multiplications and additions per second of a square bfloat16 product."""
    a = torch.ones((size, size), dtype=torch.bfloat16)
    return 2.0 * size**3 / _least_seconds(lambda: torch.mm(a, a), repeats)


def _least_seconds(loop: Callable[[], object], repeats: int) -> float:
    loop()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        loop()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
