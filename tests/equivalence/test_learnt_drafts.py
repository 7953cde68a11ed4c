"""A head that has learnt from the policy's rollouts is accepted more often in the engine itself."""

from __future__ import annotations

import pytest

from leadout.records import Request
from tests.equivalence.tiny_engines import (
    accepted,
    drafted,
    eagle3_drafter,
    eagle3_head,
    engine,
    generate,
    ragged_requests,
    trained_head,
)

ROWS = 32


def short_requests(seed: int) -> list[Request]:
    """Short answers to one prompt at a low temperature: other seeds meet much of the same text."""
    return ragged_requests(1, ROWS, temperature=0.3, max_new_tokens=4, seed=seed)


@pytest.fixture(scope="module")
def lessons(fused):
    return list(generate(engine(fused, num_slots=ROWS), short_requests(seed=1)).values())


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "mtp"])
def test_the_engine_accepts_more_drafts_of_a_trained_head(llama, fused, lessons, kind):
    shares = []
    for head in (
        eagle3_head(llama, kind=kind, reduced=False),
        trained_head(llama, lessons, kind=kind, reduced=False),
    ):
        drafter = eagle3_drafter(head, fused, ROWS)
        rollouts = generate(engine(fused, drafter, 3, num_slots=ROWS), short_requests(seed=2))
        shares.append(accepted(rollouts) / drafted(rollouts))
    untrained, trained = shares
    assert trained > untrained + 0.2
