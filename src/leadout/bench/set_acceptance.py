"""An accept rule with a chosen acceptance rate, to ask what a drafter *would* bring if it were accepted that often.

Everything of a round is paid for: the head's draft, the verification of every position, the exact rule itself. Only
its verdict is then replaced: each draft is kept with the chosen probability, whatever the policy thinks of it. The
tokens are therefore **not** the policy's. It is an object handed to an engine of the bench; nothing that users
generate with can be put into this state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from leadout.errors import ConfigError
from leadout.interfaces import Draft
from leadout.models.sampling import Law
from leadout.rollout.accept import Verdict, leading, verify
from leadout.rollout.numbers import RoundNumbers


@dataclass(frozen=True, slots=True)
class SetAcceptance:
    """Implements `leadout.rollout.accept.AcceptRule`."""

    rate: float
    """Probability that a draft is kept, given that all before it were."""

    def __call__(self, law: Law, draft: Draft, numbers: RoundNumbers) -> Verdict:
        """Decide by the rule, then keep as many drafts as the rate says; reproducible, by the round's own numbers."""
        verdict = verify(law, draft, numbers)
        kept_BK = numbers.accept_uniforms(draft.tokens_BK.shape[1]) < self.rate
        return Verdict(leading(kept_BK.cpu().numpy(), draft.counts_B), verdict.next_B)


def length_at(rate: float, num_drafts: int) -> float:
    """Acceptance length of k drafts at one rate for every position: 1 + rate + ... + rate**k.

    Example: ``length_at(0.5, 2) == 1.75``
    """
    return float(np.sum(rate ** np.arange(num_drafts + 1)))


def rate_for(length: float, num_drafts: int) -> float:
    """The rate at which k drafts reach an acceptance length; raises ConfigError outside of 1..k+1."""
    if not 1.0 <= length <= num_drafts + 1:
        raise ConfigError(
            f"expected an acceptance length between 1 and {num_drafts + 1} for k={num_drafts}, got {length}"
        )
    return float(brentq(lambda rate: length_at(rate, num_drafts) - length, 0.0, 1.0))
