"""Which policy tokens an untrained drafter may propose: those the policy gives most probability to.

Ranked by mean probability over rollouts rather than by token count: it covers about 2 % more of the tokens to come at
4,096 of 49,152 ids. Axes: R response tokens, C positions of a chunk, H policy width, V policy vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leadout.batch import PolicyForward
from leadout.records import Group


@torch.no_grad()
def mean_probabilities(forward: PolicyForward, groups: Sequence[Group], temperature: float, chunk_size: int) -> Tensor:
    """Mean over the rollouts' tokens of softmax(logits / temperature), [V]; `chunk_size` positions at a time."""
    head_VH = forward.head_rows(None)
    total_V, count = torch.zeros(head_VH.shape[0], device=head_VH.device), 0
    for batch in forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups]):
        if not batch.response_R.numel():
            continue
        output = forward.run(batch)
        hidden_RH = output.hidden_RH.to(head_VH.dtype)
        for hidden_CH, normalizer_C in zip(hidden_RH.split(chunk_size), output.log_normalizer_R.split(chunk_size)):
            total_V += ((hidden_CH @ head_VH.T) / temperature - normalizer_C[:, None]).exp().sum(0)
        count += hidden_RH.shape[0]
    return total_V / max(count, 1)


def most_probable(probabilities_V: Tensor, size: int) -> Tensor:
    """The `size` most probable ids in ascending order, i64; the lower id wins a tie."""
    order_V = torch.sort(probabilities_V, descending=True, stable=True).indices
    return order_V[:size].sort().values
