"""What a recipe names, loaded and checked before any large object is made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from leadout.build.data import EVALUATION_SEED, LoadedData, load_data, sampling_params
from leadout.config import RunConfig
from leadout.models.loading import read_spec, resolve
from leadout.models.spec import DecoderSpec
from leadout.records import SamplingParams
from leadout.text import TextCodec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a recipe names, loaded and checked, before any large object is made."""

    path: Path
    spec: DecoderSpec
    codec: TextCodec
    data: LoadedData
    held_out: LoadedData | None
    params: SamplingParams

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of all sets."""
        return max(self.data.longest, 0 if self.held_out is None else self.held_out.longest)


def load_inputs(config: RunConfig, console: Console) -> Inputs:
    """Model folder, tokenizer, prompts and sampling of a recipe."""
    path = resolve(config.model, progress=console.print)
    spec = read_spec(path)
    codec = TextCodec.from_pretrained(path if config.tokenizer is None else resolve(config.tokenizer))
    context = config.rollout.max_model_len or spec.max_position_embeddings
    data = load_data(config.data.train, config.data, codec, seed=config.seed, context=context)
    held_out = None
    if config.data.eval is not None and config.eval.every:
        held_out = load_data(
            config.data.eval,
            config.data,
            codec,
            seed=config.seed + EVALUATION_SEED,
            context=context,
            setting="data.eval.path",
        )
    dropped = data.prompts.num_dropped + (0 if held_out is None else held_out.prompts.num_dropped)
    if dropped:
        console.print(f"{dropped} prompts were too long and left out (data.overlong: drop)")
    params = sampling_params(config.rollout, codec, config.seed)
    if params.has_filters or params.has_penalties:
        logger.warning(
            "rollouts are drawn with filters or penalties, but trained on as draws from softmax(logits / temperature): "
            "the gradient is biased; set top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 to avoid it"
        )
    return Inputs(path=path, spec=spec, codec=codec, data=data, held_out=held_out, params=params)
