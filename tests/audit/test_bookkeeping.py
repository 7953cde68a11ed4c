"""T0 on single records: what the arrays, rounds, traces and ends of rollouts may say."""

from dataclasses import replace

import numpy as np
import pytest

from leadout.audit.bookkeeping import Declared, array_faults, bookkeeping_faults, record_faults, stop_faults
from leadout.audit.bookkeeping_trace import draft_prob_faults, vocabulary_faults
from leadout.records import Finish, Rounds, SamplingParams, Source, Span, Trace
from tests.fakes import make_rollout

END = 2
ASKED = Declared(params=SamplingParams(max_new_tokens=3, stop_token_ids=(END,), stop=("\n",)), max_context=8)
MISSING = "the end-of-sequence token that ended a rollout is missing"


def ended(tokens, finish, stop=None, prompt_length=3):
    """A rollout of plain steps."""
    rollout = make_rollout(tokens=tokens, drafted=[0] * (len(tokens) - 1), accepted=[0] * (len(tokens) - 1))
    prompt = replace(rollout.prompt, token_ids=np.arange(3, 3 + prompt_length, dtype=np.int32))
    return replace(rollout, finish=finish, stop=stop, prompt=prompt)


@pytest.mark.parametrize(
    ("rollout", "faults"),
    [
        (ended((7, END), Finish.EOS, END), []),
        (ended((7, 9), Finish.EOS, END), [MISSING]),
        (ended((7, END), Finish.EOS, 9), ["ended by end-of-sequence token 2, but names 9 as what stopped it"]),
        (ended((7, END), Finish.EOS), ["ended by end-of-sequence token 2, but names None as what stopped it"]),
        (ended((), Finish.EOS, END), [MISSING]),
        (ended((7, 8, 9), Finish.LENGTH), []),
        (ended((7, 8), Finish.LENGTH), ["ended by length after 2 tokens, 3 were asked for"]),
        (ended((), Finish.LENGTH), ["ended by length after 0 tokens, 3 were asked for"]),
        (ended((7, 8, END), Finish.LENGTH), ["ended by length, but its last token is an end-of-sequence token"]),
        (ended((7, 8), Finish.CONTEXT, prompt_length=6), []),
        (ended((7, 8), Finish.CONTEXT), ["ended by context with 5 tokens of prompt and completion, 8 fit"]),
        (ended((7, 8), Finish.STOP, "\n"), []),
        (ended((7, 8), Finish.STOP, "zzz"), ["ended by the stop string 'zzz', which was not asked for"]),
        (ended((), Finish.STOP, "\n"), ["ended by the stop string '\\n' without a token"]),
        (ended((7, 8, 9, 5), Finish.STOP, "\n"), ["4 tokens, at most 3 were asked for"]),
        (ended((7, END, 9), Finish.LENGTH), ["tokens were kept after an end-of-sequence token"]),
        (ended((7,), Finish.CANCELLED), []),
        (ended((7,), Finish.ERROR), []),
    ],
)
def test_the_end_of_a_rollout_must_be_one_that_was_asked_for(rollout, faults):
    assert stop_faults(rollout, ASKED) == faults


def test_a_context_of_unknown_size_may_end_a_rollout_anywhere_below_the_length():
    assert stop_faults(ended((7, 8), Finish.CONTEXT), replace(ASKED, max_context=None)) == []


def test_a_continued_rollout_may_be_longer_than_what_was_asked_for():
    assert stop_faults(ended((7, 8, 9, 5), Finish.LENGTH), replace(ASKED, continued=True)) == []


def test_of_a_rollout_with_given_tokens_only_the_arrays_are_looked_at():
    spans = (Span(length=3, source=Source.GIVEN, version=0), Span(length=1, source=Source.POLICY, version=0))
    rollout = replace(ended((END, 8, END, 5), Finish.LENGTH), spans=spans)
    assert record_faults(rollout, ASKED) == []
    assert record_faults(replace(rollout, spans=()), ASKED) == ["log-probabilities or spans are not one per token"]


def test_arrays_and_spans_must_have_one_entry_per_token():
    rollout = ended((7, 8, 9), Finish.LENGTH)
    wrong = ["log-probabilities or spans are not one per token"]
    (span,) = rollout.spans
    assert array_faults(rollout) == []
    assert array_faults(replace(rollout, logprobs=rollout.logprobs[:-1])) == wrong
    assert array_faults(replace(rollout, spans=())) == wrong
    assert array_faults(replace(rollout, spans=(span, replace(span, length=0)))) == wrong
    odd = (replace(span, length=4), replace(span, length=-1))
    assert array_faults(replace(rollout, spans=odd)) == ["a span has a negative length"]


