from dataclasses import replace

import numpy as np
import pytest

from leadout.audit.classes import class_name, draft_position, token_classes
from leadout.records import Rounds
from tests.fakes import make_rollout


def names(rollout):
    return [class_name(int(code)) for code in token_classes(rollout)]


def test_the_first_token_comes_from_the_prefill_and_plain_steps_draft_nothing():
    rollout = make_rollout(tokens=(7, 8, 9), drafted=(0, 0), accepted=(0, 0))
    assert names(rollout) == ["first", "plain", "plain"]


def test_a_round_reaches_positions_until_its_first_rejection():
    rollout = make_rollout(tokens=(7, 8, 9, 5), drafted=(3,), accepted=(2,))
    assert names(rollout) == ["first", "j=1 after full acceptance", "j=2", "j=3"]


def test_the_token_after_a_whole_accepted_round_is_the_bonus():
    rollout = make_rollout(tokens=(7, 8, 9, 5), drafted=(2,), accepted=(2,))
    assert names(rollout) == ["first", "j=1 after full acceptance", "j=2", "bonus"]


def test_the_first_position_of_a_round_says_whether_the_round_before_ended_in_a_rejection():
    rollout = make_rollout(tokens=(7, 8, 9, 5, 4), drafted=(2, 1, 1), accepted=(0, 1, 0))
    assert names(rollout) == [
        "first",
        "j=1 after full acceptance",
        "j=1 after rejection",
        "bonus",
        "j=1 after full acceptance",
    ]


def test_a_last_round_cut_by_its_own_accepted_end_of_sequence_loses_only_the_last_token():
    rollout = make_rollout(tokens=(7, 8, 2), drafted=(3,), accepted=(2,))
    assert names(rollout) == ["first", "j=1 after full acceptance", "j=2"]


def test_classes_do_not_depend_on_what_the_draw_decided():
    accepted = make_rollout(tokens=(7, 8, 9), drafted=(1,), accepted=(1,))
    corrected = make_rollout(tokens=(7, 8), drafted=(1,), accepted=(0,))
    assert names(accepted)[:2] == names(corrected)


def test_draft_positions_are_those_of_the_class():
    rollout = make_rollout(tokens=(7, 8, 9, 5, 4), drafted=(4,), accepted=(3,))
    assert [draft_position(int(code)) for code in token_classes(rollout)] == [0, 1, 2, 3, 4]


def test_rounds_that_do_not_account_for_the_tokens_are_refused():
    rollout = make_rollout(tokens=(7, 8, 9), drafted=(1,), accepted=(0,))
    with pytest.raises(ValueError, match="account for 2 tokens, the rollout has 3"):
        token_classes(rollout)


def test_more_accepted_than_drafted_is_a_contradiction():
    rollout = replace(
        make_rollout(tokens=(7, 8, 9)),
        rounds=Rounds(drafted=np.asarray([1], np.int16), accepted=np.asarray([2], np.int16)),
    )
    with pytest.raises(ValueError, match="a round accepted more drafts than it verified"):
        token_classes(rollout)


def test_a_round_with_more_drafts_than_there_are_classes_is_refused():
    rollout = make_rollout(tokens=(7, 8, 2), drafted=(65,), accepted=(1,))
    with pytest.raises(ValueError, match="a round verified 65 drafts, at most 64 can be audited"):
        token_classes(rollout)
