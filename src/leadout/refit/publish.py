"""Stage refit, sending half: the learner's present weights become a `WeightUpdate`.

Names are Hugging Face's, tensors that share their memory are sent once (under the name that comes first), the drafter
goes under ``draft.``. The update is a snapshot: training may go on while it is on its way.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from leadout.records import DraftSpec, TensorSpec, WeightUpdate

DRAFT_PREFIX = "draft."

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
"""Names as in safetensors."""


def tensor_crc32(tensor: Tensor) -> int:
    """zlib.crc32 of a tensor's bytes, row-major."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def weight_update(
    *,
    policy: Mapping[str, Tensor],
    version: int,
    draft: Mapping[str, Tensor] | None = None,
    draft_version: int = 0,
    draft_spec: DraftSpec | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> WeightUpdate:
    """Snapshot policy and drafter.

    Args:
        policy: State dict in Hugging Face names.
        version: Number of finished train stages.
        draft: State dict of the drafter, or None.
        draft_version: Number of train stages in which the drafter learnt.
        draft_spec: What is fixed for the drafter's life; needed with `draft`.
        dtype: What floating-point tensors are cast to, the generator's own; integers and booleans stay.

    """
    assert (draft is None) == (draft_spec is None), "drafter weights and their spec come together"
    tensors = dict(_cast(_once(policy), dtype))
    if draft is not None:
        tensors.update((DRAFT_PREFIX + name, tensor) for name, tensor in _cast(_once(draft), dtype))
    manifest = {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=DTYPE_NAMES[tensor.dtype], crc32=tensor_crc32(tensor))
        for name, tensor in tensors.items()
    }
    return WeightUpdate(
        version=version,
        draft_version=draft_version,
        manifest=manifest,
        chunks=iter(tensors.items()),
        draft_spec=draft_spec,
    )


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those that are the very memory of an earlier one (a tied head)."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    kept = {}
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        kept[name] = tensor
    return kept


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        target = dtype if tensor.is_floating_point() else tensor.dtype
        yield name, tensor.detach().to(dtype=target, copy=True).contiguous()
