"""The drafter from `speculative_config` and `draft`: read from a folder, or made untrained for this policy."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from leadout.config import Draft, HeadMethod, SpeculativeConfig
from leadout.draft_length.source_choice import SourceChoice
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.head_drafter import HeadDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.drafters.ngram import NgramDrafter
from leadout.drafters.small_model import SmallModelDrafter
from leadout.errors import ConfigError, ModelError, about
from leadout.interfaces import Drafter
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead, policy_shape
from leadout.models.draft_vocabulary import rank_vocabulary
from leadout.models.eagle3 import initial_head
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.head_io import method_of, read_head
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, read_spec, resolve
from leadout.models.mtp import MtpSpec, initial_mtp_head
from leadout.models.rope import RopeSpec
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt
from leadout.text import TextCodec

logger = logging.getLogger(__name__)

MAX_DRAFTS = 16
"""Largest draft length that the configuration allows."""


def load_head(
    folder: str | Path,
    policy: Mapping[str, torch.Tensor],
    method: HeadMethod | None = None,
    *,
    rope: RopeSpec | None = None,
    option: str = "speculative_config.model",
) -> DraftHead:
    """A trained head for this policy.

    `option`: what names the folder. Raises ModelError naming it when the folder is not one of its kind; a head whose
    rotation is not the policy's is taken with a warning.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{option}: expected the folder of a draft head, got {path}, which is not there")
    head = read_head(path, policy=policy, num_layers=count_layers(policy))
    if method is not None and head.method != method:
        raise ModelError(
            f"{option}: expected a head for method {method}, got {path} with one for {head.method}; "
            "name another folder, or the method of this one"
        )
    if rope is not None and head.spec.rope.text != rope.text:
        logger.warning(
            "%s rotates by %s, the policy by %s: unless it was trained so, few of its drafts will be accepted",
            path,
            head.spec.rope.text,
            rope.text,
        )
    return head


def small_model_folder(model: str | None) -> Path:
    """The folder of a small model; raises ModelError naming the option."""
    assert model is not None, "the section checks it"
    with about("speculative_config.model"):
        return resolve(model)


def head_method(folder: str) -> HeadMethod:
    """The kind of a head by its folder. Raises ModelError where there is none."""
    method = method_of(Path(folder))
    kinds: tuple[HeadMethod, ...] = get_args(HeadMethod)
    return next(kind for kind in kinds if kind == method)


def new_head(
    draft: Draft,
    decoder: FusedDecoder,
    policy: Mapping[str, torch.Tensor],
    prompts: Sequence[Prompt],
    *,
    seed: int,
    temperature: float,
    keep: Sequence[int],
    method: HeadMethod = "eagle3",
) -> DraftHead:
    """An untrained head. A reduced vocabulary is ranked by what this policy says to some of the prompts.

    `keep`: ids that must be in it (the special tokens).
    """
    if method == "mtp":
        return _new_mtp_head(decoder.spec, policy, seed)
    spec, size = decoder.spec, draft.vocab_size or decoder.spec.vocab_size
    if size > spec.vocab_size:
        raise ConfigError(f"draft.vocab_size must be at most the policy's {spec.vocab_size}, got {size}")
    layers = draft.layer_ids or default_layers(spec.num_layers)
    if not all(0 <= layer <= spec.num_layers for layer in layers):
        raise ConfigError(
            f"draft.layer_ids must lie in 0..{spec.num_layers} (the state entering each layer), got {list(layers)}"
        )
    shape = Eagle3Spec(
        **policy_shape(spec),
        draft_vocab_size=size,
        layer_ids=layers,
        # The last row of an embedding is the likeliest to be padding, or a token that is hardly ever said.
        mask_token_id=spec.vocab_size - 1 if method == "parallel" else None,
    )
    ids = None
    if size < spec.vocab_size:
        ids = rank_vocabulary(
            decoder,
            [prompt.token_ids for prompt in prompts],
            size,
            temperature=temperature,
            seed=seed,
            keep=[token for token in keep if token < spec.vocab_size],
        )
    return initial_head(shape, policy, torch.Generator().manual_seed(seed), token_ids_V=ids, init=draft.init)


def _new_mtp_head(spec: DecoderSpec, policy: Mapping[str, torch.Tensor], seed: int) -> DraftHead:
    shape = MtpSpec(
        **policy_shape(spec),
        draft_vocab_size=spec.vocab_size,
        layer_ids=(spec.num_layers,),
    )
    return initial_mtp_head(shape, policy, torch.Generator().manual_seed(seed))


