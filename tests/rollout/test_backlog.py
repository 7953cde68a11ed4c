import numpy as np

from leadout.rollout.backlog import Backlog

LENGTHS = np.array([12, 10, 15, 0])


def made() -> Backlog:
    """Slots 0 and 1 share a prompt of 10 tokens, slot 2 has one of 7."""
    backlog = Backlog(4)
    backlog.admit([0, 1], 10)
    backlog.admit([2], 7)
    return backlog


def test_a_prompt_counts_once_for_all_siblings_and_what_they_generated_for_each():
    assert made().tokens([0, 1, 2], LENGTHS) == (10 + 2 + 0) + (7 + 8)
    assert made().tokens([0], LENGTHS) == 12


def test_a_sibling_that_drafted_has_run_the_prompt_for_the_others():
    backlog = made()
    backlog.caught_up([0], LENGTHS)
    assert backlog.tokens([0], LENGTHS) == 0
    assert backlog.tokens([1], LENGTHS + 1) == 1


def test_released_rows_leave_nothing_behind():
    backlog = made()
    backlog.release([0, 1])
    backlog.admit([1], 3)
    assert backlog.tokens([1], np.array([0, 4, 0, 0])) == 4
