"""What the stages of the comparison of drafters share: options, folder, prompts, and a loaded policy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from rich.console import Console

from benchmarks.drafter_cells import WORKLOADS, Drafter, Options
from benchmarks.drafter_store import Store, Training, Tuned
from leadout.build.bench_machine import BenchMachine
from leadout.build.data import load_data
from leadout.config import Data, Dataset
from leadout.data.tasks import make_task
from leadout.models.loading import read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.pipeline.folder import write_text
from leadout.records import Prompt
from leadout.text import TextCodec

_DRAWN, _HELD_OUT_EVERY = 4000, 5
"""Rows in which every question of the task comes up; of those, which are never trained on."""


@dataclass(slots=True)
class Bench:
    """What the stages share: options, folder, and the policy that was loaded last."""

    options: Options
    store: Store
    console: Console
    epochs: dict[tuple[str, str], object] = field(default_factory=dict)
    """What `history` remembers of the epoch before, by workload and policy."""
    _machine: tuple[str, BenchMachine] | None = None
    _prompts: dict[str, tuple[Prompt, ...]] = field(default_factory=dict)

    def folder(self, drafter: Drafter) -> str | None:
        """The folder of a drafter that has one."""
        if drafter.folder is not None:
            return str(drafter.folder)
        training = self.store.read(Training, f"train/{drafter.trained_as or drafter.name}")
        return None if training is None else str(training.folder)

    def machine(self, policy: str) -> BenchMachine:
        """The policy, loaded once for all cells of it."""
        if self._machine is None or self._machine[0] != policy:
            self._machine = None
            options, model = self.options, self.options.model
            if policy == "tuned":
                tuned = self.store.read(Tuned, "policy/tuned")
                assert tuned is not None, "the cell needs it"
                model = str(tuned.folder)
            names = [name for name in WORKLOADS if name == "arithmetic" or options.gsm8k is not None]
            longest = max(len(prompt.token_ids) for name in names for prompt in self.prompts(name))
            machine = BenchMachine(
                model,
                max_len=longest + max(options.completion_length, options.new_tokens),
                dtype=options.dtype,
                threads=options.threads or None,
            )
            self._machine = policy, machine
        return self._machine[1]

    def prompts(self, workload: str) -> tuple[Prompt, ...]:
        """As many as asked for, from the first again after the last; no drafter here is trained on any."""
        if workload not in self._prompts:
            options = self.options
            path = resolve(options.model)
            context = DecoderSpec.from_config(read_config(path)).max_position_embeddings
            limit = context - max(options.completion_length, options.new_tokens)
            dataset = self.arithmetic("held-out")
            if workload == "gsm8k":
                dataset = Dataset(path=options.gsm8k, prompt_key="question", answer_key=None)
            section = Data(overlong="drop", max_prompt_length=limit)
            codec = TextCodec.from_pretrained(path)
            found = load_data(dataset, section, codec, seed=0, context=limit + 1).prompts.prompts
            self._prompts[workload] = tuple(found[i % len(found)] for i in range(options.prompts))
        return self._prompts[workload]

    def arithmetic(self, part: Literal["train", "held-out"], count: int | None = None) -> Dataset:
        """The task's questions in two parts without a common one, repeated up to `count` rows.

        The task draws from so few questions that rows of two seeds are mostly the same ones. A drafter's training holds
        every tenth row out for itself: with a multiple of ten questions it is always the same questions.
        """
        path = self.store.out.absolute() / "data" / f"arithmetic-{part}{'' if count is None else f'-{count}'}.jsonl"
        if not path.is_file():
            drawn = make_task("arithmetic", {}).rows(_DRAWN, 0)
            questions = sorted({str(row["prompt"]) for row in drawn})
            mixed = [questions[i] for i in np.random.default_rng(0).permutation(len(questions))]
            held_out = mixed[::_HELD_OUT_EVERY]
            rest = [question for question in mixed if question not in set(held_out)]
            chosen = held_out if part == "held-out" else rest[: len(rest) // 10 * 10]
            rows = (chosen[i % len(chosen)] for i in range(len(chosen) if count is None else count))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps({"prompt": question}) + "\n" for question in rows))
        return Dataset(path=path, answer_key=None)
