from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.data.order import ShuffledPrompts
from leadout.errors import CheckpointError, DataError
from leadout.records import Prompt


def prompts(count: int, offset: int = 0) -> list[Prompt]:
    made = range(offset, offset + count)
    return [Prompt(id=f"x/{index}", token_ids=np.array([index], np.int32), text=str(index)) for index in made]


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in taken]


def test_an_epoch_hands_out_every_prompt_once() -> None:
    source = ShuffledPrompts(prompts(10), seed=0)
    assert sorted(ids(source.take(10))) == sorted(f"x/{index}" for index in range(10))


def test_epochs_are_shuffled_afresh() -> None:
    source = ShuffledPrompts(prompts(50), seed=0)
    assert ids(source.take(50)) != ids(source.take(50))


def test_the_order_follows_the_seed() -> None:
    first = ids(ShuffledPrompts(prompts(50), seed=0).take(120))
    assert first == ids(ShuffledPrompts(prompts(50), seed=0).take(120))
    assert first != ids(ShuffledPrompts(prompts(50), seed=1).take(120))


def test_the_order_does_not_depend_on_how_many_are_taken_at_once() -> None:
    one = ShuffledPrompts(prompts(7), seed=3)
    many = ShuffledPrompts(prompts(7), seed=3)
    assert ids(many.take(20)) == [name for _ in range(20) for name in ids(one.take(1))]


def test_without_shuffling_prompts_come_as_they_lie() -> None:
    assert ids(ShuffledPrompts(prompts(3), seed=0, shuffle=False).take(5)) == ["x/0", "x/1", "x/2", "x/0", "x/1"]


@pytest.mark.parametrize("already", [0, 3, 7, 14, 25])
def test_a_restored_source_goes_on_with_the_very_next_prompt(already: int) -> None:
    source = ShuffledPrompts(prompts(7), seed=3)
    source.take(already)
    state = json.loads(json.dumps(source.state_dict()))
    restored = ShuffledPrompts(prompts(7), seed=3)
    restored.load_state_dict(state)
    assert ids(restored.take(30)) == ids(source.take(30))


def test_other_data_cannot_take_over_the_position() -> None:
    state = ShuffledPrompts(prompts(7), seed=3).state_dict()
    with pytest.raises(CheckpointError, match="the training data changed"):
        ShuffledPrompts(prompts(7, offset=1), seed=3).load_state_dict(state)


def test_another_seed_cannot_take_over_the_position() -> None:
    state = ShuffledPrompts(prompts(7), seed=3).state_dict()
    with pytest.raises(CheckpointError, match="the training seed changed, expected 3 as saved, got 4"):
        ShuffledPrompts(prompts(7), seed=4).load_state_dict(state)


def test_a_broken_position_is_refused() -> None:
    source = ShuffledPrompts(prompts(7), seed=3)
    with pytest.raises(CheckpointError, match="broken data position"):
        source.load_state_dict({**source.state_dict(), "position": 8})


def test_no_prompts_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        ShuffledPrompts([], seed=0)
