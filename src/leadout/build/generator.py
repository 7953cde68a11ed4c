"""The native generator from its section: decoder, caches, draft length, and how a weight update is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from leadout.build.drafter import drafter_bytes_per_slot, make_drafter
from leadout.config import RolloutSection, SpeculativeConfig
from leadout.draft_length.controller import DraftLength, FixedLength, GoodputLength
from leadout.draft_length.costs import CostProfile
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.drafters.recorder import StateRecorder
from leadout.drafters.small_model import SmallModelDrafter
from leadout.errors import CapacityError, ConfigError
from leadout.interfaces import Drafter
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.models.kv import KVSlots
from leadout.models.spec import DecoderSpec
from leadout.records import DraftSpec, RefitReport, WeightUpdate
from leadout.refit.apply import receive
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts
from leadout.text import TextCodec
from leadout.train.students import small_model_spec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_SAFETENSORS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntDraft:
    """What updates of a drafter that learns must bring."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name without ``draft.``."""
    spec: DraftSpec

    @classmethod
    def of_head(cls, head: DraftHead) -> Self:
        """Of a draft head."""
        return cls(shapes={n: tuple(t.shape) for n, t in head.state_dict().items()}, spec=head.draft_spec())

    @classmethod
    def of_small_model(cls, drafter: Drafter) -> Self:
        """Of a small model, alone or behind history."""
        small = drafter.model if isinstance(drafter, CombinedDrafter) else drafter
        assert isinstance(small, SmallModelDrafter), "the method drafts with a small model"
        decoder = small.decoder
        spec = small_model_spec(decoder.spec.rope, small.vocab_size)
        return cls(shapes=decoder.expected_shapes(), spec=spec)


@dataclass(slots=True, kw_only=True)
class UpdateGate:
    """Checks each update against what is resident, then loads it."""

    decoder: FusedDecoder
    drafter: Drafter | None
    learnt: LearntDraft | None
    """What the drafter's weights must be where they come with the updates; None where they do not."""
    version: int = 0
    draft_version: int = 0

    def __call__(self, update: WeightUpdate) -> RefitReport:
        """Apply; raises RefitError, with the old weights still serving, when anything is off."""
        received = receive(
            update,
            self.decoder.expected_shapes(),
            None if self.learnt is None else self.learnt.shapes,
            None if self.learnt is None else self.learnt.spec,
            dtype=_SAFETENSORS[self.decoder.dtype],
            held_version=self.version,
            held_draft_version=self.draft_version,
        )
        self.decoder.load(received.policy)
        if self.learnt is not None:
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
    head: DraftHead | None = None,
    learns_draft: bool = False,
    recorder: StateRecorder | None = None,
) -> NativeGenerator:
    """A generator for up to `num_rows` rows at once, fewer where the cache's memory is bounded.

    `recorder` keeps the policy's states; for generators without speculation.
    """
    speculation = section.speculative_config
    of_drafter = 0 if speculation is None else drafter_bytes_per_slot(speculation, decoder, head)
    slots = num_slots(decoder.spec, section, num_rows, decoder.max_len, of_drafter)
    assert speculation is None or recorder is None, "states are kept of plain rounds"
    drafter: Drafter | None = recorder
    if speculation is not None:
        drafter = make_drafter(speculation, decoder, head, codec, num_slots=slots)
    learnt = None
    if learns_draft:
        assert drafter is not None, "only a drafter learns"
        learnt = LearntDraft.of_small_model(drafter) if head is None else LearntDraft.of_head(head)
    return NativeGenerator(
        EngineParts(
            decoder=decoder,
            kv=decoder.new_kv(slots),
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
        apply_update=UpdateGate(decoder=decoder, drafter=drafter, learnt=learnt),
    )


def num_slots(spec: DecoderSpec, section: RolloutSection, num_rows: int, max_len: int, of_drafter: int = 0) -> int:
    """Rows at once: what is asked for, as many as fit the memory. Raises CapacityError when not even one fits.

    `of_drafter`: bytes that the drafter takes for each row.
    """
    each = KVSlots.bytes_per_slot(spec, max_len, DTYPES[section.dtype]) + of_drafter
    fitting = int(section.kv_cache_memory * GIB // each)
    if fitting < 1:
        raise CapacityError(
            f"rollout.kv_cache_memory: {section.kv_cache_memory} GiB holds no row of {max_len} tokens, which needs "
            f"{each / GIB:.3f} GiB; raise it or lower rollout.max_model_len"
        )
    return min(section.max_num_seqs or num_rows, num_rows, fitting)


def make_draft_length(speculation: SpeculativeConfig | None) -> DraftLength:
    """A fixed k, or the goodput rule."""
    if speculation is None:
        return FixedLength(0)
    if speculation.num_speculative_tokens != "auto":
        return FixedLength(speculation.num_speculative_tokens)
    profile = speculation.leadout.cost_profile
    costs = None if profile is None else CostProfile.read(profile, speculation.method)
    return GoodputLength(speculation.leadout.max_draft_length, costs)
