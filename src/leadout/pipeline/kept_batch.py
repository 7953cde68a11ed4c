"""A batch that was generated but not yet learnt from, as plain values for a checkpoint.

Prompts are not kept but drawn again from the state that their source had, and requests made from them again; arrays
are kept as their very bytes, so that a resumed run learns from the same numbers.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leadout.errors import CheckpointError
from leadout.pipeline.synchronous import Batch
from leadout.records import Finish, RefitReport, Request, Rollout, Rounds, Source, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The parts of a batch that a checkpoint holds."""

    source: Mapping[str, object]
    """State of the prompts' source before the batch."""
    first_draw: int
    refitted: RefitReport
    seconds: float | None
    draft_age: float | None
    rollouts: tuple[Mapping[str, Any], ...]
    """In the order of the requests."""

    @classmethod
    def read(cls, state: object) -> Kept:
        """From `batch_state`'s values. Raises CheckpointError for anything else."""
        try:
            assert isinstance(state, Mapping)
            return cls(
                source=state["source"],
                first_draw=int(state["first_draw"]),
                refitted=RefitReport(**state["refitted"]),
                seconds=state["seconds"],
                draft_age=state["draft_age"],
                rollouts=tuple(state["rollouts"]),
            )
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot resume: expected the batch that was generated ahead, got something else ({error!r}); remove "
                "this checkpoint to resume from an older one"
            ) from error


def batch_state(batch: Batch, source: Mapping[str, object]) -> dict[str, object]:
    """Plain values; `source` is the state of the prompts' source before the batch took its own."""
    return {
        "source": dict(source),
        "first_draw": batch.requests[0].rollout_id.draw,
        "refitted": dataclasses.asdict(batch.refitted),
        "seconds": batch.seconds,
        "draft_age": batch.draft_age,
        "rollouts": [_rollout_state(rollout) for rollout in batch.rollouts],
    }


def kept_batch(kept: Kept, requests: Sequence[Request]) -> Batch:
    """The batch again, over the same requests. Raises CheckpointError where a rollout cannot be read."""
    try:
        rollouts = tuple(_rollout(values, request) for values, request in zip(kept.rollouts, requests, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot resume: a rollout generated ahead cannot be read ({error!r}); remove this checkpoint to resume "
            "from an older one"
        ) from error
    return Batch(
        requests=tuple(requests),
        rollouts=rollouts,
        refitted=kept.refitted,
        seconds=kept.seconds,
        draft_age=kept.draft_age,
    )


def _rollout_state(rollout: Rollout) -> dict[str, object]:
    """All but request and prompt; a trace is for audits and not kept."""
    rounds = rollout.rounds
    return {
        "token_ids": _packed(rollout.token_ids),
        "logprobs": _packed(rollout.logprobs),
        "policy_logprobs": _packed(rollout.policy_logprobs),
        "spans": [[span.length, str(span.source), span.version] for span in rollout.spans],
        "drafted": _packed(rounds.drafted),
        "accepted": _packed(rounds.accepted),
        "looked_up": None if rounds.looked_up is None else _packed(rounds.looked_up),
        "finish": str(rollout.finish),
        "stop": rollout.stop,
    }


def _rollout(values: Mapping[str, Any], request: Request) -> Rollout:
    looked_up = values["looked_up"]
    return Rollout(
        request_id=request.rollout_id,
        prompt=request.prompt,
        token_ids=_unpacked(values["token_ids"]),
        logprobs=_unpacked(values["logprobs"]),
        policy_logprobs=_unpacked(values["policy_logprobs"]),
        spans=tuple(
            Span(length=length, source=Source(source), version=version) for length, source, version in values["spans"]
        ),
        rounds=Rounds(
            drafted=_unpacked(values["drafted"]),
            accepted=_unpacked(values["accepted"]),
            looked_up=None if looked_up is None else _unpacked(looked_up),
        ),
        finish=Finish(values["finish"]),
        stop=values["stop"],
    )


def _packed(array: npt.NDArray[Any]) -> list[str]:
    return [array.dtype.str, base64.b64encode(array.tobytes()).decode("ascii")]


def _unpacked(packed: Sequence[str]) -> npt.NDArray[Any]:
    dtype, text = packed
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).copy()
