"""Stage train, drafter: what a pack has to teach. The policy's law over the draft vocabulary, once a position.

Axes: R response tokens of the pack, N some of them, V draft vocabulary, H policy width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from leadout.batch import PolicyForward, PolicyOutput, TrainBatch
from leadout.train.draft_loss import teacher_probabilities


class Lesson:
    """A pack, the policy's output on it, and the policy's probabilities of all tokens that can be drafted.

    Measuring and learning ask for the same positions, all of them at once and some at a time.
    """

    def __init__(
        self,
        batch: TrainBatch,
        output: PolicyOutput,
        forward: PolicyForward,
        token_ids_V: Tensor | None,
        temperature: float,
    ) -> None:
        """`token_ids_V`: policy ids of the draft vocabulary, None for the identity."""
        self.batch = batch
        self.output = output
        self.forward = forward
        self.token_ids_V = token_ids_V
        self.temperature = temperature
        self._kept_NV: Tensor | None = None
        self._place_R = torch.full_like(output.log_normalizer_R, -1, dtype=torch.int64)

    def teacher(self, response_N: Tensor) -> Tensor:
        """The probabilities [N, V] at these response tokens.

        Those of the largest set asked for are kept: a part of it is not computed again.
        """
        place_N = self._place_R[response_N]
        if self._kept_NV is not None and bool((place_N >= 0).all()):
            return self._kept_NV[place_N]
        teacher_NV = self._probabilities(response_N)
        if self._kept_NV is None or len(teacher_NV) >= len(self._kept_NV):
            self._kept_NV = teacher_NV
            self._place_R.fill_(-1)
            self._place_R[response_N] = torch.arange(response_N.numel(), device=response_N.device)
        return teacher_NV

    @functools.cached_property
    def _head_rows_VH(self) -> Tensor:
        """The policy's weights change after the pack, not while it is learnt from."""
        return self.forward.head_rows(self.token_ids_V)

    @torch.no_grad()
    def _probabilities(self, response_N: Tensor) -> Tensor:
        output = self.output
        hidden_NH, log_normalizer_N = output.hidden_RH[response_N], output.log_normalizer_R[response_N]
        # The policy's logits are never rounded to bfloat16, whatever the drafter's products run in.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return teacher_probabilities(hidden_NH, self._head_rows_VH, log_normalizer_N, self.temperature)
