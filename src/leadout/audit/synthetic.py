"""A small policy with a known law, to measure the audit: how often it fails by chance, how soon it finds a bias.

Logits depend on the previous token; the generator's differ from the learner's by fresh rounding noise at every
position. Rollouts of many audits are made together, one token of all rows at a time; `leadout.audit.synthetic_audits`
puts them through the same `measure` and `judge` code as real ones.

Axes: B rollouts, N tokens of all rollouts in order, V vocabulary, S contexts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from leadout.audit.biased_rules import Floats, Ints, Rule, draw, exact
from leadout.audit.classes import AFTER_FULL_ACCEPTANCE, AFTER_REJECTION, BONUS, FIRST, PLAIN
from leadout.audit.measure import Columns
from leadout.records import SamplingParams

EOS = 0
DRAFT_LENGTHS = (0, 1, 2, 3, 3)
"""A round's k is drawn from these before anything of the round is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One synthetic experiment."""

    num_rollouts: int = 16
    """Per audit."""
    max_length: int = 40
    num_siblings: int = 4
    vocab_size: int = 12
    sharpness: float = 1.6
    """Standard deviation of the logits."""
    draft_noise: float = 0.9
    """Standard deviation of the draft's logits about the policy's."""
    rounding: float = 0.05
    """Standard deviation of the generator's logits about the learner's."""
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = exact
    true_temperature: float | None = None
    """What the generator really uses; None is the declared one."""
    stale_after_rejection: bool = False
    """After a rejection the generator's logits are those of the context before (a cache not rolled back)."""
    wrong_bonus: bool = False
    """The bonus is drawn from the law of the position before."""
    shared_noise: bool = False
    """Siblings use the same numbers."""
    point_drafts: bool = False
    """The rule proposes point masses, and the trace says so."""
    traced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made(Columns):
    """All tokens of all rollouts, in order of rollouts."""

    exact_NV: Floats
    """The learner's logits."""
    rounded_NV: Floats
    """The learner's logits of the second pass."""
    token_N: Ints
    class_N: Ints
    rollout_N: Ints
    logprob_N: Floats
    """Returned policy log-probability."""
    verified_N: np.ndarray
    """A draft was verified here."""
    accepted_N: np.ndarray
    draft_N: Ints
    q_NV: Floats


@dataclass(slots=True)
class _State:
    """Where each of the B rollouts stands."""

    alive_B: np.ndarray
    context_B: Ints
    before_B: Ints
    position_B: Ints
    length_B: Ints
    rejected_B: np.ndarray


def filtered(log_p_BV: Floats, params: SamplingParams) -> Floats:
    """Probabilities after top-k, top-p and min-p, by a full sort."""
    p_BV = np.exp(log_p_BV)
    order_BV = np.argsort(-p_BV, -1, kind="stable")
    sorted_BV = np.take_along_axis(p_BV, order_BV, -1)
    kept_BV = np.ones_like(sorted_BV, bool)
    if params.top_k > 0:
        kept_BV[:, params.top_k :] = False
    sorted_BV = np.where(kept_BV, sorted_BV, 0.0)
    sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdims=True)
    if params.top_p < 1.0:
        kept_BV &= np.cumsum(sorted_BV, -1) - sorted_BV < params.top_p
    kept_BV &= sorted_BV >= params.min_p * sorted_BV[:, :1]
    sorted_BV = np.where(kept_BV, sorted_BV, 0.0)
    out_BV = np.zeros_like(p_BV)
    np.put_along_axis(out_BV, order_BV, sorted_BV, -1)
    filtered_BV: Floats = out_BV / out_BV.sum(-1, keepdims=True)
    return filtered_BV


def _log_softmax(logits_BV: Floats) -> Floats:
    shifted_BV = logits_BV - logits_BV.max(-1, keepdims=True)
    log_p_BV: Floats = shifted_BV - np.log(np.exp(shifted_BV).sum(-1, keepdims=True))
    return log_p_BV


