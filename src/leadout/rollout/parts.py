"""The objects an engine is made of; the audit builds one with a faulty part, users get the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from leadout.draft_length.controller import DraftLength, FixedLength
from leadout.interfaces import Drafter, Stateful
from leadout.models.kv import KVSlots
from leadout.models.sampling import ParamsBatch
from leadout.models.states import DecoderStates
from leadout.records import SamplingParams
from leadout.rollout.accept import AcceptRule, verify
from leadout.rollout.rows import StopWatchFactory
from leadout.rollout.sampler import Laws, Sampler


class PolicyDecoder(Protocol):
    """The policy's forward pass; `leadout.models.decoder.FusedDecoder` in production, scripted models in tests."""

    def forward(
        self,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...] = (),
        counts_B: npt.NDArray[np.int64] | None = None,
        *,
        newest: bool = False,
    ) -> DecoderStates:
        """Final-norm states (and tapped layer inputs) of new tokens appended after each slot's cached ones.

        `newest`: only the states of each row's last token that is not padding, [B, 1, H].
        """
        ...

    def logits(self, hidden_XH: torch.Tensor) -> torch.Tensor:
        """[X, V] in fp32 (fp64 in float64)."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take new weights."""
        ...

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes `load` wants."""
        ...


class LawMaker(Protocol):
    """Makes the laws of a round; `leadout.rollout.sampler.Sampler` in production."""

    def admit(self, slot: int, params: SamplingParams, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Start a row's history."""
        ...

    def observe(self, slots: Sequence[int], params: Sequence[SamplingParams], tokens: Sequence[torch.Tensor]) -> None:
        """Take committed tokens."""
        ...

    def laws(self, logits_XV: torch.Tensor, batch: ParamsBatch, slots: Sequence[int], tokens_BN: torch.Tensor) -> Laws:
        """Laws after each column of `tokens_BN`."""
        ...


SamplerFactory = Callable[[int, int, torch.device], LawMaker]


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What `NativeGenerator` is built from."""

    decoder: PolicyDecoder
    kv: KVSlots
    vocab_size: int
    max_len: int
    """Prompt plus completion tokens of one row."""
    device: torch.device
    dtype: torch.dtype
    drafter: Drafter | None = None
    history: Stateful | None = None
    """What of the drafter must survive a resume; None for drafters that remember nothing but weights."""
    draft_length: DraftLength = field(default_factory=lambda: FixedLength(0))
    stop_watch: StopWatchFactory | None = None
    """Makes a watcher of stop strings; without one, requests with stop strings are refused."""
    rule: AcceptRule = verify
    sampler: SamplerFactory = Sampler
    prefill_tokens: int = 2048
    """Padded prompt tokens of one prefill pass."""
    prefill_chunk: int = 256
    """Of these, tokens that run between two rounds of rows that are decoding."""
