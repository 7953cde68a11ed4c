"""Hand-made prompts and rollouts for the tests of the reward stage."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from leadout.records import Finish, Prompt, Rollout, RolloutId, Rounds, Source, Span
from leadout.reward.completion import Completion
from tests.codecs import byte_codec

CODEC = byte_codec()


def make_prompt(
    answer: str | None = "42",
    columns: Mapping[str, object] | None = None,
    messages: tuple[Mapping[str, str], ...] | None = None,
) -> Prompt:
    return Prompt(
        id="x/0",
        token_ids=CODEC.encode("q"),
        text="q",
        answer=answer,
        columns=dict(columns or {}),
        messages=messages,
    )


def make_completion(text: str, prompt: Prompt | None = None, version: int = 0) -> Completion:
    return Completion(prompt=prompt or make_prompt(), text=text, token_ids=CODEC.encode(text), version=version)


def make_rollout(
    text: str,
    *,
    draw: int = 0,
    sibling: int = 0,
    prompt: Prompt | None = None,
    finish: Finish = Finish.EOS,
    stop: int | str | None = None,
    version: int = 0,
) -> Rollout:
    token_ids = CODEC.encode(text)
    length = token_ids.shape[0]
    return Rollout(
        request_id=RolloutId(draw, sibling),
        prompt=prompt or make_prompt(),
        token_ids=token_ids,
        logprobs=np.zeros(length, np.float32),
        policy_logprobs=np.zeros(length, np.float32),
        spans=(Span(length=length, source=Source.POLICY, version=version),) if length else (),
        rounds=Rounds(drafted=np.zeros(0, np.int16), accepted=np.zeros(0, np.int16)),
        finish=finish,
        stop=stop,
    )
