"""Stage train, drafter: a student run along chains of a pack, beside the policy's law at the tokens that it drafts.

Measuring and learning both start from this; where the drafter is the same for both, they share one.

Axes: B rollouts, L query columns, H student width, N queries that count, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leadout.train.chains import CountedQueries, build_chains
from leadout.train.lesson import Lesson
from leadout.train.students import DraftStudent


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Draft logits along the chains of some rollouts."""

    rows: tuple[int, ...]
    """The rollouts' places in the pack, in order; row b of a chain is the b-th."""
    columns: int
    """Query columns."""
    queries: CountedQueries
    teacher_NV: Tensor
    """The policy's probabilities of the draft vocabulary at each query's token."""
    logits: tuple[Tensor, ...]
    """Per step, the draft logits of the queries that count there: the last ones."""


def draft_along(
    student: DraftStudent, lesson: Lesson, rows: Sequence[int], steps: int, *, autocast: bool
) -> Drafted | None:
    """Run a student along rollouts of a pack; None where none of their tokens counts."""
    rows = [row for row in rows if lesson.batch.rollouts[row].length >= 2]
    chains = build_chains(lesson.batch, rows)
    if chains is None:
        return None
    queries = chains.counted()
    if not queries.target_N.numel():
        return None
    with draft_autocast(student, autocast):
        states = student.states(lesson.batch, lesson.output, lesson.forward, chains, steps)
        # One product for all steps: the output matrix is a large part of a drafter.
        counted = []
        for step, states_BLH in enumerate(states, 1):
            own = queries.from_step(step)
            counted.append(states_BLH[queries.row_N[own], queries.column_N[own]])
        logits_MV = student.logits(torch.cat(counted), lesson.forward)
    return Drafted(
        rows=tuple(rows),
        columns=chains.query_BL.shape[1],
        queries=queries,
        teacher_NV=lesson.teacher(queries.target_N),
        logits=logits_MV.split([len(states_NH) for states_NH in counted]),
    )


def draft_autocast(student: DraftStudent, enabled: bool) -> torch.autocast:
    """Matrix products of a float32 student in bfloat16 where that is wanted."""
    device = next(student.module.parameters()).device
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and student.dtype is torch.float32)
