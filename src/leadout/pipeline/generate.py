"""Requests -> rollouts -> groups, over any generator: submit everything, collect until nothing is left.

Rollouts come back in whatever order they finish; here they are put back into the order of the requests, so that
rewards, groups and files never depend on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from leadout.errors import LeadoutError
from leadout.interfaces import Generator
from leadout.records import Group, Request, Rollout, RolloutId, Score

_PATIENCE = 0.2
"""Seconds after which a generation that may be stopped is asked whether it was."""


class StoppedError(Exception):
    """A generation was given up; the generator is idle."""


def generate(
    generator: Generator, requests: Sequence[Request], stopped: Callable[[], bool] | None = None
) -> list[Rollout]:
    """One rollout per request, in the order of the requests.

    Raises:
        LeadoutError: the generator left requests unanswered or answered what nobody asked for.
        StoppedError: `stopped`, which is asked now and then, said so.

    """
    generator.submit(requests)
    finished: dict[RolloutId, Rollout] = {}
    while len(finished) < len(requests):
        asked = time.monotonic()
        rollouts = generator.collect(None if stopped is None else _PATIENCE)
        if stopped is not None and stopped():
            generator.cancel([request.rollout_id for request in requests])
            raise StoppedError
        if not rollouts and (stopped is None or time.monotonic() - asked < _PATIENCE):
            break
        finished.update((rollout.request_id, rollout) for rollout in rollouts)
    wanted = [request.rollout_id for request in requests]
    if len(set(wanted)) != len(wanted) or set(wanted) != finished.keys():
        missing = len(set(wanted) - finished.keys())
        foreign = len(finished.keys() - set(wanted))
        raise LeadoutError(
            f"the generator was asked for {len(wanted)} different rollouts, {missing} did not come back and {foreign} "
            f"came unasked: collect what is running before submitting, and give every request its own rollout id"
        )
    return [finished[rollout_id] for rollout_id in wanted]


def group_by_draw(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Group]:
    """Groups in order of draw, each with its rollouts in sibling order, whatever the order given.

    Example: rollouts (8, 1), (7, 0), (8, 0), (7, 1) become groups [(7, 0), (7, 1)] and [(8, 0), (8, 1)].
    """
    assert len(rollouts) == len(scores), f"{len(rollouts)} rollouts but {len(scores)} scores"
    draws: dict[int, list[tuple[Rollout, Score]]] = {}
    for rollout, score in sorted(zip(rollouts, scores, strict=True), key=lambda pair: pair[0].request_id):
        draws.setdefault(rollout.request_id.draw, []).append((rollout, score))
    return [
        Group(
            prompt=members[0][0].prompt,
            rollouts=tuple(rollout for rollout, _ in members),
            scores=tuple(score for _, score in members),
        )
        for members in draws.values()
    ]
