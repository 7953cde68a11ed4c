"""Runs one audit: generate, teacher-force each rollout once, add it, forget it, judge.

Works on any `Generator`: what its trace cannot show is said in the verdict, never assumed. The sample is every rollout
that was started, so nothing is chosen by how it turned out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from leadout.audit.bookkeeping import Declared
from leadout.audit.judge import Demands, judge
from leadout.audit.observe import Scores, add_rollout, admit, note
from leadout.audit.sample import AuditSample
from leadout.audit.tolerances import Precision, tolerances_for
from leadout.audit.verdict import Verdict
from leadout.errors import AuditError, ConfigError
from leadout.interfaces import Generator
from leadout.records import Request, Rollout, RolloutId

Score = Callable[[Sequence[Rollout]], Iterable[Scores]]
"""Teacher-forces rollouts with the learner's model, in order; best lazily, since logits are large."""
Progress = Callable[[int, int, int], None]
"""Called with (rollouts done, rollouts in all, tokens so far)."""

SCORED_TOGETHER = 64
"""Rollouts handed to `score` at once, those of one prompt next to each other: they can share its forward pass."""
FLOOR_TOKENS = 4000
"""About as many tokens measure the rounding floors that need sorting."""


def run_audit(
    generator: Generator,
    score: Score,
    requests: Sequence[Request],
    *,
    name: str,
    precision: Precision,
    version: int | None = None,
    demands: Demands | None = None,
    seed: int = 0,
    rounded_share: float = 1.0,
    progress: Progress | None = None,
) -> Verdict:
    """Audit `generator` on `requests`, which share one `SamplingParams` (the trace is asked for where it can be given).

    `precision` is what the generator computes in; it decides what is blamed on rounding. `rounded_share` is
    the share of the rollouts that `score` gives a second, rounded pass: floors need a few thousand tokens. `version` is
    that of the weights `score` holds; None when nothing else was ever loaded, and then all rollouts must be of one
    version. Raises ConfigError on unusable requests, ModelError when the learner's own logits are unusable,
    AuditError when the generator goes on to return nothing but what it returned before.
    """
    if not requests:
        raise ConfigError("expected at least one request to audit, got none; give prompts")
    params = replace(requests[0].params, trace=generator.capabilities.trace)
    if any(replace(request.params, trace=params.trace) != params for request in requests):
        raise ConfigError("expected one sampling setting for the whole audit, got several; audit each on its own")
    sample = AuditSample(params, tolerances_for(precision), precision == "bfloat16")
    floor_every = max(1, int(rounded_share * len(requests) * params.max_new_tokens) // FLOOR_TOKENS)
    waiting = {request.rollout_id: request for request in requests}
    if len(waiting) != len(requests):
        raise ConfigError("expected every rollout id once, got some twice: their numbers would be the same")
    generator.submit([replace(request, params=params) for request in requests])
    held: list[Rollout] = []
    while waiting:
        admitted = _collect(generator, waiting, sample, version)
        if admitted is None:
            sample.unfinished += len(waiting)
            break
        held += admitted
        if len(held) >= SCORED_TOGETHER:
            _add(sample, held, score, seed, floor_every, rounded_share >= 1.0)
            held = []
        if progress is not None:
            progress(len(requests) - len(waiting), len(requests), sample.tokens + sum(r.length for r in held))
    _add(sample, held, score, seed, floor_every, rounded_share >= 1.0)
    return judge(sample, name, precision, demands or Demands())


def _collect(
    generator: Generator, waiting: dict[RolloutId, Request], sample: AuditSample, version: int | None
) -> list[Rollout] | None:
    """The next rollouts that were waited for and whose tokens can be tested; None when nothing comes any more.

    Raises AuditError when none of what came was waited for: such a generator might never end.
    """
    finished = generator.collect()
    if not finished:
        return None
    missing, admitted = len(waiting), []
    for rollout in finished:
        request = waiting.pop(rollout.request_id, None)
        if request is None:
            note(sample, rollout, ["came twice, or was not asked for"])
        elif not np.array_equal(rollout.prompt.token_ids, request.prompt.token_ids):
            note(sample, rollout, ["continues another prompt than the one it was asked to continue"])
        elif admit(sample, rollout, _declared(generator, request, sample), version):
            admitted.append(rollout)
    if len(waiting) == missing:
        raise AuditError(
            f"expected the {missing} rollouts that are still missing, got only some that came before or were not "
            f"asked for ({sample.bookkeeping[-1]}); the generator is faulty"
        )
    return admitted


def _declared(generator: Generator, request: Request, sample: AuditSample) -> Declared:
    """What the record of this request's rollout is held against."""
    capabilities = generator.capabilities
    return Declared(
        params=sample.params,
        max_context=capabilities.max_context,
        traced=capabilities.trace,
        continued=request.given is not None,
    )


def _add(
    sample: AuditSample,
    rollouts: Sequence[Rollout],
    score: Score,
    seed: int,
    floor_every: int,
    needs_rounded: bool,
) -> None:
    """Teacher-force some rollouts and add them."""
    if not rollouts:
        return
    ordered = sorted(rollouts, key=lambda rollout: rollout.prompt.id)
    for rollout, scores in zip(ordered, score(ordered), strict=True):
        if sample.has_floor and needs_rounded and scores.rounded_TV is None:
            raise ConfigError("expected two passes of the learner (fp32 and bf16) for a bf16 engine, got one")
        add_rollout(sample, rollout, scores, seed=seed, floor_every=floor_every)
