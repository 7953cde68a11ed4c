"""Adds one rollout to an audit: record checks, classes, laws, and the numbers of every test.

Logits of the whole vocabulary are looked at in chunks of positions, so memory stays that of the learner's own pass
over one rollout.

Axes: T tokens of a rollout, N positions of a chunk, D traced drafts, V policy vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leadout.audit.bookkeeping import Declared, record_faults
from leadout.audit.bookkeeping_trace import draft_prob_faults, verified_drafts, vocabulary_faults
from leadout.audit.classes import CodeArray, token_classes
from leadout.audit.law import Law, log_full, make_law, penalised
from leadout.audit.measure import (
    NUM_DRAFT_UNIFORMS,
    TokenColumns,
    measure_correction_floor,
    measure_draft_floor,
    measure_drafts,
    measure_floor,
    measure_tokens,
    support_range,
)
from leadout.audit.sample import AuditSample, Labels
from leadout.audit.sums import CountSums
from leadout.audit.t7_pairs import Path
from leadout.errors import ModelError
from leadout.records import Finish, Rollout, Source, Trace

CHUNK_ELEMENTS = 1 << 20
"""Logits looked at together (21 positions of a 49k vocabulary), so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The learner's teacher-forced logits at the positions that produced a rollout's tokens, before temperature."""

    exact_TV: torch.Tensor
    """f32, or f64 when the generator computes in float64."""
    rounded_TV: torch.Tensor | None
    """A second pass in the generator's precision, as f32; None when that is no coarser than the first."""


def admit(sample: AuditSample, rollout: Rollout, declared: Declared, version: int | None) -> bool:
    """Whether a rollout's tokens are to be tested, from its record alone; counts it otherwise.

    `version`: the weights the learner holds; None accepts any, and the sample remembers which there were. Rollouts
    that failed or were cancelled, and those without a token, are unfinished: what is left without them is selected.
    """
    if rollout.finish in (Finish.CANCELLED, Finish.ERROR):
        sample.unfinished += 1
        return False
    faults = record_faults(rollout, declared)
    if faults:
        sample.rollouts += 1
        note(sample, rollout, faults)
        return False
    if rollout.length == 0:
        sample.unfinished += 1
        return False
    versions = {span.version for span in rollout.spans}
    given = any(span.source is Source.GIVEN for span in rollout.spans)
    if given or len(versions) != 1 or (version is not None and versions != {version}):
        sample.skipped += rollout.length
        return False
    sample.versions |= versions
    return True


def note(sample: AuditSample, rollout: Rollout, faults: Sequence[str]) -> None:
    """Keep contradictions in the record of a rollout."""
    name = f"rollout {rollout.request_id.draw}/{rollout.request_id.sibling}"
    sample.bookkeeping += [f"{name}: {fault}" for fault in faults]


