"""Groups -> the lines of rollouts.jsonl: one JSON object per rollout, readable without this project."""

from __future__ import annotations

from collections.abc import Sequence

from leadout.records import Group, Rollout, Score


def rollout_lines(step: int, groups: Sequence[Group]) -> list[dict[str, object]]:
    """One object per rollout, groups in order and siblings in order."""
    return [
        _line(step, rollout, score)
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]


def _line(step: int, rollout: Rollout, score: Score) -> dict[str, object]:
    return {
        "step": step,
        "draw": rollout.request_id.draw,
        "sibling": rollout.request_id.sibling,
        "prompt_id": rollout.prompt.id,
        "prompt": rollout.prompt.text,
        "completion": score.text,
        "answer": rollout.prompt.answer,
        "reward": score.reward,
        "rewards": dict(score.parts),
        "masked": score.masked,
        "finish": str(rollout.finish),
        "stop": rollout.stop,
        "token_ids": rollout.token_ids.tolist(),
        "spans": [[span.length, str(span.source), span.version] for span in rollout.spans],
        "drafted": rollout.rounds.drafted.tolist(),
        "accepted": rollout.rounds.accepted.tolist(),
        "looked_up": [] if rollout.rounds.looked_up is None else rollout.rounds.looked_up.nonzero()[0].tolist(),
    }
