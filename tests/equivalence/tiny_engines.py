"""Engines over tiny random transformers models, for comparing speculative with plain generation and with the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from leadout.draft_length.controller import DraftLength, FixedLength
from leadout.draft_length.source_choice import SourceChoice
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.head_drafter import HeadDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.drafters.ngram import NgramDrafter
from leadout.drafters.small_model import SmallModelDrafter
from leadout.interfaces import Drafter
from leadout.models.cut_layers import cut_config, cut_tensors
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead, policy_shape
from leadout.models.eagle3 import initial_head
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.kv import KVSlots
from leadout.models.mtp import MtpSpec, initial_mtp_head
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt, Request, Rollout, RolloutId, SamplingParams
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts
from leadout.train.settings import DraftSettings
from tests.train.learner_fakes import learn_by_heart, make_forward

MAX_LEN = 96
REDUCED = tuple(range(0, 96, 2))


def eagle3_head(model: Any, *, reduced: bool = True, seed: int = 0, kind: str = "eagle3") -> DraftHead:
    """An untrained head for the model; it taps the states that leave each layer, a multi-token head the last."""
    spec = DecoderSpec.from_config(model.config.to_dict())
    common = policy_shape(DecoderSpec.from_config(model.config.to_dict()))
    generator, policy = torch.Generator().manual_seed(seed), model.state_dict()
    if kind == "mtp":
        mtp = MtpSpec(**common, draft_vocab_size=spec.vocab_size, layer_ids=(spec.num_layers,))
        return initial_mtp_head(mtp, policy, generator).to(model.dtype)
    shape = Eagle3Spec(
        **common,
        draft_vocab_size=len(REDUCED) if reduced else spec.vocab_size,
        layer_ids=tuple(range(1, spec.num_layers + 1)),
        mask_token_id=spec.vocab_size - 1 if kind == "parallel" else None,
    )
    ids = torch.tensor(REDUCED) if reduced else None
    return initial_head(shape, policy, generator, token_ids_V=ids).to(model.dtype)


def trained_head(
    model: Any, rollouts: Sequence[Rollout], *, reduced: bool = True, steps: int = 25, kind: str = "eagle3"
) -> DraftHead:
    """A head that has learnt some rollouts nearly by heart, so that its drafts are sometimes accepted."""
    head = eagle3_head(model, reduced=reduced, kind=kind)
    settings = DraftSettings(learning_rate=1e-2, warmup_steps=1, micro_rollouts=16, autocast=False)
    learn_by_heart(head, make_forward(model, max_completions=len(rollouts)), rollouts, settings, steps)
    return head.requires_grad_(False)


def eagle3_drafter(
    head: DraftHead, fused: FusedDecoder, num_slots: int, *, greedy: bool = False, max_len: int = MAX_LEN
) -> HeadDrafter:
    """The drafter of a head that stays as it is."""
    return HeadDrafter(
        copy.deepcopy(head),
        policy_logits=fused.logits,
        policy_embedding=lambda: fused.embedding_VH,
        num_slots=num_slots,
        max_len=max_len,
        dtype=fused.dtype,
        device=fused.device,
        greedy=greedy,
    )


def ngram_drafter(num_slots: int, max_len: int = MAX_LEN) -> NgramDrafter:
    """Looks up one to three tokens."""
    return NgramDrafter(num_slots=num_slots, max_len=max_len, min_ngram=1, max_ngram=3, device=torch.device("cpu"))


def history_drafter(num_slots: int, max_len: int = MAX_LEN) -> HistoryDrafter:
    """Remembers finished rows."""
    return HistoryDrafter(num_slots=num_slots, max_len=max_len, device=torch.device("cpu"))


def small_drafter(
    model: Any, num_slots: int, *, layers: Sequence[int] = (0, 2), greedy: bool = False, max_len: int = MAX_LEN
) -> SmallModelDrafter:
    """Some of the model's own layers."""
    spec = DecoderSpec.from_config(cut_config(model.config.to_dict(), layers))
    decoder = FusedDecoder(spec, dtype=model.dtype, max_len=max_len)
    decoder.load(cut_tensors(dict(model.named_parameters()), layers))
    vocab_size = model.config.vocab_size
    return SmallModelDrafter(decoder, num_slots=num_slots, policy_vocab_size=vocab_size, greedy=greedy)


def with_history(model_drafter: Drafter, num_slots: int) -> CombinedDrafter:
    """History before the given drafter, chosen without a clock."""
    return CombinedDrafter(history_drafter(num_slots), model_drafter, SourceChoice(8), device=torch.device("cpu"))


def engine(
    fused: FusedDecoder,
    drafter: Drafter | None = None,
    draft_length: DraftLength | int = 0,
    *,
    num_slots: int = 16,
    max_len: int = MAX_LEN,
    prefill_tokens: int = 2048,
) -> NativeGenerator:
    """A generator whose weights never change."""

    def apply_update(update: object) -> Any:
        raise AssertionError("these engines are never refitted")

    return NativeGenerator(
        EngineParts(
            decoder=fused,
            kv=KVSlots(fused.spec, num_slots, max_len, fused.dtype),
            vocab_size=fused.spec.vocab_size,
            max_len=max_len,
            device=fused.device,
            dtype=fused.dtype,
            drafter=drafter,
            draft_length=FixedLength(draft_length) if isinstance(draft_length, int) else draft_length,
            prefill_tokens=prefill_tokens,
        ),
        num_slots=num_slots,
        apply_update=apply_update,
    )


def ragged_requests(num_prompts: int, siblings: int, *, vocab_size: int = 97, **params: Any) -> list[Request]:
    """Prompts of 1 to about 20 tokens that repeat themselves, so that look-ups find something."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(**{"max_new_tokens": 24, **params})
    requests = []
    for draw in range(num_prompts):
        pattern = rng.integers(0, vocab_size, 1 + draw % 5)
        prompt = Prompt(id=f"p/{draw}", token_ids=np.resize(pattern, 1 + 3 * draw % 20).astype(np.int32), text="")
        requests += [Request(rollout_id=RolloutId(draw, s), prompt=prompt, params=sampling) for s in range(siblings)]
    return requests


def generate(generator: NativeGenerator, requests: Sequence[Request]) -> dict[RolloutId, Rollout]:
    """All rollouts by id, in order."""
    generator.submit(requests)
    done: dict[RolloutId, Rollout] = {}
    while rollouts := generator.collect():
        done.update({rollout.request_id: rollout for rollout in rollouts})
    return dict(sorted(done.items()))


def tokens_of(rollouts: Mapping[RolloutId, Rollout]) -> dict[RolloutId, list[int]]:
    """Token ids by rollout."""
    return {key: rollout.token_ids.tolist() for key, rollout in rollouts.items()}


def drafted(rollouts: Mapping[RolloutId, Rollout]) -> int:
    """Drafts verified in all."""
    return sum(int(rollout.rounds.drafted.sum()) for rollout in rollouts.values())


def accepted(rollouts: Mapping[RolloutId, Rollout]) -> int:
    """Drafts accepted in all."""
    return sum(int(rollout.rounds.accepted.sum()) for rollout in rollouts.values())


@torch.no_grad()
def teacher_forced(model: Any, rollout: Rollout) -> torch.Tensor:
    """Logits [T, V] of the transformers model at the positions that produced the rollout's tokens."""
    tokens = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.token_ids]).astype(np.int64))
    first = len(rollout.prompt.token_ids) - 1
    logits: torch.Tensor = model(tokens[None]).logits[0, first:-1]
    return logits
