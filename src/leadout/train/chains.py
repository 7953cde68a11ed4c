"""Stage train, drafter: a draft head unrolled along rollouts exactly as cached drafting would run it.

In drafting, a chain starts after token n is committed. Its first entry carries the policy's feature of token n-1 and
sees the true entries up to n; entry s carries what the head puts there (its own output of entry s-1, or what it has
learnt to put for the unknown) and sees those true entries and the chain's own entries before it. Training runs all
chains of a rollout side by side (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2): at step s the query at
token j belongs to the chain that started at n = j - s + 1.

Axes: E entries of a pack, B rollouts, S key columns (prompt and completion), L query columns (completion tokens but
the last), N all keys of a step, G key-value heads, Q query heads, W queries of those that share keys, D head dimension,
H head width, F taps, T tokens and R response tokens of a pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from leadout.batch import TrainBatch
from leadout.models.draft_head import DraftHead

FEW_SCORES = 2**16
"""Query columns times keys up to which attention is written out: PyTorch's own is slow for rows this short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Index tables of some rollouts of a pack. Padding points at 0 and is masked."""

    token_E: Tensor
    """Index into the pack of each entry's token."""
    previous_E: Tensor
    """Index into the pack of the token before, whose feature the entry carries."""
    position_E: Tensor
    """Rotary position: that of the token before."""
    key_BS: Tensor
    """Entry of each key column: the prompt's without its first token, then the completion's."""
    query_BL: Tensor
    """Entry of each query column: column j is completion token j, which predicts token j + 1."""
    first_B: Tensor
    """Key column of completion token 0."""
    target_BL: Tensor
    """Index into the pack's response tokens of the token each query predicts."""
    real_BL: Tensor
    """False in the padding."""
    wanted_BL: Tensor
    """True where the predicted token was made by the policy."""

    def valid_BL(self, step: int) -> Tensor:
        """Queries of step 1, 2, ... whose chain starts within the completion: chains never start in a prompt."""
        columns_L = torch.arange(self.query_BL.shape[1], device=self.query_BL.device)
        return self.real_BL & (columns_L >= step - 1)

    def counted(self) -> CountedQueries:
        """The queries whose predicted token was made by the policy."""
        column_N, row_N = (self.real_BL & self.wanted_BL).T.nonzero(as_tuple=True)
        return CountedQueries(row_N=row_N, column_N=column_N, target_N=self.target_BL[row_N, column_N])


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedQueries:
    """Some queries of chains, column by column: those that count at a deeper step are the last ones, a view."""

    row_N: Tensor
    column_N: Tensor
    target_N: Tensor
    """Index into the pack's response tokens of the token each predicts."""

    def from_step(self, step: int) -> slice:
        """Those of step 1, 2, ... whose chain starts within the completion."""
        return slice(int((self.column_N < step - 1).sum()), None)


def build_chains(batch: TrainBatch, rows: Sequence[int]) -> Chains | None:
    """Tables for the rollouts at these places in the pack; None if none of them has two tokens to learn from."""
    rows = [row for row in rows if batch.rollouts[row].length >= 2]
    if not rows:
        return None
    device = batch.token_ids_T.device
    segment_T = batch.segment_T.cpu().numpy()
    starts = dict(zip(*_starts(segment_T)))
    response_start = np.cumsum([0, *(rollout.length for rollout in batch.rollouts)])
    segments = [batch.first_rollout + row for row in rows]
    parents = [int(batch.parent_T[starts[segment][0]]) for segment in segments]
    used_T = np.isin(segment_T, [*segments, *parents]) & (batch.previous_T.cpu().numpy() >= 0)
    entry_T = np.cumsum(used_T) - 1
    keys, queries, targets, firsts, wanted = [], [], [], [], []
    for row, segment, parent in zip(rows, segments, parents):
        prompt, (first, end) = starts[parent], starts[segment]
        queries.append(torch.from_numpy(entry_T[first : end - 1]))
        keys.append(torch.from_numpy(np.concatenate([entry_T[prompt[0] + 1 : prompt[1]], entry_T[first : end - 1]])))
        targets.append(torch.arange(response_start[row] + 1, response_start[row + 1]))
        firsts.append(prompt[1] - prompt[0] - 1)
        wanted.append(torch.from_numpy(batch.rollouts[row].loss_mask[1:].copy()))
    token_E = torch.from_numpy(np.flatnonzero(used_T)).to(device)
    previous_E = batch.previous_T[token_E]
    lengths_B = torch.tensor([query.numel() for query in queries])
    query_BL = pad_sequence(queries, batch_first=True)
    return Chains(
        token_E=token_E,
        previous_E=previous_E,
        position_E=batch.position_ids_T[previous_E],
        key_BS=pad_sequence(keys, batch_first=True).to(device),
        query_BL=query_BL.to(device),
        first_B=torch.tensor(firsts, device=device),
        target_BL=pad_sequence(targets, batch_first=True).to(device),
        real_BL=(torch.arange(query_BL.shape[1]) < lengths_B[:, None]).to(device),
        wanted_BL=pad_sequence(wanted, batch_first=True).to(device),
    )


