"""Draft length by goodput: expected committed tokens over seconds, k = 0 included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LEAST_GAIN = 1.02
"""Drafts must gain this much: plain steps in between, second looks and late decisions cost about as much."""


def best_draft_length(tokens_K: npt.NDArray[np.float64], seconds_KN: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index of the draft length with most expected tokens a second; the smallest wins a tie.

    `tokens_K`: expected tokens a row commits in a round, by candidate in ascending order. `seconds_KN`: seconds of that
    round, for N situations.
    """
    return np.asarray(np.argmax(tokens_K[:, None] / seconds_KN, axis=0), dtype=np.int64)
