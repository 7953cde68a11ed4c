"""The class of every emitted token, known before the token was drawn.

Given its prefix and its class, a token of a lossless generator follows exactly the policy's law, so each class can be
tested on its own. That is only true of events that happened before the draw: the position inside a round was reached
or not, a draft was there or not. Whether the token was accepted or corrected is decided by the draw itself, and
neither accepted tokens nor corrections follow the policy's law when taken alone.

Axes: T tokens of one rollout, R rounds of one rollout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leadout.records import Rollout, Rounds

CodeArray = npt.NDArray[np.int64]

FIRST = 0
PLAIN = 1
AFTER_REJECTION = 2
AFTER_FULL_ACCEPTANCE = 3
BONUS = 4
_FIRST_LATER = 5
"""Code of j=2; j=3 is the next, and so on."""
MAX_DRAFT_LENGTH = 64
NUM_CLASSES = _FIRST_LATER + MAX_DRAFT_LENGTH - 1

_NAMES = ("first", "plain", "j=1 after rejection", "j=1 after full acceptance", "bonus")


def class_name(code: int) -> str:
    """Name of a class in reports, for example "j=2"."""
    return _NAMES[code] if code < _FIRST_LATER else f"j={code - _FIRST_LATER + 2}"


def draft_position(code: int) -> int:
    """Round position j of a class that verified a draft; 0 for first, plain and bonus."""
    if code in (AFTER_REJECTION, AFTER_FULL_ACCEPTANCE):
        return 1
    return code - _FIRST_LATER + 2 if code >= _FIRST_LATER else 0


def committed_tokens(rounds: Rounds) -> int:
    """Tokens the rounds account for when the last one is not cut, the prefill's token not counted."""
    return int(rounds.accepted.sum()) + int(rounds.accepted.shape[0])


def token_classes(rollout: Rollout) -> CodeArray:
    """Class code of every token, i64[T].

    ``j=1 after full acceptance`` is every first position of a drafted round that follows no rejection: after a round
    accepted whole, a plain step, or the prefill.

    Raises ValueError when the rounds do not account for the tokens.
    """
    length = rollout.length
    rounds = rollout.rounds
    if rounds.drafted.shape != rounds.accepted.shape:
        raise ValueError(f"{rounds.drafted.size} rounds drafted, {rounds.accepted.size} accepted")
    if length == 0:
        return np.zeros(0, np.int64)
    drafted_R = rounds.drafted.astype(np.int64)
    accepted_R = rounds.accepted.astype(np.int64)
    if np.any(drafted_R > MAX_DRAFT_LENGTH):
        raise ValueError(f"a round verified {drafted_R.max()} drafts, at most {MAX_DRAFT_LENGTH} can be audited")
    if np.any(accepted_R > drafted_R) or np.any(accepted_R < 0):
        raise ValueError("a round accepted more drafts than it verified")
    missing = committed_tokens(rounds) + 1 - length
    if missing not in (0, 1):
        raise ValueError(f"rounds account for {committed_tokens(rounds) + 1} tokens, the rollout has {length}")
    size_R = accepted_R + 1
    starts_R = np.cumsum(size_R) - size_R
    round_T = np.repeat(np.arange(size_R.shape[0]), size_R)
    position_T = np.arange(round_T.shape[0]) - starts_R[round_T] + 1
    rejected_R = accepted_R < drafted_R
    after_rejection_R = np.concatenate(([False], rejected_R[:-1])) if rejected_R.size else rejected_R
    codes_T = np.where(
        position_T > drafted_R[round_T],
        np.where(drafted_R[round_T] == 0, PLAIN, BONUS),
        np.where(
            position_T == 1,
            np.where(after_rejection_R[round_T], AFTER_REJECTION, AFTER_FULL_ACCEPTANCE),
            position_T + _FIRST_LATER - 2,
        ),
    )
    return np.concatenate(([FIRST], codes_T))[:length].astype(np.int64)