def _starts(segment_T: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
    """Segments of a pack in order, and where each begins and ends."""
    bounds = [0, *(np.flatnonzero(np.diff(segment_T)) + 1).tolist(), len(segment_T)]
    return [int(segment_T[a]) for a in bounds[:-1]], list(itertools.pairwise(bounds))


def unroll(
    head: DraftHead, chains: Chains, taps_TF: Tensor, token_ids_T: Tensor, embedding_VH: Tensor, steps: int
) -> list[Tensor]:
    """Run the head `steps` deep over every chain at once.

    Returns:
        Per step the layer's output [B, L, H] at every query column (see `Chains.valid_BL` for which count); `logits`
        of column j at step s is what a draft of the chain started at j - s + 1 would propose for token j + 1.

    """
    embedded_EH = head.embed(token_ids_T[chains.token_E], embedding_VH)
    entry = head.entry(head.fuse(taps_TF[chains.previous_E]), embedded_EH)
    cos_ED, sin_ED = head.rotary(chains.position_E)
    key_EGD, value_EGD = head.keys_values(entry.input_NE, (cos_ED, sin_ED))
    keys, values = [key_EGD[chains.key_BS]], [value_EGD[chains.key_BS]]
    rotary_BL = (cos_ED[chains.query_BL], sin_ED[chains.query_BL])
    embedded_BLH = embedded_EH[chains.query_BL]
    input_BLE, residual_BLH = entry.input_NE[chains.query_BL], entry.residual_NH[chains.query_BL]
    outputs: list[Tensor] = []
    for step in range(1, steps + 1):
        if step > 1:
            # Column j continues the chain of column j - 1; what is shifted into column 0 belongs to no chain.
            feature_BLH = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
            input_BLE, residual_BLH = head.deeper(feature_BLH, embedded_BLH)
            key_BLGD, value_BLGD = head.keys_values(input_BLE, rotary_BL)
            keys.append(key_BLGD)
            values.append(value_BLGD)
        query_BLQD = head.queries(input_BLE, rotary_BL)
        attended_BLQD = _attend(query_BLQD, torch.cat(keys, 1), torch.cat(values, 1), _visible(chains, step))
        outputs.append(head.complete(attended_BLQD, residual_BLH))
    return outputs


def _visible(chains: Chains, step: int) -> Tensor:
    """Who sees what at a step, bool[B, L, S + (step - 1) L]: true entries up to the chain's start, then its own."""
    L, S = chains.query_BL.shape[1], chains.key_BS.shape[1]
    columns_L = torch.arange(L, device=chains.query_BL.device)
    last_BL = chains.first_B[:, None] + columns_L - (step - 1)
    true_BLS = torch.arange(S, device=last_BL.device) <= last_BL[:, :, None]
    own = [
        (columns_L[:, None] - (step - depth) == columns_L).expand(len(last_BL), L, L) for depth in range(2, step + 1)
    ]
    visible = torch.cat([true_BLS, *own], dim=-1)
    # A query without a chain looks at anything rather than at nothing, which would be NaN.
    visible[..., 0] |= ~chains.valid_BL(step)
    return visible


def _attend(query_BLQD: Tensor, key_BNGD: Tensor, value_BNGD: Tensor, visible_BLN: Tensor) -> Tensor:
    """Attention over the visible keys; queries of heads that share their keys are rows of one product."""
    B, L, Q, D = query_BLQD.shape
    G = key_BNGD.shape[2]
    query_BGWD = query_BLQD.view(B, L, G, Q // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, Q // G * L, D)
    visible_BWN = visible_BLN.repeat(1, Q // G, 1)
    attention = written_out_attention if visible_BLN[0].numel() <= FEW_SCORES else F.scaled_dot_product_attention
    out_BGWD = attention(query_BGWD, key_BNGD.transpose(1, 2), value_BNGD.transpose(1, 2), visible_BWN[:, None])
    return out_BGWD.view(B, G, Q // G, L, D).permute(0, 3, 1, 2, 4).reshape(B, L, Q, D)


def written_out_attention(query_BGWD: Tensor, key_BGND: Tensor, value_BGND: Tensor, visible_B1WN: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over visible keys, in at least float32; autograd keeps all scores for the backward."""
    dtype = torch.promote_types(query_BGWD.dtype, torch.float32)
    hidden_B1WN = torch.zeros(visible_B1WN.shape, dtype=dtype, device=query_BGWD.device)
    hidden_B1WN.masked_fill_(~visible_B1WN, -torch.inf)
    with torch.autocast(query_BGWD.device.type, enabled=False):
        query_BGWD = query_BGWD * query_BGWD.shape[-1] ** -0.5
        weight_BGWN = (query_BGWD.to(dtype) @ key_BGND.to(dtype).mT).add_(hidden_B1WN).softmax(-1)
        return (weight_BGWN @ value_BGND.to(dtype)).to(value_BGND.dtype)
