"""T0, the trace: every verified draft is there, at its place, with the probabilities it was drawn from.

A trace that leaves drafts out, or states another q than the drafts came from, would hide a wrong accept rule from T2
and T4. Where the rounds say what was drafted and accepted, the rows of a trace are determined: round after round, the
accepted drafts and the first rejected one, cut at the end of the rollout.

Axes: T tokens and R rounds of one rollout, D traced drafts, V draft vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leadout.records import Rollout, Rounds, Trace

Ints = npt.NDArray[np.int64]

ROUNDING = 2.0**-8
"""Relative error of a draft probability, and of their sum, that rounding explains (that of bfloat16)."""


def starts(rounds: Rounds) -> Ints:
    """Index of the first token of each round, i64[R]; the token before the first round came from the prefill."""
    size_R = rounds.accepted.astype(np.int64) + 1
    return 1 + np.cumsum(size_R) - size_R


def verified_drafts(rollout: Rollout) -> Ints:
    """Drafts of each round that the tokens depended on, i64[R]: the rows a trace has."""
    drafted_R = rollout.rounds.drafted.astype(np.int64)
    accepted_R = rollout.rounds.accepted.astype(np.int64)
    left_R = np.maximum(rollout.length - starts(rollout.rounds), 0)
    return np.minimum(np.minimum(drafted_R, accepted_R + 1), left_R)


def trace_faults(rollout: Rollout, trace: Trace, *, whole: bool) -> list[str]:
    """Contradictions between a trace and the rollout, whose rounds account for its tokens.

    `whole`: every verified draft must be there; False when part of the rollout was made elsewhere.
    """
    faults = _row_faults(rollout, trace) or _law_faults(trace)
    if faults:
        return faults
    emitted_D = rollout.token_ids[trace.position_D]
    if np.any(emitted_D[trace.accepted_D] != trace.draft_D[trace.accepted_D]):
        faults.append("an accepted draft is not the token that was emitted")
    if trace.probs_DV is None and np.any(emitted_D[~trace.accepted_D] == trace.draft_D[~trace.accepted_D]):
        faults.append("a rejected point-mass draft was emitted as correction")
    return faults + (_place_faults(rollout, trace) if whole else [])


def _row_faults(rollout: Rollout, trace: Trace) -> list[str]:
    """Arrays of one length whose indices point somewhere."""
    size = trace.draft_D.shape[0]
    arrays = [trace.round_D, trace.position_D, trace.accepted_D, trace.draft_prob_D]
    if trace.probs_DV is not None:
        arrays.append(trace.probs_DV)
    if any(array.shape[:1] != (size,) for array in arrays):
        return ["the arrays of the trace are not one row per draft"]
    if size == 0:
        return []
    if int(trace.position_D.max()) >= rollout.length:
        return ["the trace has drafts after the end of the rollout"]
    if int(trace.position_D.min()) < 0:
        return ["the trace has drafts before the start of the rollout"]
    if int(trace.round_D.min()) < 0 or int(trace.round_D.max()) >= rollout.rounds.drafted.shape[0]:
        return ["the trace has drafts of a round that is not in the record"]
    if int(trace.draft_D.min()) < 0:
        return [f"drafted token id {int(trace.draft_D.min())} is negative"]
    return []


def _law_faults(trace: Trace) -> list[str]:
    """Every q is a law over the draft vocabulary."""
    ids_V, probs_DV = trace.token_ids_V, trace.probs_DV
    if probs_DV is None or probs_DV.shape[0] == 0:
        return []
    if ids_V is not None:
        if ids_V.shape != probs_DV.shape[1:]:
            return [f"q is over {probs_DV.shape[1]} tokens, the draft vocabulary has {ids_V.shape[0]}"]
        if int(ids_V.min()) < 0 or np.unique(ids_V).shape != ids_V.shape:
            return ["the draft vocabulary has a negative token id, or one twice"]
    sum_D = probs_DV.sum(-1, dtype=np.float64)
    is_law_D = (np.abs(sum_D - 1.0) <= ROUNDING) & (probs_DV.min(-1) >= 0.0)
    if not is_law_D.all():
        return [f"q of {np.count_nonzero(~is_law_D)} of {is_law_D.size} drafts is not a law: it must sum to 1"]
    return []


def _place_faults(rollout: Rollout, trace: Trace) -> list[str]:
    """The rows must be those that the rounds determine."""
    rounds = rollout.rounds
    num_rounds = rounds.drafted.shape[0]
    accepted_R = np.bincount(trace.round_D[trace.accepted_D], minlength=num_rounds)
    if np.any(accepted_R != rounds.accepted):
        return ["the trace and the rounds disagree on what was accepted"]
    verified_R = verified_drafts(rollout)
    traced_R = np.bincount(trace.round_D, minlength=num_rounds)
    for index in (traced_R != verified_R).nonzero()[0][:1]:
        return [f"the trace shows {traced_R[index]} drafts of round {index}, {verified_R[index]} were verified"]
    round_D = np.repeat(np.arange(num_rounds), verified_R)
    offset_D = np.arange(round_D.shape[0]) - np.repeat(np.cumsum(verified_R) - verified_R, verified_R)
    position_D = starts(rounds)[round_D] + offset_D
    accepted_D = offset_D < rounds.accepted[round_D]
    expected = (trace.round_D, round_D), (trace.position_D, position_D), (trace.accepted_D, accepted_D)
    if any(np.any(traced != wanted) for traced, wanted in expected):
        return ["the trace puts a draft at another position than its round does"]
    return []


def draft_prob_faults(trace: Trace | None) -> list[str]:
    """Drafts whose stated probability is not q of the draft; the tokens can be tested all the same."""
    if trace is None or trace.draft_D.shape[0] == 0:
        return []
    stated_D = trace.draft_prob_D.astype(np.float64)
    if trace.probs_DV is None:
        return [] if np.all(stated_D == 1.0) else ["a point-mass draft has another probability than 1"]
    draft_D, size = trace.draft_D.astype(np.int64), trace.probs_DV.shape[1]
    if trace.token_ids_V is None:
        column_D, known_D = np.minimum(draft_D, size - 1), draft_D < size
    else:
        order_V = np.argsort(trace.token_ids_V)
        place_D = np.searchsorted(trace.token_ids_V, draft_D, sorter=order_V)
        column_D = order_V[np.minimum(place_D, size - 1)]
        known_D = trace.token_ids_V[column_D] == draft_D
    if not known_D.all():
        return [f"drafted token id {int(draft_D[~known_D][0])} is not in the draft vocabulary"]
    q_D = trace.probs_DV[np.arange(draft_D.shape[0]), column_D].astype(np.float64)
    if np.all(np.abs(stated_D - q_D) <= ROUNDING * q_D):
        return []
    return ["the stated probability of a draft is not q of that draft"]


def vocabulary_faults(trace: Trace | None, vocab_size: int) -> list[str]:
    """Drafts, or a draft vocabulary, that the policy's vocabulary does not hold."""
    if trace is None or trace.draft_D.shape[0] == 0:
        return []
    largest = int(trace.draft_D.max())
    if trace.token_ids_V is not None:
        largest = max(largest, int(trace.token_ids_V.max()))
    elif trace.probs_DV is not None:
        largest = max(largest, trace.probs_DV.shape[1] - 1)
    return [] if largest < vocab_size else [f"drafted token id {largest} with a policy of {vocab_size} tokens"]
