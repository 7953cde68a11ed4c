"""Generators whose records do not say what they did: none of them passes, and none breaks the audit."""

from dataclasses import replace

import numpy as np
import pytest

from leadout.audit.biased_rules import policy_residual
from leadout.audit.judge import Demands
from leadout.audit.runner import run_audit
from leadout.audit.verdict import Outcome
from leadout.errors import AuditError
from leadout.records import Finish, RolloutId, SamplingParams
from tests.audit.fakes import EOS, make_requests, make_tables, table_score
from tests.audit.liars import (
    HalfTraced,
    Liar,
    OtherPrompt,
    RareEnds,
    Stuck,
    emptied,
    of_version,
    undrafted,
    without_end,
)

PARAMS = SamplingParams(max_new_tokens=40, stop_token_ids=(EOS,))
TABLE_SV, DRAFT_SV = make_tables()


def audit(kind=Liar, draws=30, version=None, **fields):
    return run_audit(
        kind(TABLE_SV, DRAFT_SV, **fields),
        table_score(TABLE_SV),
        make_requests(draws, 4, PARAMS),
        name="liar",
        precision="float64",
        version=version,
        demands=Demands(tokens=1000, class_tokens=100),
    )


def test_ends_that_come_half_as_often_are_found_by_counting_them():
    table_SV = TABLE_SV.copy()
    table_SV[:, EOS] -= 1.0
    verdict = run_audit(
        RareEnds(table_SV, DRAFT_SV),
        table_score(table_SV),
        make_requests(250, 4, PARAMS),
        name="rare ends",
        precision="float64",
        demands=Demands(tokens=1000, class_tokens=100),
    )
    assert verdict.outcome is Outcome.FAIL
    assert [r.name for r in verdict.failures if r.test == "T1"] == ["rollouts end as often as the policy says"]
    (ends,) = [kind for kind in verdict.detectable if kind.kind == "ends too rare or too frequent"]
    (result,) = [r for r in verdict.failures if r.test == "T1"]
    assert result.effect.high < 0.0 < ends.smallest < 0.003


def test_a_drafter_that_never_drafts_is_no_test_of_speculation():
    verdict = run_audit(
        Liar(TABLE_SV, DRAFT_SV, traced=False, told=lambda r: [undrafted(r)]),
        table_score(TABLE_SV),
        make_requests(120, 4, replace(PARAMS, trace=False)),
        name="lazy",
        precision="float64",
        demands=Demands(tokens=1000, class_tokens=100, drafts=True),
    )
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert verdict.reason.startswith("the drafter drafted nothing")


def fails_its_record(verdict, reason):
    assert verdict.outcome is Outcome.FAIL
    assert "T0" in {result.test for result in verdict.failures}
    assert reason in verdict.reason
    return True


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.CANCELLED])
def test_long_rollouts_that_come_back_empty_are_counted_as_unfinished(finish):
    verdict = audit(draws=120, told=lambda r: [emptied(r, finish) if r.length > 20 else r])
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    empty = 480 - verdict.rollouts
    assert empty > 200
    assert f"{empty} rollouts did not finish" in verdict.reason


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish.LENGTH, "ended by length after 0 tokens, 40 were asked for"),
        (Finish.EOS, "the end-of-sequence token that ended a rollout is missing"),
    ],
)
def test_a_rollout_cannot_end_by_itself_without_a_token(finish, reason):
    assert fails_its_record(audit(draws=5, told=lambda r: [emptied(r, finish)]), reason)


def test_an_end_that_is_dropped_shows_as_a_rollout_that_ended_too_early():
    verdict = audit(told=lambda r: [without_end(r)])
    assert fails_its_record(verdict, "tokens, 40 were asked for")


def test_a_rollout_that_comes_twice_is_a_contradiction_and_is_counted_once():
    verdict = audit(told=lambda r: [r, r])
    assert fails_its_record(verdict, "came twice, or was not asked for")
    assert verdict.rollouts == 120


def test_a_rollout_that_nobody_asked_for_is_a_contradiction():
    verdict = audit(told=lambda r: [r, replace(r, request_id=RolloutId(r.request_id.draw + 1000, 0))])
    assert fails_its_record(verdict, "rollout 1000/0: came twice, or was not asked for")


def test_a_generator_that_returns_the_same_rollouts_for_ever_ends_with_an_error():
    with pytest.raises(AuditError, match="expected the 110 rollouts that are still missing, got only some that came"):
        audit(Stuck)


def test_another_prompt_than_the_one_asked_for_is_a_contradiction():
    assert fails_its_record(audit(OtherPrompt, draws=10), "continues another prompt")


