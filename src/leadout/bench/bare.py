"""The parts of a round timed by themselves: policy forward with its head, laws and draws, one draft position.

Nothing of the engine is around them, so a round can be held against the sum of what it must do.

Axes: B rows, N tokens of each row, H hidden size.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch

from leadout.bench.contender import Sample
from leadout.bench.limits import read_bandwidth
from leadout.bench.memory import peak_bytes
from leadout.bench.workload import Workload
from leadout.drafters.head_cache import HeadCache
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.models.sampling import ParamsBatch
from leadout.records import SamplingParams
from leadout.rollout.sampler import Sampler

Part = Callable[[], object]


def seconds_in_turn(parts: dict[str, Part], repeats: int) -> dict[str, float]:
    """Median seconds of each part, run in turn; a first turn does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


class BareParts:
    """Parts over a cache of `rows` rows that hold `context` tokens each."""

    def __init__(self, decoder: FusedDecoder, head: DraftHead | None, *, rows: int, context: int, width: int) -> None:
        """`width`: most tokens of a row in one pass; `head` None leaves out the draft."""
        self._decoder = decoder
        self._rows = rows
        self._kv = decoder.new_kv(rows, context + width)
        self._slots = self._kv.allocate(rows)
        self._kv.advance(self._slots, np.full(rows, context, np.int64))
        self._generator = torch.Generator().manual_seed(0)
        self._sampler = Sampler(rows, decoder.spec.vocab_size, decoder.device)
        self._params = ParamsBatch.of([SamplingParams(temperature=1.0)] * rows)
        self._cache: HeadCache | None = None
        if head is not None:
            self._cache = HeadCache(
                deepcopy(head).to(decoder.dtype).requires_grad_(False),
                num_slots=rows,
                max_len=context + width,
                dtype=decoder.dtype,
                device=decoder.device,
                policy_logits=decoder.logits,
            )
            self._context = context
            self._cache.lengths[:] = context
            shape = (rows, head.spec.hidden_size)
            taps = (rows, 1, head.spec.fused_size)
            self._taps_B1F = torch.randn(taps, generator=self._generator).to(decoder.dtype)
            self._features_BH = torch.randn(shape, generator=self._generator).to(decoder.dtype)

    def forward(self, width: int) -> Part:
        """The policy's pass over `width` tokens a row, logits included."""
        shape = (self._rows, width)
        tokens_BN = torch.randint(0, self._decoder.spec.vocab_size, shape, generator=self._generator)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            states = self._decoder.forward(tokens_BN, self._kv, self._slots)
            return self._decoder.logits(states.hidden_BNH.flatten(0, 1))

        return run

    def sampler(self) -> Part:
        """Laws and draws of one token a row."""
        tokens_B1 = torch.zeros((self._rows, 1), dtype=torch.int64)
        logits_BV = torch.randn((self._rows, self._decoder.spec.vocab_size), generator=self._generator)
        uniforms_B = torch.rand(self._rows, dtype=torch.float64, generator=self._generator)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            laws = self._sampler.laws(logits_BV.clone(), self._params, self._slots, tokens_B1)
            return laws.sampled.draw(uniforms_B)

        return run

    def draft(self) -> Part:
        """One position of a head that drafts step by step, logits included."""
        cache = self._cache
        assert cache is not None, "made without a head"

        @torch.inference_mode()
        def run() -> torch.Tensor:
            return cache.logits(cache.extend(self._slots, self._features_BH, self._features_BH, 0))

        return run

    def parallel_draft(self, num_drafts: int) -> Part:
        """All positions of a head that drafts them in one pass, logits included."""
        cache = self._cache
        assert cache is not None, "made without a head"
        ones_B = np.ones(self._rows, np.int64)

        @torch.inference_mode()
        def run() -> list[torch.Tensor]:
            cache.lengths[:] = self._context
            embeddings_B1H = self._features_BH[:, None]
            hidden_BKH = cache.run_parallel(self._slots, self._taps_B1F, embeddings_B1H, ones_B, num_drafts)
            return [cache.logits(hidden_BH) for hidden_BH in hidden_BKH.unbind(1)]

        return run


class BareContender:
    """The sum of some parts as a contender, so that it is timed in turn with the rounds it is compared with."""

    warm_ups = 1

    def __init__(self, name: str, parts: Sequence[tuple[Part, int]], *, inner: int = 5) -> None:
        """`parts`: each with how often it comes up in a round; timed `inner` times a sample, of which the median."""
        self.name = name
        self._parts = tuple(parts)
        self._inner = inner

    def run(self, workload: Workload, repeat: int) -> Sample:
        """One sample: the seconds of one round that gives every row one token."""
        named = {str(index): part for index, (part, _) in enumerate(self._parts)}
        seconds = seconds_in_turn(named, self._inner)
        total = sum(count * seconds[str(index)] for index, (_, count) in enumerate(self._parts))
        return Sample(seconds=total, tokens=workload.rows, peak_bytes=peak_bytes([os.getpid()]), round_seconds=total)


class StreamContender:
    """Reading a large array once, so that memory is measured in turn with the steps that wait for it.

    The memory of a shared machine is not the same from one minute to the next.
    """

    warm_ups = 1

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, workload: Workload, repeat: int) -> Sample:
        """One sample: the least seconds a byte of several readings; no tokens."""
        return Sample(seconds=1.0 / read_bandwidth(), tokens=0, peak_bytes=peak_bytes([os.getpid()]))


def bytes_per_second(readings: Sequence[Sample]) -> float:
    """The median of a `StreamContender`'s samples."""
    return 1.0 / float(np.median([reading.seconds for reading in readings]))
