"""The learner's forward and backward pass over a step's packs: native layers beside transformers'.

    python benchmarks/train_stage.py                                  # 4 prompts x 8 completions x 32 tokens
    python benchmarks/train_stage.py --prompts 8 --generations 1      # packs of different prompts
    python benchmarks/train_stage.py --profile --threads 1            # operators of one pass over the largest pack

Random tokens; every contender in turn in one process, A B C A B C, the first turn warms up. The optimizer is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from leadout.build.learner import load_trainable
from leadout.build.process import prepare_process
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.loading import resolve
from leadout.records import Finish, Group, Prompt, Rollout, RolloutId, Rounds, Score, Source, Span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    prepare_process(options.threads)
    model = load_trainable(resolve(options.model), "bfloat16", torch.device("cpu"))
    groups = make_groups(options)
    completions = options.prompts * options.generations
    sizes = sorted({min(8, completions), min(16, completions), completions})
    contenders = [(f"{layers}, packs of {size}", layers, size) for size in sizes for layers in LAYERS]
    forward = PackedForward(model, ForwardSettings(temperature=1.0))
    if options.profile:
        forward.settings = replace(forward.settings, max_completions=completions)
        print(operators(forward, groups))
        return
    taken: dict[str, list[float]] = {label: [] for label, _, _ in contenders}
    for _ in range(options.turns + 1):
        for label, layers, size in contenders:
            forward.settings = replace(forward.settings, max_completions=size, layers=layers)
            taken[label].append(seconds(forward, groups))
    base = statistics.median(taken[contenders[0][0]][1:])
    print("| | s | quartiles | x of the first |\n|---|---|---|---|")
    for label, values in taken.items():
        low, middle, high = statistics.quantiles(values[1:], n=4)
        print(f"| {label} | {middle:.2f} | {low:.2f}..{high:.2f} | {middle / base:.2f} |")


LAYERS: tuple[Literal["mask", "layout", "best"], ...] = ("mask", "layout", "best")


def seconds(forward: PackedForward, groups: list[Group]) -> float:
    """Forward and backward over all packs."""
    began = time.perf_counter()
    for batch in forward.pack(groups, [np.ones(len(group.rollouts)) for group in groups]):
        forward.run(batch).logprobs_R.sum().backward()
    forward.model.zero_grad()
    return time.perf_counter() - began


def operators(forward: PackedForward, groups: list[Group]) -> str:
    """Where the second pass spends its time, by operator."""
    seconds(forward, groups)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seconds(forward, groups)
    return str(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def make_groups(options: argparse.Namespace) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for draw in range(options.prompts):
        prompt = Prompt(id=str(draw), token_ids=rng.integers(9, 40_000, options.prompt_tokens, np.int32), text="")
        rollouts = tuple(make_rollout(prompt, draw, sibling, rng, options) for sibling in range(options.generations))
        scores = (Score(reward=0.0, parts={}, text=""),) * len(rollouts)
        groups.append(Group(prompt=prompt, rollouts=rollouts, scores=scores))
    return groups


def make_rollout(
    prompt: Prompt, draw: int, sibling: int, rng: np.random.Generator, options: argparse.Namespace
) -> Rollout:
    none, logprobs = np.zeros(0, np.int16), np.zeros(options.tokens, np.float32)
    return Rollout(
        request_id=RolloutId(draw, sibling),
        prompt=prompt,
        token_ids=rng.integers(9, 40_000, options.tokens, np.int32),
        logprobs=logprobs,
        policy_logprobs=logprobs,
        spans=(Span(length=options.tokens, source=Source.POLICY, version=0),),
        rounds=Rounds(drafted=none, accepted=none),
        finish=Finish.LENGTH,
    )


if __name__ == "__main__":
    main()
