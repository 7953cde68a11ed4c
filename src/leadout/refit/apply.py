"""Stage refit, receiving half: a `WeightUpdate` is checked whole before any of it is used.

The generator calls `receive`, loads what it returns and answers with the report. A missing, unknown, misshapen or
corrupt tensor, an older version or another drafter raises `RefitError` and leaves the resident weights as they are.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from leadout.errors import RefitError
from leadout.records import DraftSpec, RefitReport, TensorSpec, WeightUpdate
from leadout.refit.publish import DRAFT_PREFIX, DTYPE_NAMES, tensor_crc32

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A checked update."""

    policy: dict[str, Tensor]
    """Every policy tensor, in Hugging Face names."""
    draft: dict[str, Tensor]
    """Every drafter tensor, names without ``draft.``; empty without one."""
    report: RefitReport
    """What to answer once the weights serve."""


def receive(
    update: WeightUpdate,
    policy_shapes: Shapes,
    draft_shapes: Shapes | None = None,
    draft_spec: DraftSpec | None = None,
    *,
    dtype: str | None = None,
    held_version: int = 0,
    held_draft_version: int = 0,
) -> Received:
    """Take all tensors of an update and check them.

    Args:
        update: Its chunks are consumed.
        policy_shapes: Shape of every policy tensor the generator serves.
        draft_shapes: The same for its drafter, names without ``draft.``; None when it takes no drafter weights.
        draft_spec: The resident drafter's fixed part; None when it takes no drafter weights.
        dtype: What floating-point tensors must be ("BF16", "F32", ...); None takes any.
        held_version: Policy version now resident.
        held_draft_version: Drafter version now resident.

    Raises:
        RefitError: naming what is missing, extra, misshapen, of another type or corrupt, or which version or drafter
            was expected.

    """
    expected = dict(policy_shapes)
    if draft_shapes is not None:
        expected.update((DRAFT_PREFIX + name, shape) for name, shape in draft_shapes.items())
    _check_versions(update, held_version, held_draft_version)
    if update.draft_spec != draft_spec:
        raise RefitError(
            f"expected weights of the drafter {draft_spec}, got {update.draft_spec}; start a new run for it"
        )
    _check_names("weight update", expected, update.manifest)
    _check_manifest(update.manifest, expected, dtype)
    tensors = _take(update)
    _check_names("weight stream", expected, tensors)
    policy = {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT_PREFIX)}
    draft = {name.removeprefix(DRAFT_PREFIX): t for name, t in tensors.items() if name.startswith(DRAFT_PREFIX)}
    crcs = {name: spec.crc32 for name, spec in update.manifest.items()}
    report = RefitReport(
        version=update.version,
        draft_version=update.draft_version,
        checksum=combined_checksum((name, crcs[name]) for name in policy),
        draft_checksum=combined_checksum((name, crcs[DRAFT_PREFIX + name]) for name in draft) if draft else None,
    )
    return Received(policy=policy, draft=draft, report=report)


def combined_checksum(crcs: Iterable[tuple[str, int]]) -> str:
    """crc32 over tensors' crc32s (32-bit little-endian) in name order, as 8 hex digits."""
    total = 0
    for _, crc in sorted(crcs):
        total = zlib.crc32(struct.pack("<I", crc), total)
    return f"{total:08x}"


def _check_versions(update: WeightUpdate, held: int, held_draft: int) -> None:
    if update.version < held:
        raise RefitError(f"expected policy weights of version {held} or later, got version {update.version}")
    if update.draft_version < held_draft:
        raise RefitError(f"expected drafter weights of version {held_draft} or later, got {update.draft_version}")


def _check_names(what: str, expected: Iterable[str], got: Iterable[str]) -> None:
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or extra:
        raise RefitError(f"{what}: missing {_listed(missing)}; unexpected {_listed(extra)}")


def _listed(names: list[str], shown: int = 6) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _check_manifest(manifest: Mapping[str, TensorSpec], expected: Shapes, dtype: str | None) -> None:
    for name, spec in manifest.items():
        if spec.shape != tuple(expected[name]):
            raise RefitError(f"weight update: expected {name} of shape {tuple(expected[name])}, got {spec.shape}")
        if dtype is not None and spec.dtype not in (dtype, "I64", "BOOL"):
            raise RefitError(f"weight update: expected {name} in {dtype}, got {spec.dtype}")


def _take(update: WeightUpdate) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in update.chunks:
        if name in tensors or name not in update.manifest:
            raise RefitError(f"weight stream: expected each tensor of the manifest once, got {name} beside them")
        spec = update.manifest[name]
        if tuple(tensor.shape) != spec.shape or DTYPE_NAMES.get(tensor.dtype) != spec.dtype:
            raise RefitError(
                f"weight stream: expected {name} as {spec.dtype} {spec.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        crc = tensor_crc32(tensor)
        if crc != spec.crc32:
            raise RefitError(f"weight stream: {name} is corrupt, expected crc32 {spec.crc32:08x}, got {crc:08x}")
        tensors[name] = tensor
    return tensors
