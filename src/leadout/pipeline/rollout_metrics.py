"""Rollouts and groups -> metrics: rewards, lengths, speculation, lag. Pure numpy.

A *row-round* is one round of one rollout; a *drafted* row-round is one in which at least one draft was verified. The
first generated token of a rollout comes from the prefill and is in no round. A quantity that does not exist (an
acceptance rate when nothing was drafted) has no key; nothing here is ever NaN.

Axes: N rollouts, R rounds of one rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from leadout.records import Finish, FloatArray, Group, Rollout, Rounds, ShortArray, Source


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`reward`, `reward_std`, `frac_reward_zero_std` and `rewards/NAME/{mean,std}` (TRL's names).

    `reward` is the mean over rollouts. `reward_std` is the mean over groups of the sample standard deviation
    (n - 1) within the group, 0 for a group of one. `frac_reward_zero_std` is the share of groups whose rewards are
    all equal: those teach nothing.
    """
    if not groups:
        return {}
    by_group = [np.array([score.reward for score in group.scores], float) for group in groups]
    equal = [float(np.ptp(rewards)) == 0.0 for rewards in by_group]
    stds = [0.0 if same else float(np.std(rewards, ddof=1)) for same, rewards in zip(equal, by_group, strict=True)]
    metrics = {
        "reward": float(np.mean(np.concatenate(by_group))),
        "reward_std": float(np.mean(stds)),
        "frac_reward_zero_std": float(np.mean(equal)),
    }
    parts: dict[str, list[float]] = {}
    for group in groups:
        for score in group.scores:
            for name, value in score.parts.items():
                parts.setdefault(name, []).append(value)
    for name, values in sorted(parts.items()):
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return metrics


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`completions/*` over all rollouts, and `tokens/{prompt,completion}` sums.

    Lengths count every token of a completion, the end-of-sequence token included. `clipped_ratio`: share that ran
    out of tokens or context. `empty_ratio`, `masked_ratio`, `failed_ratio`: share without any text, excluded from
    training, or ended by an error or a cancellation. `*_terminated_length`: over those not clipped, absent if none.
    `tokens/prompt` counts the prompt of a group once; `tokens/completion` counts tokens the policy made.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    masked = [score.masked for group in groups for score in group.scores]
    lengths_N = np.array([rollout.length for rollout in rollouts])
    clipped_N = np.array([rollout.is_truncated for rollout in rollouts])
    empty = [
        not rollout.length or not score.text
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]
    failed = [rollout.finish in (Finish.ERROR, Finish.CANCELLED) for rollout in rollouts]
    metrics = _length_metrics("length", lengths_N)
    if not clipped_N.all():
        metrics |= _length_metrics("terminated_length", lengths_N[~clipped_N])
    return metrics | {
        "completions/clipped_ratio": float(clipped_N.mean()),
        "completions/empty_ratio": float(np.mean(empty)),
        "completions/masked_ratio": float(np.mean(masked)),
        "completions/failed_ratio": float(np.mean(failed)),
        "tokens/prompt": float(sum(len(group.prompt.token_ids) for group in groups)),
        "tokens/completion": float(sum(_policy_tokens(rollout) for rollout in rollouts)),
    }


def _length_metrics(name: str, lengths_N: np.ndarray) -> dict[str, float]:
    return {
        f"completions/mean_{name}": float(lengths_N.mean()),
        f"completions/min_{name}": float(lengths_N.min()),
        f"completions/max_{name}": float(lengths_N.max()),
    }


def _policy_tokens(rollout: Rollout) -> int:
    return sum(span.length for span in rollout.spans if span.source is Source.POLICY)


def committed_per_round(rollout: Rollout) -> ShortArray:
    """Tokens each round added to the rollout, i16[R].

    A round commits its accepted drafts and one token more, the correction or the bonus. Only the last round can lack
    that one, when an accepted draft ended the rollout; so its count is what is left of the length after the prefill's
    token and the rounds before. (A rollout that continues given tokens has had more than one prefill, hence the
    bound from above.)
    """
    committed_R = rollout.rounds.accepted + np.int16(1)
    if len(committed_R):
        left = _policy_tokens(rollout) - 1 - int(committed_R[:-1].sum())
        assert left >= rollout.rounds.accepted[-1], f"rounds of rollout {rollout.request_id} hold more than its tokens"
        committed_R[-1] = min(left, int(committed_R[-1]))
    return committed_R


