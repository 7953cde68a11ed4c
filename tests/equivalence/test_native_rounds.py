"""Rounds whose drafts and verdicts are native calls are those made pass by pass with PyTorch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import leadout.rollout.accept as accept
from leadout.drafters.head_cache import HeadCache
from leadout.models.decoder import FusedDecoder
from leadout.records import Request, Rollout, RolloutId
from tests.equivalence.tiny_engines import (
    accepted,
    drafted,
    eagle3_drafter,
    eagle3_head,
    engine,
    generate,
    ragged_requests,
)
from tests.models.native.models import decoder, needs_kernels, policy

pytestmark = needs_kernels

SLOTS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return policy("llama")


@pytest.fixture(scope="module")
def fused(model: Any) -> FusedDecoder:
    return decoder(model, native=None)


def requests() -> list[Request]:
    """Rows of every length and two temperatures; one has filters, which no whole draft is made for."""
    made = ragged_requests(9, 2, vocab_size=613, seed=4)
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"max_new_tokens": 9}]
    rows = [replace(r, params=replace(r.params, **changes[i % 3])) for i, r in enumerate(made)]
    rows[5] = replace(rows[5], params=replace(rows[5].params, top_p=0.9))
    return rows


def rollouts(model: Any, fused: FusedDecoder) -> dict[RolloutId, Rollout]:
    head = eagle3_head(model, reduced=False)
    return generate(engine(fused, eagle3_drafter(head, fused, SLOTS), 3, num_slots=SLOTS), requests())


def test_native_rounds_emit_what_the_torch_operators_do(
    model: Any, fused: FusedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rollouts(model, fused)
    monkeypatch.setattr(HeadCache, "drafts_at_once", False)
    monkeypatch.setattr(accept, "native_for", lambda weights_XV: None)
    expected = rollouts(model, fused)
    assert 0.05 < accepted(found) / drafted(found) < 0.95 and drafted(found) > 300
    for key, rollout in expected.items():
        assert found[key].token_ids.tolist() == rollout.token_ids.tolist()
        assert found[key].rounds.accepted.tolist() == rollout.rounds.accepted.tolist()
        np.testing.assert_allclose(found[key].logprobs, rollout.logprobs, rtol=1e-6)
        np.testing.assert_allclose(found[key].policy_logprobs, rollout.policy_logprobs, rtol=1e-6)
    assert any((r.logprobs != r.policy_logprobs).any() for r in found.values())


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_vocabulary_smaller_than_a_block_may_be_filtered(filters: dict[str, float]) -> None:
    small = policy("llama", vocab_size=300)
    generator = engine(decoder(small, native=None), num_slots=SLOTS)
    made = generate(generator, ragged_requests(4, 1, vocab_size=300, **filters))
    assert all(rollout.length == 24 and np.isfinite(rollout.policy_logprobs).all() for rollout in made.values())
    assert torch.tensor([int(r.token_ids.max()) for r in made.values()]).max() < 300
