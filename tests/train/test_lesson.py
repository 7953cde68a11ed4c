from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.train.lesson import Lesson
from tests.train.learner_fakes import DRAFT_IDS, make_forward, random_groups, tiny_policy


def make_lesson(dtype: torch.dtype = torch.float64, temperature: float = 0.7, ids=DRAFT_IDS) -> Lesson:
    forward = make_forward(tiny_policy(dtype), temperature=temperature)
    (batch,) = forward.pack(random_groups([[6, 4], [5]]), [np.zeros(2), np.zeros(1)])
    with torch.no_grad():
        return Lesson(batch, forward.run(batch, taps=(1,)), forward, ids, temperature)


@pytest.mark.parametrize("ids", [DRAFT_IDS, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teacher_is_the_policys_law_over_the_draft_vocabulary(temperature, ids):
    lesson = make_lesson(temperature=temperature, ids=ids)
    batch, model = lesson.batch, lesson.forward.model
    expected = []
    for rollout in batch.rollouts:
        tokens = torch.tensor([rollout.prompt.token_ids.tolist() + rollout.token_ids.tolist()])
        law = (model(input_ids=tokens).logits[0] / temperature).softmax(-1)
        expected.append(law[rollout.prompt.token_ids.size - 1 : -1])
    law_RV = torch.cat(expected) if ids is None else torch.cat(expected)[:, ids]
    places = torch.tensor([14, 0, 7, 7])
    torch.testing.assert_close(lesson.teacher(places), law_RV[places], rtol=0, atol=1e-12)


def test_a_part_of_the_largest_set_asked_for_is_not_computed_again(monkeypatch):
    fresh = make_lesson().teacher(torch.tensor([9, 2, 5]))
    lesson = make_lesson()
    for asked in ([1, 2], [2, 3, 5, 9], [0, 1]):
        lesson.teacher(torch.tensor(asked))
    monkeypatch.setattr(lesson, "_probabilities", None)
    torch.testing.assert_close(lesson.teacher(torch.tensor([9, 2, 5])), fresh, rtol=0, atol=1e-15)


def test_other_positions_are_computed():
    fresh = make_lesson().teacher(torch.tensor([1, 8]))
    lesson = make_lesson()
    for asked in ([1, 2], [8], [8, 1, 8]):
        lesson.teacher(torch.tensor(asked))
        torch.testing.assert_close(lesson.teacher(torch.tensor([1, 8])), fresh, rtol=0, atol=1e-15)


def test_the_policys_logits_stay_float32_where_the_drafters_products_are_bfloat16():
    places = torch.arange(15)
    exact = make_lesson(torch.float32).teacher(places)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(make_lesson(torch.float32).teacher(places), exact)
