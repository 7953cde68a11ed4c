"""Oddities of EAGLE-3 heads as others export them: maps of a full vocabulary, tied flags, heads without a matrix."""

from __future__ import annotations

import pytest
import torch

from leadout.errors import ModelError
from leadout.models.eagle3 import Eagle3Head
from leadout.models.eagle3_io import read_eagle3, write_eagle3
from tests.models.eagle3_fakes import policy_tensors, tiny_head
from tests.models.test_eagle3_io import rewrite

FULL = 40


def assert_same(read: Eagle3Head, head: Eagle3Head) -> None:
    assert read.spec == head.spec
    assert read.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("marks", [{}, {"t2d": torch.ones(FULL, dtype=torch.bool)}], ids=["d2t", "d2t and t2d"])
@pytest.mark.parametrize("mask", [None, 5], ids=["eagle3", "parallel"])
def test_an_identity_map_of_a_full_vocabulary_changes_nothing(tmp_path, mask, marks):
    head = tiny_head(draft_vocab_size=FULL, mask_token_id=mask)
    write_eagle3(head, tmp_path)
    zeros = torch.zeros(FULL, dtype=torch.int64)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.update(d2t=zeros, **marks))
    read = read_eagle3(tmp_path)
    assert_same(read, head)
    assert read.draft_token_ids() is None


def test_a_map_of_a_full_vocabulary_that_holds_ids_is_an_error(tmp_path):
    write_eagle3(tiny_head(draft_vocab_size=FULL), tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.update(d2t=torch.arange(FULL)))
    with pytest.raises(ModelError, match="d2t"):
        read_eagle3(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": FULL}], ids=["reduced", "full"])
def test_a_head_that_says_its_embeddings_are_tied_keeps_its_own_output_matrix(tmp_path, changes):
    head = tiny_head(**changes)
    write_eagle3(head, tmp_path)
    rewrite(tmp_path, change_config=lambda config: config.update(tie_word_embeddings=True))
    policy = policy_tensors()
    read = read_eagle3(tmp_path, policy=policy)
    assert_same(read, head)
    assert not torch.equal(read.lm_head.weight, policy["model.embed_tokens.weight"][: len(read.lm_head.weight)])


def test_a_head_without_an_output_matrix_borrows_that_of_an_untied_policy(tmp_path):
    write_eagle3(tiny_head(draft_vocab_size=FULL), tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.pop("lm_head.weight"))
    own_VH = torch.randn(FULL, 16, generator=torch.Generator().manual_seed(7))
    policy = policy_tensors() | {"lm_head.weight": own_VH}
    assert torch.equal(read_eagle3(tmp_path, policy=policy).lm_head.weight, own_VH)
