"""Counter-based random numbers: every uniform is a function of what it is for, never of when it is drawn.

A rollout's numbers depend on (seed, rollout id, position, purpose, start of the round) only, so the batch around it,
the order of finishing and a resume cannot change them. The generator is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), vectorised over rows in numpy, or the same bits from the native kernels.

Axes: X any number of draws.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from leadout.models.native.library import native_library

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_PURPOSE_SHIFT = 28


class Purpose(IntEnum):
    """What a number is for; numbers of different purposes are independent.

    TOKEN serves plain steps, bonus tokens and the check of point-mass drafts alike and ignores the round, which is why
    speculation with a point-mass drafter emits exactly the tokens of plain decoding. The others carry the start of
    their round: a position drafted again after a rejection must not see the numbers of the first attempt.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[Words, ...], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10: four 32-bit words (held in u64[X]) from a counter of four such words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed_X: npt.NDArray[Any],
    draw_X: npt.NDArray[Any],
    sibling_X: npt.NDArray[Any],
    position_X: npt.NDArray[Any],
    purpose: Purpose,
    round_start_X: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.float64]:
    """f64[X] in [0, 1) with 53 random bits each.

    `position_X` counts generated tokens of the rollout, `round_start_X` is the position at which the round began
    (ignored for `Purpose.TOKEN`, required otherwise). Positions must stay below 2**28, draws below 2**32.
    """
    assert (round_start_X is None) == (purpose is Purpose.TOKEN), "only token draws ignore the round"
    start_X = np.zeros_like(position_X) if round_start_X is None else round_start_X
    second_X = (start_X.astype(np.uint64) | np.uint64(purpose << _PURPOSE_SHIFT)) & _LOW
    return _of_words(seed_X, position_X, second_X, sibling_X, draw_X)


def round_uniforms(
    seed_B: npt.NDArray[Any],
    draw_B: npt.NDArray[Any],
    sibling_B: npt.NDArray[Any],
    start_B: npt.NDArray[Any],
    width: int,
) -> npt.NDArray[np.float64]:
    """f64[4, B, width]: `uniforms` of every purpose for the first `width` positions of a round, in one pass."""
    library = native_library()
    if library is not None:
        purposes = len(Purpose)
        return library.round_uniforms(
            seed_B, draw_B, sibling_B, start_B, width=width, purposes=purposes, shift=_PURPOSE_SHIFT
        )
    purpose_411 = np.arange(len(Purpose), dtype=np.uint64)[:, None, None]
    start_1B1 = start_B.astype(np.uint64)[None, :, None]
    second_4B1 = np.where(purpose_411 == Purpose.TOKEN, np.uint64(0), start_1B1) | purpose_411 << np.uint64(
        _PURPOSE_SHIFT
    )
    position_1BW = start_1B1 + np.arange(width, dtype=np.uint64)
    columns = [seed_B[None, :, None], position_1BW, second_4B1 & _LOW, sibling_B[None, :, None], draw_B[None, :, None]]
    flat = [column.reshape(-1) for column in np.broadcast_arrays(*columns)]
    return _of_words(*flat).reshape(len(Purpose), len(seed_B), width)


def _of_words(
    seed_X: npt.NDArray[Any],
    position_X: npt.NDArray[Any],
    second_X: npt.NDArray[Any],
    sibling_X: npt.NDArray[Any],
    draw_X: npt.NDArray[Any],
) -> npt.NDArray[np.float64]:
    library = native_library()
    if library is not None:
        return library.uniforms(seed_X, position_X, second_X, sibling_X, draw_X)
    counter = tuple(word.astype(np.uint64) & _LOW for word in (position_X, second_X, sibling_X, draw_X))
    word0, word1, _, _ = philox4x32(counter, (seed_X.astype(np.uint64) & _LOW, seed_X.astype(np.uint64) >> _SHIFT))
    bits = (word0 << np.uint64(21)) | (word1 >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53)