def simulate(setup: Setup, num_audits: int, seed: int) -> Made:
    """Rollouts of `num_audits` audits, `setup.num_rollouts` each."""
    rng = np.random.default_rng(seed)
    size = setup.vocab_size
    table_SV = setup.sharpness * rng.standard_normal((size, size))
    table_SV[:, EOS] -= 1.5
    draft_SV = _log_softmax(table_SV + setup.draft_noise * rng.standard_normal(table_SV.shape))
    num_rows = num_audits * setup.num_rollouts
    groups = -(-num_rows // setup.num_siblings)
    start_B = np.repeat(rng.integers(1, size, groups), setup.num_siblings)[:num_rows]
    state = _State(
        alive_B=np.ones(num_rows, bool),
        context_B=start_B.copy(),
        before_B=start_B.copy(),
        position_B=np.zeros(num_rows, np.int64),
        length_B=np.zeros(num_rows, np.int64),
        rejected_B=np.zeros(num_rows, bool),
    )
    parts = []
    for step in range(setup.max_length):
        parts.append(_step(setup, table_SV, draft_SV, state, step, rng))
        if not state.alive_B.any():
            break
    joined = Made.join(parts)
    order_N = np.argsort(joined.rollout_N, kind="stable")
    return joined.take(order_N)


def _step(setup: Setup, table_SV: Floats, draft_SV: Floats, state: _State, step: int, rng: np.random.Generator) -> Made:
    """One token of every live rollout."""
    rows_B = state.alive_B.nonzero()[0]
    starts_B = (state.position_B[rows_B] == 0) & (step > 0)
    lengths_B = rng.choice(np.asarray(DRAFT_LENGTHS), rows_B.shape[0])
    state.length_B[rows_B[starts_B]] = lengths_B[starts_B]
    state.position_B[rows_B[starts_B]] = 1
    position_B, length_B = state.position_B[rows_B], state.length_B[rows_B]
    drafted_B = (position_B >= 1) & (position_B <= length_B)
    class_B = _classes(step, position_B, length_B, state.rejected_B[rows_B])

    context_B = state.context_B[rows_B]
    seen_B = context_B
    if setup.stale_after_rejection:
        seen_B = np.where(class_B == AFTER_REJECTION, state.before_B[rows_B], seen_B)
    if setup.wrong_bonus:
        seen_B = np.where(class_B == BONUS, state.before_B[rows_B], seen_B)
    shape = (rows_B.shape[0], setup.vocab_size)
    made_BV = table_SV[seen_B] + setup.rounding * rng.standard_normal(shape)
    declared = setup.params.temperature
    log_p_BV = _log_softmax(made_BV / (setup.true_temperature or declared))
    p_BV = filtered(log_p_BV, setup.params) if setup.params.has_filters else np.exp(log_p_BV)
    q_BV = np.exp(draft_SV[context_B])

    uniform_B = rng.random(rows_B.shape[0])
    if setup.shared_noise:
        uniform_B = uniform_B[np.searchsorted(rows_B, rows_B - rows_B % setup.num_siblings).clip(max=rows_B.size - 1)]
    token_B = draw(p_BV, uniform_B)
    draft_B, accepted_B, verified_B = np.zeros_like(token_B), np.zeros_like(drafted_B), np.zeros_like(drafted_B)
    if drafted_B.any():
        outcome = setup.rule(p_BV[drafted_B], q_BV[drafted_B], rng)
        token_B[drafted_B], draft_B[drafted_B] = outcome.token_B, outcome.draft_B
        accepted_B[drafted_B], verified_B[drafted_B] = outcome.accepted_B, outcome.verified_B
    _advance(state, rows_B, token_B, drafted_B, accepted_B)
    class_B = np.where(drafted_B & ~verified_B, PLAIN, class_B)
    return Made(
        exact_NV=table_SV[context_B],
        rounded_NV=table_SV[context_B] + setup.rounding * rng.standard_normal(shape),
        token_N=token_B,
        class_N=class_B,
        rollout_N=rows_B,
        logprob_N=np.take_along_axis(log_p_BV, token_B[:, None], -1)[:, 0],
        verified_N=verified_B,
        accepted_N=accepted_B,
        draft_N=draft_B,
        q_NV=q_BV,
    )


def _classes(step: int, position_B: Ints, length_B: Ints, rejected_B: np.ndarray) -> Ints:
    if step == 0:
        return np.full(position_B.shape, FIRST)
    first_B = np.where(rejected_B, AFTER_REJECTION, AFTER_FULL_ACCEPTANCE)
    inside_B = np.where(position_B == 1, first_B, BONUS + position_B - 1)
    return np.where(position_B <= length_B, inside_B, np.where(length_B == 0, PLAIN, BONUS))


def _advance(state: _State, rows_B: Ints, token_B: Ints, drafted_B: np.ndarray, accepted_B: np.ndarray) -> None:
    """Move the live rollouts on by the tokens just drawn."""
    state.before_B[rows_B] = state.context_B[rows_B]
    state.context_B[rows_B] = token_B
    goes_on_B = drafted_B & accepted_B
    state.position_B[rows_B] = np.where(goes_on_B, state.position_B[rows_B] + 1, 0)
    state.rejected_B[rows_B] = drafted_B & ~accepted_B
    state.alive_B[rows_B] = token_B != EOS
