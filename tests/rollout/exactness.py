"""Closed-form laws of whole rollouts over a tiny vocabulary, and chi-square tests against them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats

from leadout.records import Prompt, Request, Rollout, RolloutId, SamplingParams
from leadout.rollout.engine import NativeGenerator

LawOf = Callable[[Sequence[int]], np.ndarray]
"""Law of the next token after a context (prompt and output)."""


def slow_law(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, each by sorting, each renormalised: written apart from the engine's."""
    p_V = np.exp((logits_V - logits_V.max()) / params.temperature)
    p_V /= p_V.sum()
    order = np.argsort(-p_V, kind="stable")
    if params.top_k > 0:
        p_V[order[params.top_k :]] = 0.0
        p_V /= p_V.sum()
    if params.top_p < 1.0:
        kept = int((np.cumsum(p_V[order]) < params.top_p - 1e-12).sum()) + 1
        p_V[order[kept:]] = 0.0
        p_V /= p_V.sum()
    p_V[p_V < params.min_p * p_V.max()] = 0.0
    return p_V / p_V.sum()


def markov_law(table_VVV: torch.Tensor, params: SamplingParams) -> LawOf:
    """The law of the scripted policy whose logits follow from the last two tokens."""
    size = table_VVV.shape[0]
    laws = np.array([[slow_law(table_VVV[i, j].numpy(), params) for j in range(size)] for i in range(size)])
    return lambda context: laws[context[-2], context[-1]]


def sequence_probabilities(
    law: LawOf, prompt: Sequence[int], length: int, vocab_size: int, end: int | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of every whole rollout of at most `length` tokens."""
    whole: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in open_ones.items():
            p_V = law([*prompt, *tokens])
            for token in range(vocab_size):
                over = token == end or position == length - 1
                (whole if over else longer)[(*tokens, token)] = probability * float(p_V[token])
        open_ones = longer
    return whole


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against expected counts; rare cells are joined, impossible ones must be empty."""
    assert not counts[expected == 0].any(), "a token outside the support was emitted"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    if wanted.size < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def sequences_p_value(sequences: Sequence[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Chi-square of whole rollouts."""
    index = {tokens: i for i, tokens in enumerate(probabilities)}
    counts = np.bincount([index[tokens] for tokens in sequences], minlength=len(index))
    return p_value(counts, np.array(list(probabilities.values())) * len(sequences))


def positions_p_values(
    sequences: Sequence[tuple[int, ...]], probabilities: dict[tuple[int, ...], float], vocab_size: int
) -> list[float]:
    """Chi-square of the token at each position, over the rollouts that reach it."""
    values = []
    for position in range(max(map(len, probabilities))):
        expected = np.zeros(vocab_size)
        for tokens, probability in probabilities.items():
            if len(tokens) > position:
                expected[tokens[position]] += probability * len(sequences)
        tokens = [s[position] for s in sequences if len(s) > position]
        counts = np.bincount(tokens, minlength=vocab_size)
        values.append(p_value(counts, expected * counts.sum() / expected.sum()))
    return values


def many_requests(count: int, prompt: Sequence[int], params: Sequence[SamplingParams]) -> list[Request]:
    """Siblings of one prompt, their parameters in turn."""
    made = Prompt(id="p", token_ids=np.array(prompt, np.int32), text="")
    return [
        Request(rollout_id=RolloutId(0, index), prompt=made, params=params[index % len(params)])
        for index in range(count)
    ]


def run(engine: NativeGenerator, requests: Sequence[Request]) -> list[Rollout]:
    """All rollouts in the order of their siblings."""
    engine.submit(requests)
    done: list[Rollout] = []
    while rollouts := engine.collect():
        done += rollouts
    return sorted(done, key=lambda rollout: rollout.request_id)


def tokens_of(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    """Token ids as keys."""
    return [tuple(rollout.token_ids.tolist()) for rollout in rollouts]


def outcomes(rollouts: Sequence[Rollout]) -> list[tuple[tuple[int, ...], int, str, int]]:
    """(tokens before, position in the round, what happened, token) of every token that came from a drafting round.

    What happened: "accepted", "corrected" or "bonus".
    """
    found = []
    for rollout in rollouts:
        tokens = rollout.token_ids.tolist()
        at = 1
        for drafted, accepted in zip(rollout.rounds.drafted.tolist(), rollout.rounds.accepted.tolist(), strict=True):
            for index in range(accepted + 1):
                if at == len(tokens):
                    break
                kind = "accepted" if index < accepted else "corrected" if index < drafted else "bonus"
                if drafted:
                    found.append((tuple(tokens[:at]), index, kind, tokens[at]))
                at += 1
        assert at == len(tokens)
    return found


def joint_p_value(
    found: Sequence[tuple[tuple[int, ...], int, str, int]], law: LawOf, q_of: LawOf, prompt: Sequence[int]
) -> float:
    """Chi-square of (accepted or corrected, token) given the context against min(p, q) and (p - q)+."""
    by_context: dict[tuple[int, ...], np.ndarray] = {}
    for before, _, kind, token in found:
        if kind != "bonus":
            context = (*prompt, *before)[-2:]
            cells = by_context.setdefault(context, np.zeros((2, law(context).size)))
            cells[int(kind == "corrected"), token] += 1
    counts, expected = [], []
    for context, cells in by_context.items():
        p_V, q_V = law(context), q_of(context)
        both = np.stack([np.minimum(p_V, q_V), np.clip(p_V - q_V, 0.0, None)])
        both[both < 1e-12] = 0.0
        counts.append(cells.reshape(-1))
        expected.append(both.reshape(-1) * cells.sum())
    return p_value(np.concatenate(counts), np.concatenate(expected))


def every_prefix(vocab_size: int, length: int) -> list[tuple[int, ...]]:
    """All outputs shorter than `length`."""
    return [tokens for n in range(length) for tokens in itertools.product(range(vocab_size), repeat=n)]