def add_rollout(sample: AuditSample, rollout: Rollout, scores: Scores, *, seed: int, floor_every: int) -> None:
    """Add the tokens of an admitted rollout.

    `floor_every`: the rounding floors that need sorting are measured on every n-th token only. Raises ModelError when
    the learner's logits are unusable.
    """
    sample.rollouts += 1
    _check(rollout, scores)
    faults = vocabulary_faults(rollout.trace, scores.exact_TV.shape[-1])
    note(sample, rollout, faults or draft_prob_faults(rollout.trace))
    if faults:
        return
    class_T = token_classes(rollout)
    sample.verified += int(verified_drafts(rollout).sum())
    rng = np.random.default_rng((seed, *rollout.request_id))
    parts: list[TokenColumns] = []
    rows = max(1, CHUNK_ELEMENTS // scores.exact_TV.shape[-1])
    for start in range(0, rollout.length, rows):
        chunk = _Chunk.of(sample, rollout, scores, start, min(start + rows, rollout.length))
        parts.append(chunk.tokens(rng))
        chunk.add_ends(sample)
        chunk.add_logprobs(sample, parts[-1])
        chunk.add_drafts(sample, class_T, rng, floor_every)
        chunk.add_floor(sample, floor_every)
    size, columns = rollout.length, TokenColumns.join(parts)
    path = Path(
        draw=rollout.request_id.draw,
        sibling=rollout.request_id.sibling,
        token_T=rollout.token_ids,
        power2_T=columns.power2_N,
    )
    sample.pairs.add(rollout.prompt.token_ids.tobytes(), path)
    sample.add_tokens(
        columns,
        Labels(
            class_N=class_T,
            rollout_N=np.zeros(size, np.int64),
            draw_N=np.full(size, rollout.request_id.draw, np.int64),
        ),
    )


def _check(rollout: Rollout, scores: Scores) -> None:
    shape = tuple(scores.exact_TV.shape)
    assert len(shape) == 2 and shape[0] == rollout.length, f"logits {shape} for {rollout.length} tokens"
    if int(rollout.token_ids.max()) >= shape[1]:
        raise ModelError(
            f"the learner has {shape[1]} tokens, the generator emitted id {int(rollout.token_ids.max())}; "
            "audit a generator of the same model"
        )
    if not bool(torch.isfinite(scores.exact_TV).all()):
        raise ModelError("the learner's logits are not finite; check the model's weights before auditing a generator")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """Some neighbouring positions of one rollout."""

    rollout: Rollout
    start: int
    law: Law
    token_N: torch.Tensor
    policy_log_p_N: torch.Tensor
    rounded_NV: torch.Tensor | None
    rounded_log_p_N: torch.Tensor | None

    @classmethod
    def of(cls, sample: AuditSample, rollout: Rollout, scores: Scores, start: int, stop: int) -> _Chunk:
        params = sample.params
        token_N = torch.from_numpy(rollout.token_ids[start:stop].astype(np.int64))

        def scored(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits_NV = logits_TV[start:stop]
            moved_NV = penalised(logits_NV, rollout.prompt.token_ids, rollout.token_ids, params, start)
            full_NV = log_full(moved_NV, params)
            plain_NV = log_full(logits_NV, params) if params.has_penalties else full_NV
            return full_NV, plain_NV.gather(-1, token_N[:, None])[:, 0].double()

        full_NV, policy_log_p_N = scored(scores.exact_TV)
        rounded_NV, rounded_log_p_N = (None, None) if scores.rounded_TV is None else scored(scores.rounded_TV)
        return cls(
            rollout=rollout,
            start=start,
            law=make_law(full_NV, params, sample.tolerances),
            token_N=token_N,
            policy_log_p_N=policy_log_p_N,
            rounded_NV=rounded_NV,
            rounded_log_p_N=rounded_log_p_N,
        )

    @property
    def stop(self) -> int:
        return self.start + self.token_N.shape[0]

    def tokens(self, rng: np.random.Generator) -> TokenColumns:
        return measure_tokens(self.law, self.token_N, torch.from_numpy(rng.random(self.token_N.shape[0])))

    def add_ends(self, sample: AuditSample) -> None:
        """T1: whether a stop token came, against the chance that one comes."""
        vocab_size = self.law.log_full_NV.shape[-1]
        stops = [token for token in sample.params.stop_token_ids if token < vocab_size]
        if not stops:
            return
        ranges = [support_range(self.law, torch.full_like(self.token_N, token)) for token in stops]
        low_N, high_N = (sum(side).clamp(max=1.0).numpy() for side in zip(*ranges, strict=True))
        sample.ends.add(CountSums.of(torch.isin(self.token_N, torch.tensor(stops)).numpy(), low_N, high_N))

    def add_logprobs(self, sample: AuditSample, columns: TokenColumns) -> None:
        """T6: the sampled law is known up to the mass of its support; the error is the distance to that interval."""
        exact_N = self.policy_log_p_N.numpy()
        returned_N = self.rollout.logprobs[self.start : self.stop].astype(np.float64)
        law_error_N = returned_N - np.clip(returned_N, columns.law_low_N, columns.law_high_N)
        sample.add_logprobs(
            self.rollout.policy_logprobs[self.start : self.stop].astype(np.float64) - exact_N,
            np.where(columns.outside_N, np.nan, law_error_N),
        )
        if self.rounded_log_p_N is not None:
            sample.floor.square.add((self.rounded_log_p_N.numpy() - exact_N) ** 2)

    def add_drafts(self, sample: AuditSample, class_T: CodeArray, rng: np.random.Generator, floor_every: int) -> None:
        """T2 and T4 on the traced drafts of these positions."""
        trace = self.rollout.trace
        if trace is None:
            return
        index_D = ((trace.position_D >= self.start) & (trace.position_D < self.stop)).nonzero()[0]
        if index_D.size == 0:
            return
        position_D = trace.position_D[index_D].astype(np.int64)
        row_D = torch.from_numpy(position_D - self.start)
        law = self.law.rows(row_D)
        draft_D = torch.from_numpy(trace.draft_D[index_D].astype(np.int64))
        accepted_D = torch.from_numpy(trace.accepted_D[index_D].astype(bool))
        q_DV = draft_law(trace, index_D, law.log_full_NV)
        v_5D = torch.from_numpy(rng.random((NUM_DRAFT_UNIFORMS, index_D.size)))
        columns = measure_drafts(law, self.token_N[row_D], draft_D, accepted_D, q_DV, v_5D)
        sample.add_drafts(columns, class_T[position_D])
        if self.rounded_NV is not None:
            rounded_DV = self.rounded_NV[row_D]
            kept = torch.from_numpy((index_D % floor_every == 0).nonzero()[0])
            q_kept = None if q_DV is None else q_DV[kept]
            drafted = draft_D[kept], accepted_D[kept]
            measure_draft_floor(sample.floor, law.rows(kept), rounded_DV[kept], *drafted, q_kept)
            rejected = (~accepted_D).nonzero()[:, 0]
            q_rejected = None if q_DV is None else q_DV[rejected]
            moved_DV = rounded_DV[rejected]
            measure_correction_floor(sample.floor, law.rows(rejected), moved_DV, draft_D[rejected], q_rejected)

    def add_floor(self, sample: AuditSample, floor_every: int) -> None:
        """Rounding floors of T1 and T3."""
        if self.rounded_NV is None:
            return
        kept = (torch.arange(self.start, self.stop) % floor_every == 0).nonzero()[:, 0]
        if kept.numel():
            measure_floor(sample.floor, self.law.rows(kept), self.rounded_NV[kept])


def draft_law(trace: Trace, index_D: np.ndarray, like_NV: torch.Tensor) -> torch.Tensor | None:
    """q over the policy's vocabulary for some traced drafts; None for point masses."""
    if trace.probs_DV is None:
        return None
    probs_DV = torch.from_numpy(np.ascontiguousarray(trace.probs_DV[index_D])).to(like_NV.dtype)
    q_DV = torch.zeros(index_D.shape[0], like_NV.shape[-1], dtype=like_NV.dtype)
    if trace.token_ids_V is None:
        q_DV[:, : probs_DV.shape[-1]] = probs_DV
    else:
        q_DV[:, torch.from_numpy(trace.token_ids_V.astype(np.int64))] = probs_DV
    return q_DV / q_DV.sum(-1, keepdim=True)