def speculation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`spec/*`, pooled over all row-rounds; empty when there was no round at all.

    - `rounds`: row-rounds. `off_share`: share of them with nothing drafted. `k_mean`: drafts per row-round, those
      with none counted as 0.
    - `k_share_i`: share of them with i drafts, the histogram of what was chosen; sums to 1.
    - `num_drafts`: drafted row-rounds. `num_draft_tokens`, `num_accepted_tokens`: drafts verified and accepted
      (vLLM's names).
    - `acceptance_length` = tokens committed in drafted row-rounds / drafted row-rounds; tokens after the end of a
      rollout are never counted.
    - `accepted_per_draft` = 1 + accepted / drafted row-rounds: what vLLM and NeMo-RL report; larger where the end of
      a rollout cut its last round.
    - `acceptance_rate` = accepted / drafted tokens.
    - `acceptance_rate_pos_i` = drafts accepted at position i (from 1) / row-rounds that drafted at least i.
    - `num_looked_up_tokens`, `num_accepted_looked_up_tokens`: of the drafts, those looked up, where a model makes the
      rest.
    """
    rounds = [rollout.rounds for rollout in rollouts if len(rollout.rounds.drafted)]
    if not rounds:
        return {}
    drafted_R = np.concatenate([each.drafted for each in rounds]).astype(np.int64)
    accepted_R = np.concatenate([each.accepted for each in rounds]).astype(np.int64)
    committed_R = np.concatenate([committed_per_round(rollout) for rollout in rollouts]).astype(np.int64)
    on_R = drafted_R > 0
    num_drafts, num_draft_tokens, num_accepted = int(on_R.sum()), int(drafted_R.sum()), int(accepted_R.sum())
    metrics = {
        "spec/rounds": float(len(drafted_R)),
        "spec/off_share": float(1.0 - on_R.mean()),
        "spec/k_mean": float(drafted_R.mean()),
        "spec/num_drafts": float(num_drafts),
        "spec/num_draft_tokens": float(num_draft_tokens),
        "spec/num_accepted_tokens": float(num_accepted),
    }
    shares_K = np.bincount(drafted_R) / len(drafted_R)
    metrics |= {f"spec/k_share_{k}": float(share) for k, share in enumerate(shares_K)}
    if num_drafts == 0:
        return metrics
    metrics["spec/acceptance_length"] = float(committed_R[on_R].sum() / num_drafts)
    if any(each.looked_up is not None for each in rounds):
        looked_R = np.concatenate([looked_up_rounds(each) for each in rounds])
        metrics["spec/num_looked_up_tokens"] = float(drafted_R[looked_R].sum())
        metrics["spec/num_accepted_looked_up_tokens"] = float(accepted_R[looked_R].sum())
    metrics["spec/accepted_per_draft"] = 1.0 + num_accepted / num_drafts
    metrics["spec/acceptance_rate"] = num_accepted / num_draft_tokens
    for i in range(1, int(drafted_R.max()) + 1):
        metrics[f"spec/acceptance_rate_pos_{i}"] = float(np.sum(accepted_R >= i) / np.sum(drafted_R >= i))
    return metrics


def looked_up_rounds(rounds: Rounds) -> npt.NDArray[np.bool_]:
    """Rounds whose drafts were looked up where a model makes others, bool[R]."""
    return np.zeros(len(rounds.drafted), bool) if rounds.looked_up is None else rounds.looked_up


def acceptance_by_age(rollouts: Sequence[Rollout], learnt_version: int) -> dict[str, float]:
    """`spec/acceptance_rate_age_A`: accepted / drafted, of rollouts made A policy versions after the drafter learnt.

    Ages are pooled by powers of two: 0, 1, 2 (2 and 3), 4 (4 to 7), ... A rollout counts with the weights that made its
    last token. Looked-up drafts have no age and do not count.

    Args:
        rollouts: With their rounds.
        learnt_version: Policy version that the serving drafter last learnt from.

    """
    counts: dict[int, list[int]] = {}
    for rollout in rollouts:
        made_R = ~looked_up_rounds(rollout.rounds)
        drafted = int(rollout.rounds.drafted[made_R].sum())
        if drafted:
            age = max(int(rollout.versions[-1]) - learnt_version, 0)
            pooled = counts.setdefault(0 if age == 0 else 1 << (age.bit_length() - 1), [0, 0])
            pooled[0] += int(rollout.rounds.accepted[made_R].sum())
            pooled[1] += drafted
    return {f"spec/acceptance_rate_age_{age}": a / d for age, (a, d) in sorted(counts.items())}


def lag_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """`lag/{mean,max}`: versions between the weights that made a token and `version`, over the policy's tokens."""
    lags: list[FloatArray] = [(version - rollout.versions[rollout.loss_mask]).astype(float) for rollout in rollouts]
    lags_T = np.concatenate(lags) if lags else np.zeros(0)
    if not len(lags_T):
        return {}
    return {"lag/mean": float(lags_T.mean()), "lag/max": float(lags_T.max())}


def acceptance_by_position(metrics: Mapping[str, float]) -> list[float]:
    """The `spec/acceptance_rate_pos_i` of a row of metrics, in order of i."""
    rates: list[float] = []
    while (rate := metrics.get(f"spec/acceptance_rate_pos_{len(rates) + 1}")) is not None:
        rates.append(rate)
    return rates
