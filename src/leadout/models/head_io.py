"""Draft heads of any kind, to and from their folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from leadout.models.draft_head import DraftHead
from leadout.models.eagle3 import Eagle3Head, ParallelHead
from leadout.models.eagle3_io import read_eagle3, read_spec, write_eagle3
from leadout.models.head_files import read_fields
from leadout.models.mtp import MtpHead
from leadout.models.mtp_io import read_mtp, write_mtp


def is_head(folder: Path) -> bool:
    """Whether a folder's config is that of a draft head rather than of a model."""
    fields = read_fields(folder)
    architectures = str(fields.get("architectures", "")).lower()
    return "eagle" in architectures or "mtp" in architectures or "speculators_model_type" in fields


def method_of(folder: Path) -> str:
    """The kind of a head, from its config alone. Raises ModelError where there is no head."""
    if read_fields(folder).get("num_nextn_predict_layers") not in (None, 0):
        return MtpHead.method
    return (Eagle3Head if read_spec(folder).mask_token_id is None else ParallelHead).method


def read_head(folder: Path, *, policy: Mapping[str, Tensor] | None = None, num_layers: int | None = None) -> DraftHead:
    """A head in the dtype of its file; raises ModelError as the readers of its kind do."""
    if read_fields(folder).get("num_nextn_predict_layers") not in (None, 0):
        return read_mtp(folder, policy=policy, num_layers=num_layers)
    return read_eagle3(folder, policy=policy, num_layers=num_layers)


def write_head(head: DraftHead, folder: Path) -> None:
    """Write a head in its own form; each file appears whole or not at all."""
    if isinstance(head, MtpHead):
        write_mtp(head, folder)
    else:
        assert isinstance(head, Eagle3Head), "every head has a form"
        write_eagle3(head, folder)
