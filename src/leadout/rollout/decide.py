"""From the states of a round's tokens to the tokens each row emits, with their log-probabilities.

Rows of a round fall into two shares: those that drafted are judged by the accept rule, the others draw one token as in
a plain step. All share one product with the head; each share then has positions of one width, so that rows without
drafts cost what a plain step costs.

Axes: B live rows, S rows of a share, N columns of the round (pending token and drafts), M columns of a share,
X = S x M, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leadout.interfaces import Draft
from leadout.rollout.accept import Verdict
from leadout.rollout.live import LiveRows
from leadout.rollout.numbers import RoundNumbers
from leadout.rollout.parts import EngineParts, LawMaker
from leadout.rollout.sampler import Laws

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drafted:
    """The rows of a round that drafted at least one token."""

    rows_S: Ints
    """Their places among the live rows, ascending."""
    draft: Draft
    """Of these rows only, counts >= 1."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round emits."""

    tokens_BN: Ints
    """Accepted drafts, then the correction or bonus; columns past `accepted_B` are meaningless."""
    emitted_BN: torch.Tensor
    """The same where the drafter wants it."""
    accepted_B: Ints
    logprobs_BN: Floats
    """Under the law they were drawn from."""
    policy_logprobs_BN: Floats
    """Under softmax(logits / temperature)."""


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows of one width."""

    rows_S: Ints | None
    """None: all live rows."""
    draft: Draft | None
    live: LiveRows
    numbers: RoundNumbers

    @property
    def width(self) -> int:
        return 1 if self.draft is None else self.draft.tokens_BK.shape[1] + 1

    def take(self, x_BN: torch.Tensor) -> torch.Tensor:
        """Its rows and columns."""
        if self.rows_S is not None:
            x_BN = x_BN[torch.from_numpy(self.rows_S).to(x_BN.device)]
        return x_BN if x_BN.shape[1] == self.width else x_BN[:, : self.width]


def decide(
    parts: EngineParts,
    sampler: LawMaker,
    live: LiveRows,
    numbers: RoundNumbers,
    drafted: Drafted | None,
    tokens_BN: torch.Tensor,
    hidden_BNH: torch.Tensor,
) -> Decision:
    """Judge every row; `hidden_BNH` are the states of `tokens_BN` after the final norm."""
    shares = _shares(live, numbers, drafted)
    size = hidden_BNH.shape[-1]
    states = [share.take(hidden_BNH).reshape(-1, size) for share in shares]
    if len(shares) == 1:
        return _decided(parts, sampler, shares[0], tokens_BN, parts.decoder.logits(states[0]))
    logits_XV = parts.decoder.logits(torch.cat(states))
    outcomes = [
        _decided(parts, sampler, share, tokens_BN, logits)
        for share, logits in zip(shares, logits_XV.split([len(state) for state in states]), strict=True)
    ]
    return _merged(shares, outcomes, tokens_BN)


def _decided(
    parts: EngineParts, sampler: LawMaker, share: _Share, tokens_BN: torch.Tensor, logits_XV: torch.Tensor
) -> Decision:
    """What a share emits, from its logits."""
    laws = sampler.laws(logits_XV, share.live.params, share.live.slots, share.take(tokens_BN))
    return _outcome(share, laws, _verdict(parts, share, laws))


def _shares(live: LiveRows, numbers: RoundNumbers, drafted: Drafted | None) -> list[_Share]:
    num_rows = len(live.rows)
    if drafted is None:
        return [_Share(None, None, live, numbers)]
    if len(drafted.rows_S) == num_rows:
        return [_Share(None, drafted.draft, live, numbers)]
    plain_S = np.setdiff1d(np.arange(num_rows), drafted.rows_S)
    return [
        _Share(plain_S, None, live.take(plain_S), numbers.take(plain_S)),
        _Share(drafted.rows_S, drafted.draft, live.take(drafted.rows_S), numbers.take(drafted.rows_S)),
    ]


def _verdict(parts: EngineParts, share: _Share, laws: Laws) -> Verdict:
    if share.draft is not None:
        return parts.rule(laws.sampled, share.draft, share.numbers)
    next_S = laws.sampled.draw(share.numbers.next_uniforms())
    return Verdict(np.zeros(len(share.live.rows), np.int64), next_S)


def _outcome(share: _Share, laws: Laws, verdict: Verdict) -> Decision:
    """The emitted tokens of a share and their log-probabilities."""
    emitted_SM = emitted_tokens(share.draft, verdict)
    flat_X, shape = emitted_SM.reshape(-1), tuple(emitted_SM.shape)
    logprobs_SM = laws.sampled.logprob(flat_X).cpu().numpy().reshape(shape)
    policy_SM = logprobs_SM
    if laws.policy is not laws.sampled:
        policy_SM = laws.policy.logprob(flat_X).cpu().numpy().reshape(shape)
    return Decision(emitted_SM.cpu().numpy(), emitted_SM, verdict.accepted_B, logprobs_SM, policy_SM)


def emitted_tokens(draft: Draft | None, verdict: Verdict) -> torch.Tensor:
    """i64[B, N]: accepted drafts followed by the correction or bonus; later columns are meaningless."""
    if draft is None:
        return verdict.next_B[:, None]
    num_rows, num_drafts = draft.tokens_BK.shape
    tokens_BN = np.zeros((num_rows, num_drafts + 1), np.int64)
    tokens_BN[:, :num_drafts] = draft.tokens_BK.cpu().numpy()
    tokens_BN[np.arange(num_rows), verdict.accepted_B] = verdict.next_B.cpu().numpy()
    return torch.from_numpy(tokens_BN).to(draft.tokens_BK.device)


def _merged(shares: list[_Share], outcomes: list[Decision], tokens_BN: torch.Tensor) -> Decision:
    """The shares' rows back in their places."""
    shape = tuple(tokens_BN.shape)
    ids_BN, accepted_B = np.zeros(shape, np.int64), np.zeros(shape[0], np.int64)
    logprobs_BN, policy_BN = np.zeros(shape), np.zeros(shape)
    for share, outcome in zip(shares, outcomes, strict=True):
        assert share.rows_S is not None
        ids_BN[share.rows_S, : share.width] = outcome.tokens_BN
        accepted_B[share.rows_S] = outcome.accepted_B
        logprobs_BN[share.rows_S, : share.width] = outcome.logprobs_BN
        policy_BN[share.rows_S, : share.width] = outcome.policy_logprobs_BN
    emitted_BN = torch.from_numpy(ids_BN).to(tokens_BN.device)
    return Decision(ids_BN, emitted_BN, accepted_B, logprobs_BN, policy_BN)
