"""Accept rules for one draft position in plain numpy: the exact one, known mistakes, and harmless variants.

They measure the audit itself: its power against each mistake, and its silence on what only looks like one. The
engine's own faults (`leadout.audit.faults`) are built on the engine's objects instead.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CONFIDENCE = 0.15
"""A draft below this is dropped by `own_confidence`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """What a rule did with B drafts."""

    draft_B: Ints
    accepted_B: Bools
    token_B: Ints
    verified_B: Bools
    """False where the draft was dropped before it was verified and the token drawn from p."""


Rule = Callable[[Floats, Floats, np.random.Generator], Outcomes]


def draw(weight_BV: Floats, uniform_B: Floats) -> Ints:
    """Inverse CDF over ids; rows of `weight_BV` need not sum to 1."""
    cumulative_BV = np.cumsum(weight_BV, -1)
    target_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    found_B: Ints = np.minimum((cumulative_BV <= target_B1).sum(-1), weight_BV.shape[-1] - 1)
    return found_B


def residual(p_BV: Floats, q_BV: Floats) -> Floats:
    """(p - q)+, or p where nothing is left."""
    rest_BV = np.maximum(p_BV - q_BV, 0.0)
    return np.where(rest_BV.sum(-1, keepdims=True) < 1e-9, p_BV, rest_BV)


def _at(values_BV: Floats, index_B: Ints) -> Floats:
    return np.take_along_axis(values_BV, index_B[:, None], -1)[:, 0]


def _without(p_BV: Floats, draft_B: Ints) -> Floats:
    rest_BV = p_BV.copy()
    np.put_along_axis(rest_BV, draft_B[:, None], 0.0, -1)
    return np.where(rest_BV.sum(-1, keepdims=True) < 1e-12, p_BV, rest_BV)


def _outcomes(draft_B: Ints, accepted_B: Bools, correction_B: Ints) -> Outcomes:
    token_B = np.where(accepted_B, draft_B, correction_B)
    return Outcomes(draft_B=draft_B, accepted_B=accepted_B, token_B=token_B, verified_B=np.ones(draft_B.shape, bool))


def exact(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Sampled draft, min(1, p/q), (p - q)+."""
    u_3B = rng.random((3, p_BV.shape[0]))
    draft_B = draw(q_BV, u_3B[0])
    accepted_B = u_3B[1] * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(residual(p_BV, q_BV), u_3B[2]))


def shared_uniform(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """The number that decides acceptance draws the correction too."""
    u_2B = rng.random((2, p_BV.shape[0]))
    draft_B = draw(q_BV, u_2B[0])
    accepted_B = u_2B[1] * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(residual(p_BV, q_BV), u_2B[1]))


def shared_draft_noise(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """The Gumbel noise that drew the draft draws the correction too."""
    noise_BV = rng.gumbel(size=p_BV.shape)
    with np.errstate(divide="ignore"):
        draft_B = np.argmax(np.log(q_BV) + noise_BV, -1)
        correction_B = np.argmax(np.log(residual(p_BV, q_BV)) + noise_BV, -1)
    accepted_B = rng.random(p_BV.shape[0]) * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, correction_B)


def point_accept_soft_residual(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Accept with p(d), correct from (p - q)+."""
    u_3B = rng.random((3, p_BV.shape[0]))
    draft_B = draw(q_BV, u_3B[0])
    return _outcomes(draft_B, u_3B[1] < _at(p_BV, draft_B), draw(residual(p_BV, q_BV), u_3B[2]))


def soft_accept_point_residual(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Accept with min(1, p/q), correct from p without d (also: q subtracted at the drafted token only)."""
    u_3B = rng.random((3, p_BV.shape[0]))
    draft_B = draw(q_BV, u_3B[0])
    accepted_B = u_3B[1] * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(_without(p_BV, draft_B), u_3B[2]))


def policy_residual(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Accept with min(1, p/q), correct from p itself."""
    u_3B = rng.random((3, p_BV.shape[0]))
    draft_B = draw(q_BV, u_3B[0])
    accepted_B = u_3B[1] * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(p_BV, u_3B[2]))


def greedy_draft_soft_q(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """The draft is q's argmax, verified as if it had been sampled."""
    u_2B = rng.random((2, p_BV.shape[0]))
    draft_B = np.argmax(q_BV, -1)
    accepted_B = u_2B[0] * _at(q_BV, draft_B) < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(residual(p_BV, q_BV), u_2B[1]))


def accept_too_often(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Accept with min(1, 1.05 p/q)."""
    u_3B = rng.random((3, p_BV.shape[0]))
    draft_B = draw(q_BV, u_3B[0])
    accepted_B = u_3B[1] * _at(q_BV, draft_B) < 1.05 * _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(residual(p_BV, q_BV), u_3B[2]))


def cold_accept(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Acceptance sees p at temperature 0.7, the residual p itself."""
    u_3B = rng.random((3, p_BV.shape[0]))
    cold_BV: Floats = p_BV ** (1 / 0.7)
    cold_BV /= cold_BV.sum(-1, keepdims=True)
    draft_B = draw(q_BV, u_3B[0])
    accepted_B = u_3B[1] * _at(q_BV, draft_B) < _at(cold_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(residual(p_BV, q_BV), u_3B[2]))


def own_confidence(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """A sampled draft with q(d) below `CONFIDENCE` is dropped and the token drawn from p."""
    found = exact(p_BV, q_BV, rng)
    dropped_B = _at(q_BV, found.draft_B) < CONFIDENCE
    plain_B = draw(p_BV, rng.random((p_BV.shape[0],)))
    return Outcomes(
        draft_B=found.draft_B,
        accepted_B=found.accepted_B & ~dropped_B,
        token_B=np.where(dropped_B, plain_B, found.token_B),
        verified_B=~dropped_B,
    )


def greedy_point(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Exact: q's argmax, kept iff it is what p draws."""
    draft_B, token_B = np.argmax(q_BV, -1), draw(p_BV, rng.random((p_BV.shape[0],)))
    return _outcomes(draft_B, token_B == draft_B, token_B)


def second_chance(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """q's argmax, kept with p(d); the correction is drawn from p itself, so d has a second chance."""
    u_2B = rng.random((2, p_BV.shape[0]))
    draft_B = np.argmax(q_BV, -1)
    accepted_B = u_2B[0] < _at(p_BV, draft_B)
    return _outcomes(draft_B, accepted_B, draw(p_BV, u_2B[1]))


def point_mass(p_BV: Floats, q_BV: Floats, rng: np.random.Generator) -> Outcomes:
    """Harmless: a sampled draft verified as if it were certain; exact, half the acceptance."""
    u_2B = rng.random((2, p_BV.shape[0]))
    draft_B, token_B = draw(q_BV, u_2B[0]), draw(p_BV, u_2B[1])
    return _outcomes(draft_B, token_B == draft_B, token_B)


BIASED: Mapping[str, Rule] = MappingProxyType(
    {
        "shared uniform": shared_uniform,
        "shared draft noise": shared_draft_noise,
        "accept p(d), residual (p-q)+": point_accept_soft_residual,
        "accept min(1,p/q), residual p without d": soft_accept_point_residual,
        "residual p": policy_residual,
        "greedy draft with soft q": greedy_draft_soft_q,
        "accept x 1.05": accept_too_often,
        "temperature 0.7 in accept only": cold_accept,
        "draft dropped by its own confidence": own_confidence,
    }
)
"""Rules whose tokens do not follow p."""
