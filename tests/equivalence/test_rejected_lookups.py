"""What was looked up and rejected is forgotten by the model that drafts beside the look-up."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.records import Rollout, RolloutId
from tests.equivalence.tiny_engines import (
    engine,
    generate,
    ragged_requests,
    small_drafter,
    teacher_forced,
    with_history,
)


@pytest.fixture(scope="module")
def mixed(llama, fused) -> dict[RolloutId, Rollout]:
    """Sampled rollouts drafted by look-up and by a small model that has all of the policy's layers."""
    drafter = with_history(small_drafter(llama, 16, layers=(0, 1, 2)), 16)
    requests = ragged_requests(6, 4, temperature=1.0, max_new_tokens=40, seed=3, trace=True)
    return generate(engine(fused, drafter, 3), requests)


def by_model(rollout: Rollout) -> np.ndarray:
    """bool[D]: drafts that the model made; looked-up ones are certain."""
    assert rollout.trace is not None and rollout.trace.probs_DV is not None
    return np.asarray(rollout.trace.probs_DV.max(-1) < 1.0)


def test_a_small_model_with_the_policys_layers_is_always_accepted_between_rejected_lookups(mixed):
    after_a_rejection = 0
    for rollout in mixed.values():
        trace, made_D = rollout.trace, by_model(rollout)
        assert trace.accepted_D[made_D].all()
        rejected_D = np.logical_or.accumulate(~made_D & ~trace.accepted_D)
        after_a_rejection += int((made_D & rejected_D).sum())
    assert after_a_rejection > 50


def test_its_q_is_the_policys_law_over_the_committed_tokens_alone(llama, mixed):
    for rollout in mixed.values():
        trace, made_D = rollout.trace, by_model(rollout)
        p_TV = teacher_forced(llama, rollout).softmax(-1).numpy()
        np.testing.assert_allclose(trace.probs_DV[made_D], p_TV[trace.position_D[made_D]], rtol=0, atol=1e-9)