def test_a_trace_that_is_withheld_where_the_rule_is_wrong_is_a_contradiction():
    verdict = audit(
        rule=policy_residual, draws=20, told=lambda r: [replace(r, trace=None) if r.request_id.draw % 2 else r]
    )
    assert fails_its_record(verdict, "rollout 1/0: drafts were verified but their trace is missing")


def test_a_generator_that_cannot_always_trace_says_which_share_it_traced():
    verdict = audit(HalfTraced, traced=False)
    assert verdict.outcome is Outcome.PASS, verdict.reason
    (line,) = [line for line in verdict.unseen if "trace" in line]
    share = float(line.split("%")[0].split()[-1])
    assert 45.0 < share < 55.0
    assert line.endswith("of the verified drafts came with a trace: T2 and T4 did not see the others")


def test_rejected_drafts_left_out_of_the_trace_are_missed():
    verdict = audit(draws=5, told=lambda r: [replace(r, trace=r.trace.take(r.trace.accepted_D))])
    assert fails_its_record(verdict, "were verified")


def trace_array(name, change):
    """A liar that exchanges one array of its traces."""

    def told(rollout):
        trace = rollout.trace
        return [replace(rollout, trace=replace(trace, **{name: change(trace)}))]

    return told


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("probs_DV", lambda t: t.probs_DV * np.nan, "drafts is not a law: it must sum to 1"),
        ("probs_DV", lambda t: t.probs_DV * 0.0, "drafts is not a law: it must sum to 1"),
        ("probs_DV", lambda t: np.pad(t.probs_DV, ((0, 0), (0, 1))), "drafted token id 16 with a policy of 16 tokens"),
        ("draft_prob_D", lambda t: t.draft_prob_D * 0 + 1, "the stated probability of a draft is not q of that draft"),
        ("draft_D", lambda t: np.where(t.accepted_D, t.draft_D, 999), "drafted token id 999 with a policy of 16"),
        ("draft_D", lambda t: np.where(t.accepted_D, t.draft_D, -1), "drafted token id -1 is negative"),
        ("round_D", lambda t: t.round_D + 100, "drafts of a round that is not in the record"),
        ("position_D", lambda t: -t.position_D, "drafts before the start of the rollout"),
    ],
)
def test_a_trace_that_cannot_be_true_is_a_contradiction_in_one_line(name, change, reason):
    assert fails_its_record(audit(draws=10, rule=policy_residual, told=trace_array(name, change)), reason)


def test_a_wrong_draft_probability_does_not_keep_the_tokens_from_being_tested():
    verdict = audit(told=trace_array("draft_prob_D", lambda t: t.draft_prob_D / 2))
    assert {result.test for result in verdict.failures} == {"T0"}
    assert verdict.tokens == audit().tokens


def test_a_negative_token_is_never_looked_up():
    def told(rollout):
        return [replace(rollout, token_ids=np.append(rollout.token_ids[:-1], -1).astype(np.int32))]

    def score(rollouts):
        for rollout in rollouts:
            assert rollout.token_ids.min() >= 0
            yield from table_score(TABLE_SV)([rollout])

    verdict = run_audit(
        Liar(TABLE_SV, DRAFT_SV, told=told), score, make_requests(5, 4, PARAMS), name="liar", precision="float64"
    )
    assert fails_its_record(verdict, "token id -1 is negative")


def test_a_round_of_more_drafts_than_can_be_told_apart_is_a_contradiction():
    def told(rollout):
        drafted = np.where(rollout.rounds.drafted > 0, 98, 0).astype(np.int16)
        return [replace(rollout, rounds=replace(rollout.rounds, drafted=drafted))]

    assert fails_its_record(audit(draws=5, told=told), "a round verified 98 drafts, at most 64 can be audited")


def test_rollouts_without_a_version_are_a_contradiction():
    assert fails_its_record(audit(draws=5, told=lambda r: [replace(r, spans=())]), "spans are not one per token")


def test_rollouts_of_two_versions_are_not_judged_when_the_learners_is_unknown():
    verdict = audit(told=lambda r: [of_version(r, r.request_id.draw % 2)])
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert verdict.reason.startswith("the rollouts are of versions 0, 1, and the learner holds one of them")


def test_a_generator_of_another_version_is_named_as_such():
    verdict = audit(draws=10, version=0, told=lambda r: [of_version(r, 5)])
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert verdict.reason.startswith("none of the ") and "was drawn by the learner's version" in verdict.reason


def test_the_honest_table_generator_passes_every_record_check():
    verdict = audit()
    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert verdict.rollouts == 120
    assert not any("trace" in line for line in verdict.unseen)