def test_a_negative_token_is_a_contradiction_rather_than_an_index():
    assert array_faults(ended((7, 8, -1), Finish.LENGTH)) == ["token id -1 is negative"]


def test_log_probabilities_must_be_numbers():
    rollout = ended((7, 8, 9), Finish.LENGTH)
    assert array_faults(replace(rollout, logprobs=rollout.logprobs * np.nan)) == ["log-probabilities are not finite"]


def test_rounds_must_account_for_the_tokens():
    rollout = make_rollout(tokens=(7, 8, 9), drafted=(1,), accepted=(0,))
    assert bookkeeping_faults(rollout, ASKED) == ["rounds account for 2 tokens, the rollout has 3"]


# Tokens 7 | 8 9 | 5 after rounds that drafted (2, 1, 0): 8 accepted, 9 a correction; 5 a bonus after 4 was accepted.
SAMPLED = np.asarray([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]], np.float32)
IDS = np.asarray([8, 6, 4], np.int32)
ROUNDS = replace(
    make_rollout(tokens=(7, 8, 9, 4, 5), drafted=(2, 1), accepted=(1, 1), finish=Finish.LENGTH),
    trace=Trace(
        round_D=np.asarray([0, 0, 1], np.int32),
        position_D=np.asarray([1, 2, 3], np.int32),
        draft_D=np.asarray([8, 6, 4], np.int32),
        accepted_D=np.asarray([True, False, True]),
        draft_prob_D=np.asarray([0.5, 0.1, 0.6], np.float32),
        probs_DV=SAMPLED,
        token_ids_V=IDS,
    ),
)
TRACED = Declared(params=SamplingParams(max_new_tokens=5), traced=True)


def changed(**arrays):
    """The rollout with some arrays of its trace exchanged."""
    return replace(ROUNDS, trace=replace(ROUNDS.trace, **{name: np.asarray(array) for name, array in arrays.items()}))


def without(*rows):
    """The rollout with some rows of its trace left out."""
    names = ("round_D", "position_D", "draft_D", "accepted_D", "draft_prob_D", "probs_DV")
    return changed(**{name: np.delete(getattr(ROUNDS.trace, name), rows, 0) for name in names})


DISAGREE = "the trace and the rounds disagree on what was accepted"


@pytest.mark.parametrize(
    ("rollout", "faults"),
    [
        (ROUNDS, []),
        (replace(ROUNDS, trace=None), ["drafts were verified but their trace is missing"]),
        (without(1), ["the trace shows 1 drafts of round 0, 2 were verified"]),
        (without(2), [DISAGREE]),
        (without(0, 1, 2), [DISAGREE]),
        (changed(round_D=[0, 0, 2]), ["the trace has drafts of a round that is not in the record"]),
        (changed(round_D=[-1, 0, 1]), ["the trace has drafts of a round that is not in the record"]),
        (changed(round_D=[0, 1, 1]), ["the trace shows 1 drafts of round 0, 2 were verified"]),
        (changed(position_D=[1, 2, 5]), ["the trace has drafts after the end of the rollout"]),
        (changed(position_D=[-1, 2, 3]), ["the trace has drafts before the start of the rollout"]),
        (changed(position_D=[1, 4, 3]), ["the trace puts a draft at another position than its round does"]),
        (changed(draft_D=[8, -1, 4]), ["drafted token id -1 is negative"]),
        (changed(draft_D=[6, 6, 4]), ["an accepted draft is not the token that was emitted"]),
        (changed(accepted_D=[True, False]), ["the arrays of the trace are not one row per draft"]),
        (changed(probs_DV=SAMPLED[:2]), ["the arrays of the trace are not one row per draft"]),
        (changed(probs_DV=SAMPLED * [[1], [np.nan], [1]]), ["q of 1 of 3 drafts is not a law"]),
        (changed(probs_DV=SAMPLED * 0), ["q of 3 of 3 drafts is not a law"]),
        (changed(probs_DV=SAMPLED * 1.01), ["q of 3 of 3 drafts is not a law"]),
        (changed(probs_DV=SAMPLED * 1.001), []),
        (changed(probs_DV=[[1.5, -0.5, 0.0]] * 3), ["q of 3 of 3 drafts is not a law"]),
        (changed(token_ids_V=[8, 6]), ["q is over 3 tokens, the draft vocabulary has 2"]),
        (changed(token_ids_V=[8, 6, 6]), ["the draft vocabulary has a negative token id, or one twice"]),
    ],
)
def test_a_trace_has_every_verified_draft_in_its_place_and_a_law_for_each(rollout, faults):
    found = bookkeeping_faults(rollout, TRACED)
    assert len(found) == len(faults)
    assert all(line.startswith(start) for line, start in zip(found, faults, strict=True)), found


