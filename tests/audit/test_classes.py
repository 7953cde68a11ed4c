from dataclasses import replace

import numpy as np
import pytest

from leadout.audit.classes import bookkeeping_faults, class_name, draft_position, stop_faults, token_classes
from leadout.records import Finish, Rounds, Trace
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
    assert bookkeeping_faults(rollout) == ["rounds account for 2 tokens, the rollout has 3"]


def test_more_accepted_than_drafted_is_a_contradiction():
    rollout = replace(
        make_rollout(tokens=(7, 8, 9)),
        rounds=Rounds(drafted=np.asarray([1], np.int16), accepted=np.asarray([2], np.int16)),
    )
    assert bookkeeping_faults(rollout) == ["a round accepted more drafts than it verified"]


def test_tokens_kept_after_the_end_are_found():
    rollout = make_rollout(tokens=(7, 2, 9), drafted=(2,), accepted=(2,))
    assert stop_faults(rollout, (2,), 64) == [
        "tokens were kept after an end-of-sequence token",
        "the end-of-sequence token that ended a rollout is missing",
    ]


def test_a_dropped_end_of_sequence_token_is_found():
    rollout = make_rollout(tokens=(7, 9), drafted=(0,), accepted=(0,), finish=Finish.EOS)
    assert stop_faults(rollout, (2,), 64) == ["the end-of-sequence token that ended a rollout is missing"]


def test_more_tokens_than_asked_for_are_found():
    rollout = make_rollout(tokens=(7, 9, 2), drafted=(0, 0), accepted=(0, 0))
    assert stop_faults(rollout, (2,), 2) == ["3 tokens, at most 2 were asked for"]


def traced(tokens, draft, accepted, probs=None):
    rollout = make_rollout(tokens=tokens, drafted=(1,), accepted=(int(accepted),))
    trace = Trace(
        round_D=np.zeros(1, np.int32),
        position_D=np.ones(1, np.int32),
        draft_D=np.asarray([draft], np.int32),
        accepted_D=np.asarray([accepted]),
        draft_prob_D=np.ones(1),
        probs_DV=probs,
        token_ids_V=None,
    )
    return replace(rollout, trace=trace)


def test_an_accepted_draft_must_be_the_emitted_token():
    assert bookkeeping_faults(traced((7, 8, 9), 8, True)) == []
    assert bookkeeping_faults(traced((7, 8, 9), 6, True)) == ["an accepted draft is not the token that was emitted"]


def test_a_rejected_point_mass_draft_cannot_be_the_correction():
    assert bookkeeping_faults(traced((7, 8), 8, False)) == ["a rejected point-mass draft was emitted as correction"]
    assert bookkeeping_faults(traced((7, 8), 8, False, np.full((1, 10), 0.1))) == []


def test_trace_and_rounds_must_agree():
    record = traced((7, 8, 9), 8, True)
    changed = replace(record, rounds=Rounds(drafted=np.asarray([2], np.int16), accepted=np.asarray([2], np.int16)))
    assert bookkeeping_faults(changed) == ["the trace and the rounds disagree on what was accepted"]
