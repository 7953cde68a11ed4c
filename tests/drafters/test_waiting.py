from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.drafters.waiting import WaitingEntries

WIDTH = 2


def entries() -> WaitingEntries:
    return WaitingEntries(3, 60, WIDTH, dtype=torch.float64, device=torch.device("cpu"))


def taps(*values: int) -> torch.Tensor:
    return torch.tensor([[v, v + 0.5] for v in values], dtype=torch.float64)


def step(waiting: WaitingEntries, slots: list[int], tokens: list[int]) -> None:
    """A plain step; the state before a token is ten times the token."""
    waiting.add(
        slots, torch.tensor(tokens)[:, None], np.ones(len(slots), np.int64), taps(*[10 * t for t in tokens])[:, None]
    )


def held(waiting: WaitingEntries, slot: int) -> tuple[list[int], list[float]]:
    """Tokens of a slot and the first entry of their states; they are taken."""
    (count,) = waiting.take([slot]).tolist()
    return waiting.tokens_SM[slot, :count].tolist(), waiting.taps_SMF[slot, :count, 0].tolist()


def test_noted_steps_and_rounds_of_several_tokens_wait_in_their_order():
    waiting = entries()
    waiting.open([2, 0], taps(7)[0])
    waiting.add([2, 0], torch.tensor([[1], [2]]), np.ones(2, np.int64), None)
    step(waiting, [2, 0], [3, 4])
    step(waiting, [0], [5])
    block = torch.tensor([[6, 99, 99], [8, 9, 99]])
    waiting.add([2, 0], block, np.array([1, 2]), taps(60, 0, 0, 80, 90, 0).view(2, 3, WIDTH))
    step(waiting, [0], [11])
    assert held(waiting, 2) == ([1, 3, 6], [7, 30, 60])
    assert held(waiting, 0) == ([2, 4, 5, 8, 9, 11], [7, 40, 50, 80, 90, 110])


def test_more_entries_than_there_was_room_for_keep_what_was_there():
    waiting = entries()
    waiting.open([0, 1], taps(0)[0])
    waiting.add([0, 1], torch.tensor([[1], [1]]), np.ones(2, np.int64), None)
    for token in range(2, 50):
        step(waiting, [0, 1], [token, 100 + token])
    assert held(waiting, 0)[0] == list(range(1, 50))
    assert held(waiting, 1) == ([1, *range(102, 150)], [0, *(10 * t for t in range(102, 150))])


def test_a_slot_that_was_released_starts_anew():
    waiting = entries()
    waiting.open([0], taps(1)[0])
    waiting.add([0], torch.tensor([[1]]), np.ones(1, np.int64), None)
    step(waiting, [0], [2])
    waiting.release([0])
    waiting.open([0], taps(5)[0])
    waiting.add([0], torch.tensor([[9]]), np.ones(1, np.int64), None)
    assert held(waiting, 0) == ([9], [5])


def test_entries_that_were_taken_do_not_wait_any_longer():
    waiting = entries()
    waiting.open([0], taps(1)[0])
    waiting.add([0], torch.tensor([[1]]), np.ones(1, np.int64), None)
    assert held(waiting, 0) == ([1], [1])
    step(waiting, [0], [4])
    assert held(waiting, 0) == ([4], [40])
    with pytest.raises(AssertionError, match="has gained a token"):
        waiting.take([0])
