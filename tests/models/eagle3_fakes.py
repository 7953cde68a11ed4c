"""Tiny draft heads for tests."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from leadout.models.draft_head import DraftHead
from leadout.models.eagle3 import Eagle3Head, Eagle3Spec, initial_head
from leadout.models.mtp import MtpHead, MtpSpec, initial_mtp_head
from leadout.models.rope import RopeSpec

SPEC = Eagle3Spec(
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope=RopeSpec(rope_type="default", theta=10000.0, dim=4),
    max_position_embeddings=64,
    vocab_size=40,
    draft_vocab_size=12,
    layer_ids=(1, 2, 3),
    target_hidden_size=16,
)
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 8, 9, 11, 20, 21, 30, 38, 39])


MTP_SPEC = MtpSpec(
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope=SPEC.rope,
    max_position_embeddings=64,
    vocab_size=40,
    draft_vocab_size=40,
    layer_ids=(3,),
    target_hidden_size=16,
)


def policy_tensors(spec: Eagle3Spec = SPEC, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(spec.vocab_size, spec.target_hidden_size, generator=generator),
        "model.norm.weight": torch.rand(spec.target_hidden_size, generator=generator) + 0.5,
    }


def tiny_head(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Eagle3Head:
    """A head with random weights large enough to matter."""
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    ids = DRAFT_IDS if spec.is_reduced else None
    generator = torch.Generator().manual_seed(seed)
    head = initial_head(spec, policy_tensors(spec), generator, token_ids_V=ids)
    return _shaken(head, generator).to(dtype)


def tiny_mtp_head(seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = 40) -> MtpHead:
    """A multi-token head with random weights large enough to matter, biases too."""
    spec = dataclasses.replace(MTP_SPEC, vocab_size=vocab_size, draft_vocab_size=vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return _shaken(initial_mtp_head(spec, policy_tensors(), generator), generator).to(dtype)


Head = TypeVar("Head", bound=DraftHead)


def _shaken(head: Head, generator: torch.Generator) -> Head:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head
