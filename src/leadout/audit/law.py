"""The law a token should have been drawn from, rebuilt from the learner's logits alone.

This is written apart from the engine's sampler on purpose: an audit that called the code under test would agree with
its mistakes. Order: penalties, temperature, top-k, top-p, min-p.

Filters cut at an edge that rounding moves, so the support is known as two level sets of the scores: `inner` tokens are
inside whatever rounding did, tokens beyond `outer` are outside whatever it did. Tests use the law restricted to the
inner set, which is exact wherever the engine put the edge.

Axes: N positions, V vocabulary, T tokens of one rollout, K candidates of the partial selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from leadout.audit.tolerances import Tolerances
from leadout.records import IntArray, SamplingParams

NUM_CANDIDATES = (256, 1024, 8192)
"""Largest scores looked at, in turn, before a row falls back to a full sort."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """The laws of N positions; all tensors f32, or f64 when the logits were."""

    log_full_NV: torch.Tensor
    """log of the law before filters (penalties and temperature applied), each row normalised."""
    inner_N: torch.Tensor
    """Scores at or above this are surely inside the support; +inf when no token is."""
    outer_N: torch.Tensor
    """Scores below this are surely outside."""
    log_inner_mass_N: torch.Tensor
    """log of the full law's mass on the inner set."""
    log_outer_mass_N: torch.Tensor
    """log of the full law's mass on the outer set."""

    def rows(self, index_N: torch.Tensor) -> Law:
        """The laws of some of the positions."""
        return Law(
            log_full_NV=self.log_full_NV[index_N],
            inner_N=self.inner_N[index_N],
            outer_N=self.outer_N[index_N],
            log_inner_mass_N=self.log_inner_mass_N[index_N],
            log_outer_mass_N=self.log_outer_mass_N[index_N],
        )

    def log_p_NV(self) -> torch.Tensor:
        """log of the law restricted to the inner set; -inf outside it."""
        if bool(torch.isneginf(self.inner_N).all()):
            return self.log_full_NV
        shifted_NV = self.log_full_NV - self.log_inner_mass_N[:, None]
        return shifted_NV.masked_fill_(self.log_full_NV < self.inner_N[:, None], -math.inf)

    def with_scores(self, log_full_NV: torch.Tensor) -> torch.Tensor:
        """log of another law restricted to this law's inner set and renormalised there (the rounding floor's use)."""
        if bool(torch.isneginf(self.inner_N).all()):
            return log_full_NV
        inside_NV = self.log_full_NV >= self.inner_N[:, None]
        kept_NV = torch.where(inside_NV, log_full_NV, -math.inf)
        mass_N = torch.logsumexp(kept_NV, -1, keepdim=True)
        return torch.where(inside_NV, kept_NV - torch.where(torch.isfinite(mass_N), mass_N, 0.0), -math.inf)


