"""Drafters that know only the policy's first ids: whole rollouts still follow the policy, ids past theirs included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.drafters.small_model import SmallModelDrafter
from leadout.models import sampling
from tests.equivalence.tiny_engines import engine
from tests.rollout.exactness import joint_p_value, many_requests, markov_law, outcomes, run
from tests.rollout.fakes import TableDrafter, markov_table
from tests.rollout.test_exactness import (
    BIASED,
    FILTERED,
    PLAIN,
    PROMPT,
    SLOTS,
    TABLE,
    VOCAB,
    assert_exact,
    decoder_law,
    markov_rollouts,
    params_of,
    tiny_policy_and_drafter,
)

COUNT = 25_000


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Draws work on blocks of the vocabulary; a tiny one has several small ones."""
    monkeypatch.setattr(sampling, "_BLOCK", 2)


@pytest.mark.parametrize("law", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_a_law_over_the_first_ids_alone_emits_whole_rollouts_of_the_policy(law):
    params = params_of(**law)
    q_V3 = markov_table(VOCAB, seed=1, scale=1.2)[0][:, :3].softmax(-1)
    rollouts = markov_rollouts(TableDrafter(q_V3, SLOTS), 3, params, count=COUNT)
    assert_exact(rollouts, params)
    q_VV = np.pad(q_V3.numpy(), ((0, 0), (0, 1)))
    policy, found = markov_law(TABLE, params), outcomes(rollouts)
    assert joint_p_value(found, policy, lambda context: q_VV[context[-1]], PROMPT) > BIASED
    assert {kind for _, _, kind, token in found if token == 3} == {"corrected", "bonus"}


def test_a_small_model_of_fewer_ids_emits_whole_rollouts_of_the_policy():
    params = params_of(max_new_tokens=3, temperature=0.8)
    fused, _ = tiny_policy_and_drafter("eagle3")
    drafter = SmallModelDrafter(fused, num_slots=SLOTS, policy_vocab_size=4)
    rollouts = run(engine(fused, drafter, 2, num_slots=SLOTS, max_len=16), many_requests(COUNT, (0, 1, 4), [params]))
    assert_exact(rollouts, params, decoder_law(fused, params), prompt=(0, 1, 4), vocab_size=6)
    found = outcomes(rollouts)
    assert all(token < 4 for _, _, kind, token in found if kind == "accepted")
    assert torch.tensor([token >= 4 for _, _, kind, token in found if kind == "corrected"]).any()
