"""Typed, deterministic stand-ins for the Protocols, without torch: fast enough to run whole runs in a test.

They depend on one another as the real parts do: rollouts on the weights, weights on rewards, draft lengths on what was
accepted before. So a run that loses any piece of state ends in other figures.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from leadout.clock import SimulatedClock
from leadout.interfaces import Running
from leadout.records import (
    Capabilities,
    Finish,
    Group,
    LearnerLogprobs,
    Prompt,
    RefitReport,
    Request,
    Rollout,
    RolloutId,
    Rounds,
    SamplingParams,
    Score,
    Source,
    Span,
    TensorSpec,
    TrainReport,
    WeightUpdate,
)

EOS = 2


def make_prompt(number: int = 0, length: int = 3) -> Prompt:
    """A prompt that needs no tokenizer."""
    ids = np.arange(3, 3 + length, dtype=np.int32)
    return Prompt(id=f"fake/{number}", token_ids=ids, text=f"prompt <{number}>", answer=str(number))


def make_rollout(
    draw: int = 0,
    sibling: int = 0,
    tokens: Sequence[int] = (7, 8, EOS),
    drafted: Sequence[int] = (),
    accepted: Sequence[int] = (),
    version: int = 0,
    finish: Finish = Finish.EOS,
    prompt: Prompt | None = None,
) -> Rollout:
    """A rollout with these tokens and rounds, all made by the policy."""
    length = len(tokens)
    return Rollout(
        request_id=RolloutId(draw, sibling),
        prompt=prompt or make_prompt(draw),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        policy_logprobs=np.full(length, -1.0, np.float32),
        spans=(Span(length=length, source=Source.POLICY, version=version),) if length else (),
        rounds=Rounds(drafted=np.array(drafted, np.int16), accepted=np.array(accepted, np.int16)),
        finish=finish,
        stop=EOS if finish is Finish.EOS else None,
    )


def make_group(rollouts: Sequence[Rollout], rewards: Sequence[float], masked: Sequence[bool] | None = None) -> Group:
    """A group with these rewards."""
    flags = masked or [False] * len(rollouts)
    scores = [Score(reward=r, parts={"task": r}, text="x", masked=m) for r, m in zip(rewards, flags, strict=True)]
    return Group(prompt=rollouts[0].prompt, rollouts=tuple(rollouts), scores=tuple(scores))


@dataclass
class FakeSource:
    """Prompts in an order shuffled anew each epoch."""

    num_rows: int = 5
    seed: int = 0
    epoch: int = 0
    position: int = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        taken = []
        for _ in range(num_prompts):
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
            taken.append(make_prompt(int(order[self.position]), length=2 + int(order[self.position])))
            self.position += 1
            if self.position == self.num_rows:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.epoch, self.position = int(str(state["epoch"])), int(str(state["position"]))


@dataclass
class FakeGenerator:
    """Draws tokens from (seed, rollout id, weights); drafts `k` tokens a round, or by its own statistics if None.

    `collect` hands rollouts back one at a time and last first. `clock` and `seconds_per_round` let it take time.
    """

    k: int | None = 0
    accept: float = 0.6
    clock: SimulatedClock | None = None
    seconds_per_round: float = 1.0
    rounds_seen: int = 0
    weights: int = 0
    version: int = 0
    queue: list[Request] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            trace=False,
            exact_seeds=True,
            policy_logprobs=True,
            in_flight_refit=frozenset(),
            methods=frozenset({"ngram"}),
            max_context=1000,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        self.queue += requests
        self.submitted += requests

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        return [self._generate(self.queue.pop())] if self.queue else []

    def cancel(self, ids: Sequence[RolloutId]) -> list[Rollout]:
        self.queue = [request for request in self.queue if request.rollout_id not in ids]
        return []

    def refit(self, update: WeightUpdate, running: Running = "finish") -> RefitReport:
        self.weights, self.version = update.manifest["policy"].crc32, update.version
        return RefitReport(
            version=update.version,
            draft_version=update.draft_version,
            checksum=f"{self.weights:08x}",
            draft_checksum=None,
        )

    def set_awake(self, awake: bool) -> None:
        pass

    def state_dict(self) -> dict[str, object]:
        return {"rounds_seen": self.rounds_seen}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.rounds_seen = int(str(state["rounds_seen"]))

    def _generate(self, request: Request) -> Rollout:
        params = request.params
        random = np.random.default_rng([params.seed, *request.rollout_id, self.weights])
        wanted = int(random.integers(1, params.max_new_tokens + 1))
        tokens = [*random.integers(3, 50, wanted - 1).tolist(), EOS]
        drafted, accepted, made = [], [], 1
        while made < wanted:
            k = self.rounds_seen % 4 if self.k is None else self.k
            hits = min(int((random.random(k) < self.accept).cumprod().sum()), wanted - made)
            drafted.append(k)
            accepted.append(hits)
            made += min(hits + 1, wanted - made)
            self.rounds_seen += 1
        if self.clock is not None:
            self.clock.advance(self.seconds_per_round * len(drafted))
        return make_rollout(*request.rollout_id, tokens, drafted, accepted, version=self.version, prompt=request.prompt)


class FakeScorer:
    """Reward 1 where the sum of the tokens is even."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        rewards = [float(rollout.token_ids.sum() % 2 == 0) for rollout in rollouts]
        texts = [" ".join(map(str, rollout.token_ids.tolist())) for rollout in rollouts]
        return [
            Score(reward=reward, parts={"even": reward}, text=text) for reward, text in zip(rewards, texts, strict=True)
        ]


@dataclass
class FakeLearner:
    """A weight and a momentum that follow the rewards."""

    version: int = 0
    weight: float = 0.5
    momentum: float = 0.0
    separate_logprobs: bool = False

    def logprobs(self, groups: Sequence[Group]) -> LearnerLogprobs | None:
        if not self.separate_logprobs:
            return None
        values = tuple(rollout.policy_logprobs for group in groups for rollout in group.rollouts)
        return LearnerLogprobs(values=values, version=self.version, metrics={"entropy": 2.0})

    def step(self, groups: Sequence[Group], logprobs: LearnerLogprobs | None) -> TrainReport:
        rewards = [score.reward for group in groups for score in group.scores]
        lengths = [rollout.length for group in groups for rollout in group.rollouts]
        self.momentum = 0.9 * self.momentum + float(np.dot(rewards, lengths)) / 100.0
        self.weight += 0.1 * self.momentum
        self.version += 1
        metrics = {"loss": -self.weight, "entropy": 1.0 / (1.0 + self.weight)}
        return TrainReport(version=self.version, draft_version=0, metrics=metrics)

    def publish(self) -> WeightUpdate:
        crc32 = zlib.crc32(np.float64(self.weight).tobytes())
        spec = TensorSpec(shape=(1,), dtype="F64", crc32=crc32)
        return WeightUpdate(version=self.version, draft_version=0, manifest={"policy": spec}, chunks=iter(()))

    def save(self, folder: Path) -> None:
        state = {"version": self.version, "weight": self.weight, "momentum": self.momentum}
        (folder / "fake.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        state = json.loads((folder / "fake.json").read_text())
        self.version, self.weight, self.momentum = state["version"], state["weight"], state["momentum"]


def make_params(max_new_tokens: int = 8, seed: int = 0) -> SamplingParams:
    """Sampling at temperature 1."""
    return SamplingParams(max_new_tokens=max_new_tokens, seed=seed, stop_token_ids=(EOS,))
