"""The alarm names what is wrong with a drafter, and is silent where nothing is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from leadout.pipeline.draft_health import DraftHealth, alarm, alarms
from leadout.pipeline.progress import Progress
from leadout.records import Stage, StepReport


def row(step=1, drafted=300.0, accepted=0.0, *, version=None, age=0, **draft):
    made = {
        "step": step,
        "version": step - 1,
        "spec/num_draft_tokens": drafted,
        "spec/num_accepted_tokens": accepted,
        f"spec/acceptance_rate_age_{age}": accepted / drafted if drafted else 0.0,
        "draft/checksum": f"{step:08x}",
    }
    if version is not None:
        made["draft/version"] = version
    names = {"expected": "draft/expected_acceptance_rate_pos_1", "coverage": "draft/vocabulary_coverage"}
    return made | {names.get(name, f"draft/{name}"): value for name, value in draft.items()}


def rows(count=3, **changes):
    return [row(step, **{"version": 10 + step, "expected": 0.001, "coverage": 0.9} | changes) for step in range(count)]


def test_weights_that_never_change_in_the_generator_are_called_stale():
    stuck = [each | {"draft/checksum": "00c0ffee"} for each in rows()]
    assert "0 of the last 900 drafts were accepted: stale weights" in alarm(stuck)
    assert "version 10 to 12" in alarm(stuck)


def test_a_vocabulary_without_the_policys_tokens_is_named_first():
    assert "wrong vocabulary map, its tokens hold 0.020" in alarm(rows(coverage=0.02, expected=0.01))


def test_a_learner_that_expects_more_blames_the_generator():
    assert "the learner expects 0.55 at the first position" in alarm(rows(expected=0.55))


def test_a_drafter_that_learnt_long_and_guesses_nothing_has_wrong_layers():
    assert "wrong layers or another policy, after 12 train stages" in alarm(rows())


def test_a_drafter_that_is_never_refitted_is_named_with_its_age():
    frozen = [row(step, age=4) for step in range(3)]
    assert "never refitted in this run (draft.enabled) and is 4 policy versions old" in alarm(frozen)


@pytest.mark.parametrize(
    "quiet",
    [
        rows(2),
        rows(drafted=60.0),
        rows(199, drafted=1.0),
        rows(accepted=9.0),
        rows(version=3),
        [{k: v for k, v in each.items() if "age" not in k} for each in rows()],
    ],
    ids=["two steps", "few drafts", "few in many steps", "some accepted", "a young drafter", "looked-up drafts"],
)
def test_nothing_is_said_of(quiet):
    assert alarm(quiet) is None


def test_only_the_last_three_steps_count():
    assert alarm([*rows(accepted=100.0), *rows()]) is not None
    assert alarm([*rows(), *rows(accepted=100.0)]) is None


def test_few_drafts_a_step_are_counted_over_more_steps():
    assert "0 of the last 204 drafts were accepted" in alarm(rows(30, drafted=12.0))


def test_drafts_of_long_ago_do_not_outweigh_two_hundred_new_ones():
    before = [row(step, accepted=150.0, version=step) for step in range(20)]
    assert "0 of the last 204 drafts" in alarm([*before, *rows(17, drafted=12.0)])
    assert alarm([*rows(20), *rows(17, drafted=12.0, accepted=1.0)]) is None


def test_looked_up_drafts_do_not_hide_a_dead_model():
    looked_up = {"spec/num_looked_up_tokens": 100.0, "spec/num_accepted_looked_up_tokens": 60.0}
    mixed = [each | looked_up for each in rows(drafted=400.0, accepted=60.0)]
    assert "0 of the last 900 drafts were accepted" in alarm(mixed)


def report(each) -> StepReport:
    metrics = {name: value for name, value in each.items() if name not in ("step", "version")}
    return StepReport(step=each["step"], version=each["version"], seconds=dict.fromkeys(Stage, 0.1), metrics=metrics)


def test_the_report_of_a_step_carries_the_alarm_and_a_resumed_run_remembers_the_steps_before():
    health = DraftHealth()
    watched = [health.watched(report(each)) for each in rows()]
    assert ["spec/alarm" in each.metrics for each in watched] == [False, False, True]
    resumed = DraftHealth(rows(2)).watched(report(rows()[2]))
    assert resumed == watched[2]


def test_an_alarm_is_printed_once_until_it_is_over():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, width=300), 9)
    for text in ("bad", "bad", None, "bad"):
        progress.finish_step(report(row() | ({"spec/alarm": text} if text else {})))
    assert screen.getvalue().count("warning: bad") == 2


def test_stretches_of_alarms_are_told_apart():
    told = [row(step) | ({"spec/alarm": f"a{step}"} if step in (2, 3, 6) else {}) for step in range(8)]
    assert alarms(told) == [(2, 3, "a3"), (6, 6, "a6")]
