import numpy as np
import pytest
from scipy import stats

from leadout.models import randomness
from leadout.models.randomness import Purpose, philox4x32, round_uniforms, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_test_vectors(counter, key, expected):
    words = philox4x32(
        tuple(np.array([word], np.uint64) for word in counter), tuple(np.array([word], np.uint64) for word in key)
    )
    assert tuple(int(word[0]) for word in words) == expected


def _numbers(purpose: Purpose, *, seed=1, draw=2, sibling=3, position=4, start=4) -> float:
    column = lambda value: np.array([value], np.int64)  # noqa: E731
    round_start = None if purpose is Purpose.TOKEN else column(start)
    return float(uniforms(column(seed), column(draw), column(sibling), column(position), purpose, round_start)[0])


@pytest.mark.parametrize("field", ["seed", "draw", "sibling", "position", "start"])
def test_a_number_changes_with_everything_it_is_keyed_by(field):
    assert _numbers(Purpose.ACCEPT) != _numbers(Purpose.ACCEPT, **{field: 9})


def test_purposes_have_different_numbers():
    values = {_numbers(purpose) for purpose in Purpose}
    assert len(values) == len(Purpose)


def test_a_number_does_not_depend_on_the_others_drawn_with_it():
    position = np.arange(50)
    ones = np.ones(50, np.int64)
    together = uniforms(ones, ones, ones, position, Purpose.TOKEN)
    alone = [uniforms(ones[:1], ones[:1], ones[:1], position[i : i + 1], Purpose.TOKEN)[0] for i in range(50)]
    assert together.tolist() == alone


def test_numbers_of_neighbouring_keys_are_uniform_and_uncorrelated():
    position = np.arange(100_000)
    ones = np.ones_like(position)
    first = uniforms(ones, ones, ones, position, Purpose.ACCEPT, position)
    second = uniforms(ones, ones, ones, position, Purpose.RESIDUAL, position)
    assert stats.kstest(first, "uniform").pvalue > 1e-6
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(position.size)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 / np.sqrt(position.size)


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_the_numbers_of_a_round_made_together_are_those_made_one_by_one(monkeypatch, native):
    if not native:
        monkeypatch.setattr(randomness, "native_library", lambda: None)
    seed_B = np.array([3, 2**63 + 5], np.uint64)
    draw_B, sibling_B, start_B = np.array([7, 9]), np.array([0, 4]), np.array([11, 0])
    made = round_uniforms(seed_B, draw_B, sibling_B, start_B, 3)
    for purpose in Purpose:
        for offset in range(3):
            start = None if purpose is Purpose.TOKEN else start_B
            alone = uniforms(seed_B, draw_B, sibling_B, start_B + offset, purpose, start)
            assert made[purpose, :, offset].tolist() == alone.tolist()
