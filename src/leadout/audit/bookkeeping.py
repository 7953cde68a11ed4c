"""T0, the record of one rollout: its arrays, its rounds and why it ended must not contradict one another.

No chance is involved, so one finding is a failure. Everything here needs the record alone; it is looked at before the
learner sees the tokens, so that a broken record costs no forward pass and cannot break one.

Axes: T tokens of one rollout, R rounds of one rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.audit.bookkeeping_trace import trace_faults
from leadout.audit.classes import token_classes
from leadout.records import Finish, Rollout, SamplingParams, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a rollout's record is held against; the defaults are for a generator one knows nothing about."""

    params: SamplingParams
    """What was asked for."""
    max_context: int | None = None
    """Prompt and completion tokens that fit the generator; None when unknown."""
    traced: bool = False
    """Whether every rollout with drafts must bring its trace."""
    continued: bool = False
    """Whether the request gave tokens to continue, which another generator may have made."""


def record_faults(rollout: Rollout, declared: Declared) -> list[str]:
    """What contradicts itself in the record of one rollout, in words; empty when nothing does.

    Rollouts that were cancelled or failed may end anywhere; of rollouts with tokens that the caller gave only the
    arrays are looked at, since nothing else of them is audited.
    """
    faults = array_faults(rollout)
    if faults or any(span.source is Source.GIVEN for span in rollout.spans):
        return faults
    return bookkeeping_faults(rollout, declared) + stop_faults(rollout, declared)


def array_faults(rollout: Rollout) -> list[str]:
    """One log-probability and one span for every token, and token ids that can be looked up."""
    arrays = (rollout.logprobs, rollout.policy_logprobs)
    spans = [span.length for span in rollout.spans]
    if any(array.shape[0] != rollout.length for array in arrays) or sum(spans) != rollout.length or 0 in spans:
        return ["log-probabilities or spans are not one per token"]
    if any(length < 0 for length in spans):
        return ["a span has a negative length"]
    faults = []
    if rollout.length and int(rollout.token_ids.min()) < 0:
        faults.append(f"token id {int(rollout.token_ids.min())} is negative")
    if not all(np.isfinite(array).all() for array in arrays):
        faults.append("log-probabilities are not finite")
    return faults


def bookkeeping_faults(rollout: Rollout, declared: Declared) -> list[str]:
    """Rounds that do not account for the tokens, and a trace that is not that of the rounds."""
    try:
        token_classes(rollout)
    except ValueError as error:
        return [str(error)]
    if rollout.trace is not None:
        return trace_faults(rollout, rollout.trace, whole=not declared.continued)
    if declared.traced and not declared.continued and bool(np.any(rollout.rounds.drafted > 0)):
        return ["drafts were verified but their trace is missing, which this generator says it can return"]
    return []


def stop_faults(rollout: Rollout, declared: Declared) -> list[str]:
    """Contradictions between the tokens and the declared end of a rollout.

    A rollout that ran out of length has exactly the length asked for, one that filled the context fills it, and one
    that ended by a token or a string ended by one that was asked for: an end that was cut off shows as a wrong length.
    """
    params, finish, faults = declared.params, rollout.finish, []
    stop_ids = params.stop_token_ids
    if np.isin(rollout.token_ids[:-1], np.asarray(stop_ids, np.int64)).any():
        faults.append("tokens were kept after an end-of-sequence token")
    if rollout.length > params.max_new_tokens and not declared.continued:
        faults.append(f"{rollout.length} tokens, at most {params.max_new_tokens} were asked for")
    last = int(rollout.token_ids[-1]) if rollout.length else None
    if finish is Finish.EOS:
        if last not in stop_ids:
            faults.append("the end-of-sequence token that ended a rollout is missing")
        elif rollout.stop != last:
            faults.append(f"ended by end-of-sequence token {last}, but names {rollout.stop!r} as what stopped it")
    elif finish is Finish.STOP:
        if rollout.stop not in params.stop:
            faults.append(f"ended by the stop string {rollout.stop!r}, which was not asked for")
        elif rollout.length == 0:
            faults.append(f"ended by the stop string {rollout.stop!r} without a token")
    elif finish in (Finish.LENGTH, Finish.CONTEXT):
        if last in stop_ids:
            faults.append(f"ended by {finish}, but its last token is an end-of-sequence token")
        faults += _limit_faults(rollout, declared)
    return faults


def _limit_faults(rollout: Rollout, declared: Declared) -> list[str]:
    """A rollout that ended by length or context must have reached it."""
    wanted, held = declared.params.max_new_tokens, len(rollout.prompt.token_ids) + rollout.length
    if rollout.finish is Finish.LENGTH and rollout.length < wanted:
        return [f"ended by length after {rollout.length} tokens, {wanted} were asked for"]
    if rollout.finish is Finish.CONTEXT and declared.max_context is not None and held < declared.max_context:
        return [f"ended by context with {held} tokens of prompt and completion, {declared.max_context} fit"]
    return []