def penalised(
    logits_TV: torch.Tensor, prompt_P: IntArray, tokens_T: IntArray, params: SamplingParams, start: int = 0
) -> torch.Tensor:
    """Logits after penalties at the positions start, start+1, ... of a rollout.

    Repetition (Keskar et al. 2019) looks at prompt and output: positive logits are divided by it, negative ones
    multiplied. Presence and frequency look at the output.
    """
    if not params.has_penalties:
        return logits_TV
    out_TV = logits_TV.clone()
    for row in range(out_TV.shape[0]):
        output = tokens_T[: start + row]
        seen = torch.from_numpy(np.unique(np.concatenate((prompt_P, output))).astype(np.int64))
        scores = out_TV[row, seen]
        out_TV[row, seen] = torch.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
        ids, counts = np.unique(output, return_counts=True)
        subtract = params.frequency_penalty * counts + params.presence_penalty
        out_TV[row, torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(subtract).to(out_TV.dtype)
    return out_TV


def log_full(penalised_NV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """log softmax at the sampling temperature (1 when greedy), before filters."""
    temperature = 1.0 if params.is_greedy else params.temperature
    return torch.log_softmax(penalised_NV / temperature, -1)


def make_law(log_full_NV: torch.Tensor, params: SamplingParams, tolerances: Tolerances) -> Law:
    """The law of each position from its normalised scores (`log_full`)."""
    rows, vocabulary = log_full_NV.shape
    if not (params.has_filters or params.is_greedy):
        never_N = torch.full((rows,), -math.inf, dtype=log_full_NV.dtype)
        zero_N = torch.zeros(rows, dtype=log_full_NV.dtype)
        return Law(
            log_full_NV=log_full_NV,
            inner_N=never_N,
            outer_N=never_N,
            log_inner_mass_N=zero_N,
            log_outer_mass_N=zero_N,
        )
    inner_N, outer_N = log_full_NV.new_empty(rows), log_full_NV.new_empty(rows)
    index = torch.arange(rows)
    for candidates in (*(size for size in NUM_CANDIDATES if size < vocabulary), vocabulary):
        inner_N[index], outer_N[index], unsure_N = _edges(log_full_NV[index], params, tolerances, candidates)
        index = index[unsure_N]
        if index.numel() == 0:
            break
    p_NV = log_full_NV.exp()
    return Law(
        log_full_NV=log_full_NV,
        inner_N=inner_N,
        outer_N=outer_N,
        log_inner_mass_N=(p_NV * (log_full_NV >= inner_N[:, None])).sum(-1).log(),
        log_outer_mass_N=(p_NV * (log_full_NV >= outer_N[:, None])).sum(-1).log(),
    )


def _edges(
    log_full_NV: torch.Tensor, params: SamplingParams, tolerances: Tolerances, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inner and outer edge of every row, and whether the candidates were too few to know."""
    scores_NK = torch.topk(log_full_NV, num_candidates, -1).values
    inside_NK, outside_NK = _surely(scores_NK, params, tolerances)
    index_N = torch.arange(scores_NK.shape[0])
    num_inside_N = inside_NK.sum(-1)
    num_possible_N = (~outside_NK).sum(-1)
    inner_N = torch.where(num_inside_N > 0, scores_NK[index_N, (num_inside_N - 1).clamp(min=0)], math.inf)
    outer_N = scores_NK[index_N, (num_possible_N - 1).clamp(min=0)]
    unsure_N = (num_possible_N == num_candidates) & (num_candidates < log_full_NV.shape[-1])
    return inner_N, outer_N, unsure_N


def _surely(
    scores_NK: torch.Tensor, params: SamplingParams, tolerances: Tolerances
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each candidate (descending log-probabilities) is inside, and outside, whatever rounding did.

    Every score may move by delta, so two scores pass each other within 2 delta; the compared mass moves by tau.
    """
    temperature = 1.0 if params.is_greedy else params.temperature
    margin = 2.0 * tolerances.delta / temperature
    top_N1 = scores_NK[:, :1]
    if params.is_greedy:
        alone_N1 = scores_NK[:, 1:2] < top_N1 - margin
        first_NK = torch.zeros_like(scores_NK, dtype=torch.bool)
        first_NK[:, 0] = True
        return first_NK & alone_N1, scores_NK < top_N1 - margin
    rising_NK = (-scores_NK).contiguous()
    reach_NK = torch.searchsorted(rising_NK, (-(scores_NK - margin)).contiguous(), right=True)
    above_NK = torch.searchsorted(rising_NK, (-(scores_NK + margin)).contiguous(), right=False)
    inside_NK = torch.ones_like(scores_NK, dtype=torch.bool)
    outside_NK = torch.zeros_like(inside_NK)
    if params.top_k > 0:
        inside_NK &= reach_NK <= params.top_k
        outside_NK |= above_NK >= params.top_k
    if params.top_p < 1.0:
        probs_NK = scores_NK.double().exp()
        mass_NK = torch.nn.functional.pad(probs_NK.cumsum(-1), (1, 0))
        most_N1, least_N1 = torch.ones_like(top_N1).double(), torch.ones_like(top_N1).double()
        if params.top_k > 0:
            most_N1 = (probs_NK * ~outside_NK).sum(-1, keepdim=True)
            least_N1 = (probs_NK * inside_NK).sum(-1, keepdim=True).clamp(min=1e-9)
        inside_NK &= (mass_NK.gather(-1, reach_NK) - probs_NK) / least_N1 < params.top_p - tolerances.tau
        outside_NK |= mass_NK.gather(-1, above_NK) / most_N1 >= params.top_p + tolerances.tau
    if params.min_p > 0.0:
        floor_N1 = top_N1 + math.log(params.min_p)
        inside_NK &= scores_NK > floor_N1 + margin
        outside_NK |= scores_NK < floor_N1 - margin
    return inside_NK, outside_NK
