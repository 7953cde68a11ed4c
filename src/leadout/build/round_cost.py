"""What a speculative round costs on this machine, in units of a plain step at the same number of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leadout.build.data import sampling_params
from leadout.build.generator import make_generator
from leadout.config import RolloutSection, SpeculativeConfig
from leadout.draft_length.controller import FixedLength
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.records import Prompt, Request
from leadout.rollout.engine import NativeGenerator
from leadout.text import TextCodec

_STEPS = 24
_PAIRS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Of `rows` rows at once."""

    rows: int
    round_cost: float
    """Seconds of a round / seconds of a plain step; acceptance length / this is the expected speedup."""


def measure_round_costs(
    decoder: FusedDecoder,
    codec: TextCodec,
    section: RolloutSection,
    head: DraftHead | None,
    prompt: Prompt,
    *,
    speculation: SpeculativeConfig,
    rows: tuple[int, ...] = (1, 8),
) -> list[RoundCost]:
    """Time plain steps and rounds in turn; weights do not matter, so an untrained head gives the costs of a trained.

    `speculation`: method, model and k of the rounds; `head` where the method has one.
    """
    section = section.model_copy(update={"speculative_config": speculation})
    costs = []
    for count in rows:
        speculative = make_generator(decoder, codec, section, num_rows=count, head=head)
        plain = speculative.variant(FixedLength(0), drafts=False)
        room = decoder.max_len - len(prompt.token_ids)
        params = replace(
            sampling_params(section, codec, 0), stop=(), stop_token_ids=(), max_new_tokens=min(_STEPS, room)
        )
        ratios = []
        for pair in range(_PAIRS + 1):
            requests = make_requests([prompt], params, count, first_draw=pair)
            ratios.append(_seconds_per_round(speculative, requests) / _seconds_per_round(plain, requests))
        # The first pair warms up.
        costs.append(RoundCost(rows=count, round_cost=float(np.median(ratios[1:]))))
    return costs


def _seconds_per_round(generator: NativeGenerator, requests: Sequence[Request]) -> float:
    began = time.perf_counter()
    rollouts = generate(generator, requests)
    seconds = time.perf_counter() - began
    return seconds / max(max(len(rollout.rounds.drafted) for rollout in rollouts), 1)
