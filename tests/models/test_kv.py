from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadout.errors import CapacityError
from leadout.models.kv import KVSlots
from leadout.models.spec import DecoderSpec
from tests.models.tiny import CONFIGS

MAX_LEN = 6
NUM_SLOTS = 4


def slots_for_test(*, compact: bool = True) -> KVSlots:
    spec = DecoderSpec.from_config(CONFIGS["llama"]().to_dict())
    return KVSlots(spec, NUM_SLOTS, MAX_LEN, torch.float64, compact=compact)


def write(kv: KVSlots, slot: int, values: list[float]) -> None:
    """Store tokens whose keys are the values and whose values are their negatives, in every layer."""
    rows = kv.rows([slot])
    assert isinstance(rows, slice)
    value_N = torch.tensor(values, dtype=torch.float64)
    key = value_N[None, :, None, None].expand(1, len(values), 2, 8)
    start = int(kv.lengths[slot])
    for layer in range(3):
        kv.write_block(layer, rows, start, torch.cat((key + layer, -key - layer), dim=2))
    kv.advance([slot], np.array([len(values)]))


def content(kv: KVSlots, slot: int) -> list[float]:
    """What a slot holds, after checking that heads, layers, keys and values agree."""
    length = int(kv.lengths[slot])
    for layer in range(3):
        keys, values = kv.view(layer, [slot], length)
        assert torch.equal(keys, -values)
        assert torch.equal(keys - layer, (kv.view(0, [slot], length)[0][:, :1, :, :1]).expand_as(keys))
    return kv.view(0, [slot], length)[0][0, 0, :, 0].tolist()


@pytest.mark.parametrize("compact", [True, False])
@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data())
def test_any_sequence_of_operations_keeps_every_slots_content(data: st.DataObject, compact: bool) -> None:
    kv, model, counter = slots_for_test(compact=compact), dict[int, list[float]](), 0
    for _ in range(data.draw(st.integers(1, 14))):
        operation = data.draw(st.sampled_from(["allocate", "write", "rollback", "release", "copy"]))
        if operation == "allocate" and len(model) < NUM_SLOTS:
            for slot in kv.allocate(data.draw(st.integers(1, NUM_SLOTS - len(model)))):
                assert slot not in model
                model[slot] = []
        elif not model:
            continue
        slot = data.draw(st.sampled_from(sorted(model))) if model else 0
        if operation == "write" and len(model[slot]) < MAX_LEN:
            num = data.draw(st.integers(1, MAX_LEN - len(model[slot])))
            values = [float(counter + i) for i in range(num)]
            counter += num
            write(kv, slot, values)
            model[slot] += values
        elif operation == "rollback":
            kept = data.draw(st.integers(0, len(model[slot])))
            kv.rollback([slot], np.array([kept]))
            del model[slot][kept:]
        elif operation == "release":
            gone = data.draw(st.lists(st.sampled_from(sorted(model)), min_size=1, unique=True))
            kv.release(gone)
            for name in gone:
                del model[name]
        elif operation == "copy" and len(model) > 1:
            targets = data.draw(st.lists(st.sampled_from(sorted(model.keys() - {slot})), min_size=1, unique=True))
            length = data.draw(st.integers(0, len(model[slot])))
            kv.copy_prefix(slot, targets, length)
            for target in targets:
                model[target] = model[slot][:length]
        assert {name: content(kv, name) for name in model} == model


def test_all_live_slots_in_order_are_read_without_a_copy() -> None:
    kv = slots_for_test()
    slots = kv.allocate(4)
    kv.release([slots[1]])
    live = kv.order([slots[0], slots[2], slots[3]])
    assert live == [slots[0], slots[3], slots[2]]
    assert kv.view(0, live, 3)[0].data_ptr() == kv.view(0, [slots[0]], 3)[0].data_ptr()


def test_no_row_moves_where_rows_need_not_be_compact() -> None:
    kv = slots_for_test(compact=False)
    slots = kv.allocate(4)
    before = kv.rows_array(slots).tolist()
    kv.release([slots[1]])
    assert kv.order([slots[0], slots[2], slots[3]]) == [slots[0], slots[2], slots[3]]
    assert kv.rows_array([slots[0], slots[2], slots[3]]).tolist() == [before[0], before[2], before[3]]


def test_slots_out_of_order_are_read_in_the_order_asked_for() -> None:
    kv = slots_for_test()
    first, second = kv.allocate(2)
    write(kv, first, [1.0])
    write(kv, second, [2.0])
    assert kv.view(0, [second, first], 1)[0][:, 0, 0, 0].tolist() == [2.0, 1.0]


def test_a_freed_slot_comes_back_empty() -> None:
    kv = slots_for_test()
    slot = kv.allocate(1)[0]
    write(kv, slot, [1.0, 2.0])
    kv.release([slot])
    assert kv.num_free == NUM_SLOTS
    assert kv.lengths[kv.allocate(1)[0]] == 0


def test_more_slots_than_are_free_are_refused() -> None:
    kv = slots_for_test()
    kv.allocate(3)
    with pytest.raises(CapacityError, match="at most 1 new rows, got 2"):
        kv.allocate(2)


def test_the_memory_is_what_bytes_per_slot_says() -> None:
    kv = slots_for_test()
    spec = DecoderSpec.from_config(CONFIGS["llama"]().to_dict())
    assert kv.nbytes == NUM_SLOTS * KVSlots.bytes_per_slot(spec, MAX_LEN, torch.float64)
    assert kv.nbytes == NUM_SLOTS * 3 * 2 * 2 * 7 * 8 * 8