def count_layers(policy: Mapping[str, torch.Tensor]) -> int:
    """Decoder layers of a policy, from its tensors' names; raises ModelError where they are not those of a policy."""
    layers = [int(name.split(".")[2]) for name in policy if name.startswith("model.layers.")]
    if not layers:
        raise ModelError("expected the weights of a policy, with model.layers.0 and so on, got none; name a model")
    return 1 + max(layers)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's early, middle and late layer; spread evenly over a policy too shallow for them to differ."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({0, num_layers // 2, num_layers}))


def make_drafter(
    speculation: SpeculativeConfig,
    decoder: FusedDecoder,
    head: DraftHead | None,
    codec: TextCodec,
    *,
    num_slots: int,
) -> Drafter:
    """The drafter of a generator; it holds its own copy of the head."""
    if speculation.method == "ngram":
        return NgramDrafter(
            num_slots=num_slots,
            max_len=decoder.max_len,
            min_ngram=speculation.prompt_lookup_min,
            max_ngram=speculation.prompt_lookup_max,
            device=decoder.device,
        )
    model: Drafter | None = None
    if speculation.draft_head is not None:
        assert head is not None, f"{speculation.method} needs a head"
        model = _head_drafter(speculation, decoder, head, num_slots)
    elif speculation.draft_model == "small_model":
        model = _small_model(speculation, decoder, codec, num_slots)
    if not speculation.looks_back:
        assert model is not None, "every method has a drafter"
        return model
    history = HistoryDrafter(
        num_slots=num_slots,
        max_len=decoder.max_len,
        device=decoder.device,
        min_match=speculation.prompt_lookup_min,
        max_tokens=speculation.leadout.history_tokens,
        max_rollouts=speculation.leadout.history_rollouts,
    )
    if model is None:
        return history
    own_clock = speculation.num_speculative_tokens == "auto" and speculation.leadout.cost_profile is None
    choice = SourceChoice(MAX_DRAFTS, time.perf_counter if own_clock else None)
    return CombinedDrafter(history, model, choice, device=decoder.device)


def _head_drafter(
    speculation: SpeculativeConfig, decoder: FusedDecoder, head: DraftHead, num_slots: int
) -> HeadDrafter:
    return HeadDrafter(
        copy.deepcopy(head),
        policy_embedding=lambda: decoder.embedding_VH,
        policy_logits=decoder.logits,
        num_slots=num_slots,
        max_len=decoder.max_len,
        dtype=decoder.dtype,
        device=decoder.device,
        greedy=speculation.draft_sample_method == "greedy",
        temperature=speculation.leadout.draft_temperature,
    )


def drafter_bytes_per_slot(speculation: SpeculativeConfig, decoder: FusedDecoder, head: DraftHead | None) -> int:
    """Memory in bytes that the drafter of a generator takes for each row; looking up takes next to none."""
    if speculation.draft_head is not None:
        assert head is not None, f"{speculation.method} needs a head"
        return HeadDrafter.bytes_per_slot(head.spec, decoder.max_len, decoder.dtype)
    if speculation.draft_model == "small_model":
        _, spec, longest = _small_model_shape(speculation, decoder)
        return KVSlots.bytes_per_slot(spec, longest, decoder.dtype)
    return 0


def _small_model_shape(speculation: SpeculativeConfig, decoder: FusedDecoder) -> tuple[Path, DecoderSpec, int]:
    """Folder, shape, and tokens of the longest row that it drafts for."""
    path = small_model_folder(speculation.model)
    spec = read_spec(path)
    return path, spec, min(decoder.max_len, spec.max_position_embeddings, spec.sliding_window or decoder.max_len)


def _small_model(
    speculation: SpeculativeConfig, decoder: FusedDecoder, codec: TextCodec, num_slots: int
) -> SmallModelDrafter:
    """A small model in the policy's type and place. Raises ModelError for another tokenizer than the policy's."""
    path, spec, longest = _small_model_shape(speculation, decoder)
    difference = codec.difference(TextCodec.from_pretrained(path))
    if difference is not None:
        raise ModelError(
            f"speculative_config.model: expected a model with the policy's tokenizer, got {path} whose tokenizer "
            f"differs ({difference}); draft ids would mean other tokens"
        )
    small = FusedDecoder(spec, dtype=decoder.dtype, device=decoder.device, max_len=longest)
    tensors = dict(iter_weights(path))
    with about(path):
        small.load(tensors)
    return SmallModelDrafter(
        small,
        num_slots=num_slots,
        policy_vocab_size=decoder.spec.vocab_size,
        greedy=speculation.draft_sample_method == "greedy",
        temperature=speculation.leadout.draft_temperature,
    )


def spread_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts spread evenly over a data set."""
    index = np.unique(np.linspace(0, len(prompts) - 1, min(count, len(prompts))).round().astype(int))
    return [prompts[i] for i in index]
