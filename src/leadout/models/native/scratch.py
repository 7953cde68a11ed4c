"""Memory for large results that is used again once nobody holds the last one."""

from __future__ import annotations

import sys

import numpy as np
import torch

_OWN_REFERENCES = 2
_NONE = np.empty((0, 0), np.float32)


class Scratch:
    """Memory for logits that is used again once no tensor refers to it.

    A fresh array of megabytes is a page fault for every 4 KB: 7 % of a step of 64 rows.
    """

    def __init__(self) -> None:
        self._array = np.empty(0, np.float32)
        self._shaped = _NONE

    def take(self, num_rows: int, stride: int) -> torch.Tensor:
        """f32[num_rows, stride], not initialised."""
        # A tensor made by `from_numpy` holds a reference; two are the attribute and the argument of getrefcount.
        if self._shaped.shape != (num_rows, stride) or sys.getrefcount(self._shaped) > _OWN_REFERENCES:
            # The shaped array refers to the flat one.
            self._shaped = _NONE
            if self._array.size < num_rows * stride or sys.getrefcount(self._array) > _OWN_REFERENCES:
                self._array = np.empty(num_rows * stride, np.float32)
            self._shaped = self._array[: num_rows * stride].reshape(num_rows, stride)
        return torch.from_numpy(self._shaped)
