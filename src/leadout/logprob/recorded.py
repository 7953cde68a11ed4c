"""Stage logprob, when the generator has kept its states: a pack's policy output without a pass of the policy.

Serves drafters that are trained offline. The policy does not learn from it: nothing carries gradients.

Axes: T tokens of a pack, R response tokens, X tokens of a prompt and its completion, H policy width, F concatenated
taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadout.batch import PolicyOutput, TrainBatch
from leadout.logprob.pack import completions
from leadout.logprob.policy_forward import PackedForward


@torch.no_grad()
def recorded_output(forward: PackedForward, batch: TrainBatch, states: Sequence[Tensor]) -> PolicyOutput:
    """What `forward.run` gives for a pack, from states that were kept while it was generated.

    The normaliser of a law follows from one token's logit and log-probability, so no pass over the vocabulary is
    needed; entropies are not known and are NaN.

    Args:
        forward: Holds the final norm and the output matrix.
        batch: The pack; its log-probabilities are those of the generator.
        states: Per rollout of the pack the tapped states [X - 1, F + H] of prompt and completion but the last token;
            the last H are what enters the final norm.

    """
    weight_VH = forward.head.weight
    width = weight_VH.shape[1]
    all_TF = weight_VH.new_zeros(batch.num_tokens, states[0].shape[1])
    kept = (each for each, rollout in zip(states, batch.rollouts, strict=True) if rollout.length)
    for (prompt_T, completion_T), states_XF in zip(completions(batch), kept, strict=True):
        all_TF[prompt_T] = states_XF[: prompt_T.numel()].to(all_TF)
        all_TF[completion_T[:-1]] = states_XF[prompt_T.numel() :].to(all_TF)
    response_R = batch.response_R
    hidden_RH = forward.decoder.norm(all_TF[batch.previous_T[response_R], -width:])
    targets_R = batch.token_ids_T[response_R]
    logits_R = torch.linalg.vecdot(hidden_RH, weight_VH[targets_R])
    bias_V = getattr(forward.head, "bias", None)
    if bias_V is not None:
        logits_R = logits_R + bias_V[targets_R]
    logprobs_R = batch.policy_logprobs_T[response_R]
    return PolicyOutput(
        logprobs_R=logprobs_R,
        entropy_R=torch.full_like(logprobs_R, torch.nan),
        log_normalizer_R=logits_R / forward.settings.temperature - logprobs_R,
        hidden_RH=hidden_RH,
        taps_TF=all_TF[:, :-width] if all_TF.shape[1] > width else None,
    )
