"""Copies of single rows between tensors, without an operator's fixed cost where the kernels are there.

Axes: X rows copied, Y rows of the source, Z rows of the target, F their width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.native.library import native_library


def copy_rows(
    target_ZF: torch.Tensor, to_X: npt.NDArray[np.int64], source_YF: torch.Tensor, from_X: npt.NDArray[np.int64]
) -> None:
    """Row ``to_X[x]`` of the target becomes row ``from_X[x]`` of the source, in the target's dtype; targets differ.

    Raises:
        IndexError: a row that is not there.

    """
    library = native_library() if target_ZF.device.type == source_YF.device.type == "cpu" else None
    if library is None or not target_ZF.is_contiguous() or target_ZF.shape[1] != source_YF.shape[1]:
        to, source = torch.from_numpy(to_X).to(target_ZF.device), torch.from_numpy(from_X).to(source_YF.device)
        target_ZF.index_copy_(0, to, source_YF.index_select(0, source).to(target_ZF))
        return
    library.copy_rows(target_ZF, to_X, source_YF.to(target_ZF.dtype).contiguous(), from_X)
