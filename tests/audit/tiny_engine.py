"""The native engine over a tiny random Llama, with the drafter of the audit, and its teacher-forced scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from leadout.audit.faults import Fault
from leadout.audit.observe import Scores
from leadout.draft_length.controller import FixedLength
from leadout.drafters.noisy_policy import NoisyPolicyDrafter
from leadout.interfaces import Generator
from leadout.models.decoder import FusedDecoder
from leadout.models.kv import KVSlots
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt, Request, Rollout, RolloutId, SamplingParams
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts

VOCAB = 64
EOS = 2
MAX_LEN = 64
SLOTS = 48
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def make_decoder(dtype: torch.dtype = torch.float32) -> FusedDecoder:
    """Random weights with logits of standard deviation about 2."""
    decoder = FusedDecoder(DecoderSpec.from_config(CONFIG), dtype=dtype, max_len=MAX_LEN + 8)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in decoder.expected_shapes().items():
        scale = 2.0 / shape[-1] ** 0.5 if len(shape) == 2 else 0.0
        tensors[name] = scale * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
    tensors["model.embed_tokens.weight"] *= 3.0
    decoder.load(tensors)
    return decoder


def make_parts(decoder: FusedDecoder, *, num_drafts: int = 3, noise: float = 0.8) -> EngineParts:
    """k = 3 drafts of the noisy policy."""
    kvs = [KVSlots(decoder.spec, SLOTS, MAX_LEN + 8, decoder.dtype) for _ in range(2)]
    drafter = NoisyPolicyDrafter(decoder, kvs[1], vocab_size=VOCAB, hidden_size=32, noise=noise)
    return EngineParts(
        decoder=decoder,
        kv=kvs[0],
        vocab_size=VOCAB,
        max_len=MAX_LEN + 8,
        device=torch.device("cpu"),
        dtype=decoder.dtype,
        drafter=drafter,
        draft_length=FixedLength(num_drafts),
    )


def make_generator(decoder: FusedDecoder, fault: Fault | None, params: SamplingParams) -> Generator:
    """The engine, faulty or not."""
    parts = make_parts(decoder)
    if fault is not None:
        parts = fault.install(parts, params)
    engine = NativeGenerator(parts, num_slots=SLOTS, apply_update=None)  # type: ignore[arg-type]
    return engine if fault is None else fault.wrap(engine)


def make_requests(params: SamplingParams, num_draws: int, num_siblings: int = 4) -> list[Request]:
    """Short random prompts."""
    rng = np.random.default_rng(5)
    requests = []
    for draw in range(num_draws):
        prompt = Prompt(id=f"t/{draw}", token_ids=rng.integers(3, VOCAB, 5).astype(np.int32), text="")
        requests += [
            Request(rollout_id=RolloutId(draw, sibling), prompt=prompt, params=params)
            for sibling in range(num_siblings)
        ]
    return requests


def make_score(decoder: FusedDecoder, rounded: FusedDecoder | None = None):
    """One uncached pass over prompt and completion, and one by `rounded`, if given."""

    def logits(model: FusedDecoder, rollout: Rollout) -> torch.Tensor:
        kv = KVSlots(model.spec, 1, MAX_LEN + 8, model.dtype)
        tokens_T = np.concatenate((rollout.prompt.token_ids, rollout.token_ids)).astype(np.int64)
        states = model.forward(torch.from_numpy(tokens_T)[None], kv, kv.allocate(1))
        return model.logits(states.hidden_BNH[0, len(rollout.prompt.token_ids) - 1 : -1])

    def score(rollouts: Sequence[Rollout]) -> Iterator[Scores]:
        for rollout in rollouts:
            second = None if rounded is None else logits(rounded, rollout)
            yield Scores(exact_TV=logits(decoder, rollout), rounded_TV=second)

    return score
