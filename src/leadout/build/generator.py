"""The native generator from its section: decoder, caches, draft length, and how a weight update is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from leadout.build.drafter import draft_shapes, make_drafter
from leadout.config import RolloutSection, SpeculativeConfig
from leadout.draft_length.controller import DraftLength, FixedLength, GoodputLength
from leadout.draft_length.costs import CostProfile
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.errors import CapacityError, ConfigError
from leadout.interfaces import Drafter
from leadout.models.decoder import FusedDecoder
from leadout.models.eagle3 import Eagle3Head
from leadout.models.kv import KVSlots
from leadout.models.spec import DecoderSpec
from leadout.records import RefitReport, WeightUpdate
from leadout.refit.apply import receive
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts
from leadout.text import TextCodec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_SAFETENSORS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
_GIB = 1 << 30


@dataclass(slots=True, kw_only=True)
class UpdateGate:
    """Checks each update against what is resident, then loads it."""

    decoder: FusedDecoder
    drafter: Drafter | None
    head: Eagle3Head | None
    """The drafter's head where its weights come with the updates; None where they do not."""
    version: int = 0
    draft_version: int = 0

    def __call__(self, update: WeightUpdate) -> RefitReport:
        """Apply; raises RefitError, with the old weights still serving, when anything is off."""
        received = receive(
            update,
            self.decoder.expected_shapes(),
            None if self.head is None else draft_shapes(self.head),
            None if self.head is None else self.head.draft_spec(),
            dtype=_SAFETENSORS[self.decoder.dtype],
            held_version=self.version,
            held_draft_version=self.draft_version,
        )
        self.decoder.load(received.policy)
        if self.head is not None:
            assert self.drafter is not None
            self.drafter.load(received.draft, update.draft_version)
        self.version, self.draft_version = update.version, update.draft_version
        return received.report


def make_device(name: str) -> torch.device:
    """Where policy, drafter and engine live. Raises ConfigError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda needs a GPU that PyTorch can use, and there is none; set device: cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def make_decoder(
    spec: DecoderSpec,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: str,
    max_len: int,
    device: torch.device,
    native: bool | None = None,
) -> FusedDecoder:
    """The generating policy with its first weights; `native` as in `FusedDecoder`."""
    decoder = FusedDecoder(spec, dtype=DTYPES[dtype], device=device, max_len=max_len, native=native)
    decoder.load(weights)
    return decoder


def make_generator(
    decoder: FusedDecoder,
    codec: TextCodec,
    section: RolloutSection,
    *,
    num_rows: int,
    head: Eagle3Head | None = None,
    learns_draft: bool = False,
) -> NativeGenerator:
    """A generator for up to `num_rows` rows at once, fewer where the cache's memory is bounded."""
    slots = num_slots(decoder.spec, section, num_rows, decoder.max_len)
    speculation = section.speculative_config
    drafter = None
    if speculation is not None:
        drafter = make_drafter(speculation, decoder, head, codec, num_slots=slots)
    return NativeGenerator(
        EngineParts(
            decoder=decoder,
            kv=KVSlots(decoder.spec, slots, decoder.max_len, decoder.dtype, decoder.device),
            vocab_size=decoder.spec.vocab_size,
            max_len=decoder.max_len,
            device=decoder.device,
            dtype=decoder.dtype,
            drafter=drafter,
            history=drafter if isinstance(drafter, HistoryDrafter | CombinedDrafter) else None,
            draft_length=make_draft_length(speculation),
            stop_watch=codec.stop_watch,
        ),
        num_slots=slots,
        apply_update=UpdateGate(decoder=decoder, drafter=drafter, head=head if learns_draft else None),
    )


def num_slots(spec: DecoderSpec, section: RolloutSection, num_rows: int, max_len: int) -> int:
    """Rows at once: what is asked for, as many as fit the memory. Raises CapacityError when not even one fits."""
    each = KVSlots.bytes_per_slot(spec, max_len, DTYPES[section.dtype])
    fitting = int(section.kv_cache_memory * _GIB // each)
    if fitting < 1:
        raise CapacityError(
            f"rollout.kv_cache_memory: {section.kv_cache_memory} GiB holds no row of {max_len} tokens, which needs "
            f"{each / _GIB:.3f} GiB; raise it or lower rollout.max_model_len"
        )
    return min(section.max_num_seqs or num_rows, num_rows, fitting)


def make_draft_length(speculation: SpeculativeConfig | None) -> DraftLength:
    """A fixed k, or the goodput rule."""
    if speculation is None:
        return FixedLength(0)
    if speculation.num_speculative_tokens != "auto":
        return FixedLength(speculation.num_speculative_tokens)
    profile = speculation.leadout.cost_profile
    return GoodputLength(speculation.leadout.max_draft_length, None if profile is None else CostProfile.read(profile))
