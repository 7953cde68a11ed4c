from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from leadout.records import Finish, Prompt, Request, RolloutId, SamplingParams
from leadout.rollout.rows import Row, RowTable

CAPACITY = 6


class StopAt:
    """Watches for one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def push(self, token_id: int) -> str | None:
        return "end" if token_id == self.token else None


def opened(table: RowTable, slot: int, limit: int = CAPACITY, stop_at: int | None = None) -> Row:
    request = Request(
        rollout_id=RolloutId(slot, 0),
        prompt=Prompt(id="p", token_ids=np.ones(1, np.int32), text=""),
        params=SamplingParams(max_new_tokens=limit),
    )
    row = Row(
        request=request,
        slot=slot,
        limit=limit,
        limit_finish=Finish.LENGTH,
        watch=None if stop_at is None else StopAt(stop_at),
        spans=[],
    )
    table.open(row)
    return row


def commit(
    table: RowTable, rows: list[Row], tokens: Sequence[Sequence[int]], counts: Sequence[int], ends: int = -1
) -> tuple[list[int], list[int]]:
    """Counts kept and slots that ended; `ends` is the end-of-sequence token, log-probabilities are tokens less 100."""
    tokens_BN = np.array(tokens)
    slots_B = np.array([row.slot for row in rows])
    logprobs_BN = tokens_BN - 100.0
    done = table.commit(rows, slots_B, tokens_BN, np.array(counts), logprobs_BN, logprobs_BN - 1, tokens_BN == ends)
    return done.counts_B.tolist(), [row.slot for row in done.ended]


def test_columns_past_the_count_are_overwritten_by_what_follows():
    table = RowTable(3, CAPACITY)
    rows = [opened(table, 2), opened(table, 0)]
    assert commit(table, rows, [[1, 2, 3], [4, 99, 99]], [3, 1]) == ([3, 1], [])
    assert table.tokens(0).tolist() == [4]
    assert commit(table, rows, [[5, 98], [6, 7]], [1, 2]) == ([1, 2], [])
    assert table.tokens(2).tolist() == [1, 2, 3, 5]
    rollout = table.rollout(rows[1], 0, np.float64)
    assert rollout.token_ids.tolist() == [4, 6, 7]
    assert rollout.logprobs.tolist() == [-96, -94, -93] and rollout.policy_logprobs.tolist() == [-97, -95, -94]


def test_columns_past_the_end_of_a_row_harm_nothing():
    table = RowTable(2, CAPACITY)
    rows = [opened(table, 0), opened(table, 1)]
    commit(table, rows, [[1, 2, 3, 4], [9, 0, 0, 0]], [4, 1])
    assert commit(table, rows, [[5, 6, 97, 97], [8, 7, 0, 0]], [2, 2]) == ([2, 2], [0])
    assert rows[0].finish is Finish.LENGTH and rows[1].finish is None
    assert table.tokens(0).tolist() == [1, 2, 3, 4, 5, 6]
    assert table.tokens(1).tolist() == [9, 8, 7]


def test_a_row_ends_at_its_first_end_token_within_the_count():
    table = RowTable(3, CAPACITY)
    rows = [opened(table, slot) for slot in range(3)]
    assert commit(table, rows, [[1, 50, 50], [1, 2, 50], [50, 1, 2]], [3, 2, 3], ends=50) == ([2, 2, 1], [0, 2])
    assert [row.finish for row in rows] == [Finish.EOS, None, Finish.EOS]
    assert rows[0].stop == 50 and table.tokens(1).tolist() == [1, 2]


@pytest.mark.parametrize(("tokens", "count", "finish"), [([7, 50], 1, Finish.STOP), ([50, 7], 1, Finish.EOS)])
def test_whichever_of_stop_string_and_end_token_comes_first_ends_the_row(tokens, count, finish):
    table = RowTable(1, CAPACITY)
    row = opened(table, 0, stop_at=7)
    assert commit(table, [row], [tokens], [2], ends=50) == ([count], [0])
    assert row.finish is finish


def test_a_round_without_drafts_is_recorded_as_zeros():
    table = RowTable(1, CAPACITY)
    row = opened(table, 0)
    table.record_round(np.array([0]), np.array([2]), np.array([1]), np.array([True]))
    table.record_round(np.array([0]), 0, 0)
    rounds = table.rollout(row, 0, np.float64).rounds
    assert (rounds.drafted.tolist(), rounds.accepted.tolist()) == ([2, 0], [1, 0])
    assert rounds.looked_up is not None and rounds.looked_up.tolist() == [True, False]
