from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.logprob.pack import block_mask, pack_groups, padded_rows
from tests.train.learner_fakes import make_group


def example(max_completions: int = 8):
    groups = [
        make_group(0, [1, 5], [[7, 2], [8]], [1.0, 0.0], version=3),
        make_group(1, [4], [[9, 9, 2]], [0.0], masked=[True], version=4),
    ]
    return pack_groups(groups, [np.array([0.5, -0.5]), np.array([0.0])], max_completions=max_completions)


def test_a_prompt_is_laid_down_once_and_its_completions_after_it():
    (batch,) = example()
    assert batch.token_ids_T.tolist() == [1, 5, 7, 2, 8, 4, 9, 9, 2]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert batch.segment_T.tolist() == [-1, -1, 0, 0, 1, -2, 2, 2, 2]
    assert batch.parent_T.tolist() == [-1, -1, -1, -1, -1, -2, -2, -2, -2]
    assert batch.previous_T.tolist() == [-1, 0, 1, 2, 1, -1, 5, 6, 7]


def test_advantages_versions_and_masks_belong_to_the_completions_tokens():
    (batch,) = example()
    assert batch.advantages_T.tolist() == [0, 0, 0.5, 0.5, -0.5, 0, 0, 0, 0]
    assert batch.version_T.tolist() == [-1, -1, 3, 3, 3, -1, 4, 4, 4]
    assert batch.loss_mask_T.tolist() == [False, False, True, True, True, False, False, False, False]


def test_given_tokens_are_not_trained_on():
    group = make_group(0, [1], [[7, 8, 9]], [1.0], given=2)
    (batch,) = pack_groups([group], [np.array([1.0])], max_completions=1)
    assert batch.loss_mask_T.tolist() == [False, False, False, True]


def test_a_token_sees_its_own_completion_and_its_prompt_only():
    (batch,) = example()
    sees = block_mask(batch)[0, 0].int().tolist()
    assert sees[3] == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert sees[4] == [1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert sees[1] == [1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert sees[7] == [0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_a_group_larger_than_the_room_goes_on_in_the_next_pack_with_its_prompt():
    first, second = example(max_completions=1)[:2]
    assert first.token_ids_T.tolist() == [1, 5, 7, 2]
    assert second.token_ids_T.tolist() == [1, 5, 8]
    assert (first.first_rollout, second.first_rollout) == (0, 1)
    assert second.segment_T.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("max_completions", [1, 2, 3, 8])
def test_every_rollout_is_packed_exactly_once(max_completions):
    packs = example(max_completions)
    assert [rollout.request_id for pack in packs for rollout in pack.rollouts] == [(0, 0), (0, 1), (1, 0)]
    assert all(len(pack.rollouts) <= max_completions for pack in packs)


def test_numbers_can_start_elsewhere():
    group = make_group(0, [1], [[7], [8]], [1.0, 0.0])
    (batch,) = pack_groups([group], [np.zeros(2)], max_completions=4, first_rollout=6)
    assert batch.segment_T.tolist() == [-1, 6, 7]
    assert batch.first_rollout == 6


def test_an_empty_completion_takes_no_token():
    group = make_group(0, [1, 2], [[], [7]], [1.0, 0.0])
    (batch,) = pack_groups([group], [np.zeros(2)], max_completions=4)
    assert batch.segment_T.tolist() == [-1, -1, 1]
    assert len(batch.rollouts) == 2


def test_padded_rows_repeat_the_prompt_for_each_completion():
    (batch,) = example()
    rows = padded_rows(batch)
    tokens = torch.where(rows.mask_BS, batch.token_ids_T[rows.index_BS], -1)
    assert tokens.tolist() == [[1, 5, 7, 2], [1, 5, 8, -1], [4, 9, 9, 2]]
    assert rows.row_R.tolist() == [0, 0, 1, 2, 2, 2]
    assert rows.previous_column_R.tolist() == [1, 2, 1, 0, 1, 2]