def test_a_trace_may_be_missing_where_the_generator_does_not_promise_one():
    rollout = replace(ROUNDS, trace=None)
    assert bookkeeping_faults(rollout, replace(TRACED, traced=False)) == []
    assert bookkeeping_faults(rollout, replace(TRACED, continued=True)) == []
    assert bookkeeping_faults(without(2), replace(TRACED, continued=True)) == []


def test_a_last_round_cut_by_the_end_shows_only_the_drafts_before_the_end():
    kept = replace(ROUNDS.trace, **{name: getattr(ROUNDS.trace, name)[:1] for name in ROUNDS.trace.__slots__[:6]})
    cut = make_rollout(tokens=(7, 8), drafted=(3,), accepted=(1,))
    assert bookkeeping_faults(replace(cut, trace=kept), TRACED) == []


def test_the_stated_probability_of_a_draft_must_be_its_q():
    lie = ["the stated probability of a draft is not q of that draft"]
    assert draft_prob_faults(ROUNDS.trace) == []
    assert draft_prob_faults(changed(draft_prob_D=[0.5, 0.1, 0.7]).trace) == lie
    assert draft_prob_faults(changed(draft_prob_D=[0.5, np.nan, 0.6]).trace) == lie
    assert draft_prob_faults(changed(token_ids_V=[8, 4, 6]).trace) == lie
    outside = ["drafted token id 3 is not in the draft vocabulary"]
    assert draft_prob_faults(changed(draft_D=[8, 3, 4]).trace) == outside


def test_without_a_map_the_columns_of_q_are_the_tokens():
    trace = replace(changed(draft_D=[0, 1, 2], draft_prob_D=[0.5, 0.1, 0.6]).trace, token_ids_V=None)
    assert draft_prob_faults(trace) == []
    outside = ["drafted token id 3 is not in the draft vocabulary"]
    assert draft_prob_faults(replace(trace, draft_D=np.asarray([0, 1, 3]))) == outside


def test_drafts_must_be_tokens_of_the_policy():
    assert vocabulary_faults(ROUNDS.trace, 9) == []
    assert vocabulary_faults(ROUNDS.trace, 8) == ["drafted token id 8 with a policy of 8 tokens"]
    unmapped = replace(ROUNDS.trace, token_ids_V=None, draft_D=np.zeros(3, np.int32))
    assert vocabulary_faults(unmapped, 2) == ["drafted token id 2 with a policy of 2 tokens"]


def point(tokens, draft, accepted, prob=1.0):
    """One round with one draft that was looked up."""
    trace = Trace(
        round_D=np.zeros(1, np.int32),
        position_D=np.ones(1, np.int32),
        draft_D=np.asarray([draft], np.int32),
        accepted_D=np.asarray([accepted]),
        draft_prob_D=np.asarray([prob]),
        probs_DV=None,
        token_ids_V=None,
    )
    return replace(make_rollout(tokens=tokens, drafted=(1,), accepted=(int(accepted),)), trace=trace)


def test_a_rejected_point_mass_draft_cannot_be_the_correction():
    assert bookkeeping_faults(point((7, 8, 9), 8, True), TRACED) == []
    again = ["a rejected point-mass draft was emitted as correction"]
    assert bookkeeping_faults(point((7, 8), 8, False), TRACED) == again


def test_a_point_mass_draft_has_probability_one():
    assert draft_prob_faults(point((7, 8, 9), 8, True).trace) == []
    less = ["a point-mass draft has another probability than 1"]
    assert draft_prob_faults(point((7, 8, 9), 8, True, prob=0.5).trace) == less


def test_rounds_must_say_both_what_was_drafted_and_what_was_accepted():
    half = Rounds(drafted=np.asarray([1, 1], np.int16), accepted=np.asarray([1], np.int16))
    assert bookkeeping_faults(replace(ROUNDS, rounds=half), TRACED) == ["2 rounds drafted, 1 accepted"]
