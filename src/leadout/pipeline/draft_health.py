"""Notices a drafter whose drafts are hardly ever accepted, and says what it looks like. Pure; reads rows of metrics.

A drafter that does not fit costs time and nothing else, so nothing fails: the run is only slow. The cause shows in what
generator and learner measured of the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from leadout.metrics import Row, metric_row
from leadout.records import StepReport

WINDOW = 3
"""Steps that are looked at together, at the least."""
LEAST_DRAFTS = 200
"""Draft tokens below which nothing is said; where few are drafted, since drafting does not pay, more steps are looked
at together."""
HORIZON = 200
"""Steps that are looked at together, at the most."""
HARDLY = 0.01
"""Share of accepted drafts below which they are as good as never accepted."""
LITTLE = 0.1
"""Expected acceptance, or share of the policy's probability, that any fitting drafter exceeds."""
YOUNG = 5
"""Train stages for which a drafter from scratch is given time."""

_AGE = "spec/acceptance_rate_age_"


class DraftHealth:
    """Adds `spec/alarm` to the report of a step where drafts flow and are not accepted."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        """`rows`: those of the steps so far, where a run goes on."""
        self._rows: deque[Row] = deque(rows, maxlen=HORIZON)

    def watched(self, report: StepReport) -> StepReport:
        """The report, with the alarm if there is reason for one."""
        self._rows.append(metric_row(report))
        cause = alarm(list(self._rows))
        return report if cause is None else replace(report, metrics={**report.metrics, "spec/alarm": cause})


def alarm(rows: Sequence[Row]) -> str | None:
    """What is wrong with the drafter by the latest rows that hold enough drafts; None if nothing is, or they do not.

    Looked-up drafts raise none: text that does not repeat itself is no fault.
    """
    if not any(name.startswith(_AGE) for row in rows[-HORIZON:] for name in row):
        return None
    drafted = accepted = 0.0
    count = 0
    for row in reversed(rows[-HORIZON:]):
        count += 1
        drafted += _of_model(row, "draft")
        accepted += _of_model(row, "accepted")
        if count >= WINDOW and drafted >= LEAST_DRAFTS:
            break
    if count < WINDOW or drafted < LEAST_DRAFTS or accepted >= HARDLY * drafted:
        return None
    cause = _cause(rows[-WINDOW:], _age(rows[-count:]))
    return None if cause is None else f"{accepted:.0f} of the last {drafted:.0f} drafts were accepted: {cause}"


def _cause(rows: Sequence[Row], age: str) -> str | None:
    last = rows[-1]
    versions = [_number(row, "draft/version") for row in rows]
    checksums = {row.get("draft/checksum") for row in rows}
    expected, coverage = (
        _number(last, "draft/expected_acceptance_rate_pos_1"),
        _number(last, "draft/vocabulary_coverage"),
    )
    first, newest = versions[0], versions[-1]
    if first is not None and newest is not None and newest > first and len(checksums) == 1:
        return (
            f"stale weights, the drafter learnt (version {first:.0f} to {newest:.0f}) but the generator still holds "
            "the same ones; the refit does not reach it"
        )
    if coverage is not None and coverage < LITTLE:
        return (
            f"wrong vocabulary map, its tokens hold {coverage:.3f} of the policy's probability; "
            "check d2t in the drafter's folder, or start another head"
        )
    if expected is not None and expected >= LITTLE:
        return (
            f"generator and learner disagree about the same weights, the learner expects {expected:.2f} at the first "
            "position; the generator drafts with stale weights, another vocabulary map or other layers"
        )
    if expected is None or newest is None:
        return (
            f"the drafter is never refitted in this run (draft.enabled) and is {age} policy versions old; if it "
            "was so from the start it has wrong layers, a wrong vocabulary map or another policy "
            "(leadout draft info DIR --model MODEL --data DATA)"
        )
    if newest < YOUNG:
        return None
    return (
        f"wrong layers or another policy, after {newest:.0f} train stages the learner expects {expected:.3f} at the "
        "first position; check the layer ids in the drafter's config, or draft.learning_rate"
    )


def _of_model(row: Row, kind: Literal["draft", "accepted"]) -> float:
    """Draft tokens of a step that a model made, or those of them that were accepted."""
    looked_up = {"draft": "spec/num_looked_up_tokens", "accepted": "spec/num_accepted_looked_up_tokens"}[kind]
    return (_number(row, f"spec/num_{kind}_tokens") or 0.0) - (_number(row, looked_up) or 0.0)


def _age(rows: Sequence[Row]) -> str:
    """Of the latest drafts."""
    ages = [name.removeprefix(_AGE) for row in rows for name in row if name.startswith(_AGE)]
    return ages[-1] if ages else "some"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return None if value is None or isinstance(value, str) else float(value)


def alarms(rows: Sequence[Mapping[str, object]]) -> list[tuple[int, int, str]]:
    """(first step, last step, newest wording) of each stretch of steps with an alarm."""
    stretches: list[tuple[int, int, str]] = []
    for row in rows:
        text, step = row.get("spec/alarm"), row["step"]
        assert isinstance(step, int)
        if not isinstance(text, str):
            continue
        if stretches and stretches[-1][1] == step - 1:
            stretches[-1] = (stretches[-1][0], step, text)
        else:
            stretches.append((step, step, text))
    return stretches
