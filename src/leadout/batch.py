"""What the stages logprob and train hand to each other inside the learner's process: flat batches of tokens.

A `TrainBatch` is one pack: prompts and completions of a few groups laid one after the other, each prompt once for all
its completions. Stage logprob builds it and runs the policy over it (`PolicyForward`); stage train reads the result.

Axes: T tokens of the pack, R response tokens (the completions' tokens, in order), H policy width, F concatenated taps,
V policy vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from leadout.interfaces import Auditor
from leadout.records import FloatArray, Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One pack. Token i sees token j iff j <= i and segment_j is segment_i or the parent of i's segment.

    Example: a prompt [1, 5] with completions [7, 2] and [8] of a step's rollouts 4 and 5, group 2 of the step::

        token_ids_T     1  5  7  2  8
        position_ids_T  0  1  2  3  2
        segment_T      -3 -3  4  4  5
        parent_T       -3 -3 -3 -3 -3
        previous_T     -1  0  1  2  1
    """

    token_ids_T: Tensor
    """i64."""
    position_ids_T: Tensor
    """Position within prompt + completion, i64."""
    segment_T: Tensor
    """Index of the rollout within the step; -1 - index of the group for its prompt. i64."""
    parent_T: Tensor
    """Segment of the prompt a token continues; a prompt names itself. i64."""
    previous_T: Tensor
    """Index of the token before, whose logits a token is drawn from; -1 where a prompt begins. i64."""
    loss_mask_T: Tensor
    """True where the policy made the token and the rollout is trained on."""
    advantages_T: Tensor
    """Advantage of the token's rollout, 0 on prompts. f32 (f64 in float64)."""
    policy_logprobs_T: Tensor
    """The generator's log-probabilities, 0 on prompts. f32 (f64 in float64)."""
    version_T: Tensor
    """Weight version that made the token; -1 on prompts. i64."""
    rollouts: tuple[Rollout, ...]
    """The rollouts in the pack, in order; the completions of `segment_T` from `first_rollout` on."""
    first_rollout: int
    """Index of the first of them within the step."""

    @property
    def response_R(self) -> Tensor:
        """Indices of the completions' tokens, in order."""
        return (self.segment_T >= 0).nonzero().squeeze(-1)

    @property
    def num_tokens(self) -> int:
        """Tokens a forward pass works on."""
        return int(self.token_ids_T.numel())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyOutput:
    """What one policy forward over a pack gives. Only `logprobs_R` carries gradients."""

    logprobs_R: Tensor
    """log softmax(logits / temperature) of each response token."""
    entropy_R: Tensor
    """Entropy of that distribution, nats."""
    log_normalizer_R: Tensor
    """logsumexp(logits / temperature): probabilities of a few tokens need no pass over the vocabulary again."""
    hidden_RH: Tensor
    """The policy's last hidden state that each response token is drawn from, detached."""
    taps_TF: Tensor | None
    """Residual streams entering the tapped layers, concatenated, detached; None if not asked for."""


class StudentForward(Protocol):
    """A causal language model that learns from the policy, run over the policy's packs."""

    @property
    def model(self) -> nn.Module:
        """The learning model."""
        ...

    def response_states(self, batch: TrainBatch) -> Tensor:
        """The model's last hidden state that each response token is drawn from, [R, H]; with gradients."""
        ...

    def head_rows(self, token_ids_V: Tensor | None) -> Tensor:
        """Rows of its output matrix, detached; all of them for None."""
        ...


class PolicyForward(Protocol):
    """Stage logprob as stage train sees it."""

    @property
    def model(self) -> nn.Module:
        """The policy."""
        ...

    @property
    def embedding_VH(self) -> Tensor:
        """The policy's input embeddings, detached."""
        ...

    def pack(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], first_rollout: int = 0
    ) -> list[TrainBatch]:
        """Packs of bounded size, rollouts in the order of the groups and numbered from `first_rollout`."""
        ...

    def run(self, batch: TrainBatch, *, taps: tuple[int, ...] = (), auditor: Auditor | None = None) -> PolicyOutput:
        """One forward pass, with gradients where autograd is on."""
        ...

    def head_rows(self, token_ids_V: Tensor | None) -> Tensor:
        """Rows of the policy's output matrix, detached; all of them for None."""
        ...
