"""Offline training of a drafter on the policy's own rollouts: generate, learn, measure on held-out prompts.

The first pass learns from every batch of rollouts as soon as it is generated and keeps it; further passes go over the
kept ones in another order. Every few batches the drafter is measured on rollouts of held-out prompts, and the one
with the best expected acceptance length (not the lowest loss) is the result. The folder::

    config.json, model.safetensors   the best drafter so far
    README.md                        what it was made from and how often it is accepted
    metrics.jsonl                    a row per measurement
    last-*/, state.pt                where an interrupted training goes on; plan.json says with what settings
    rollouts/                        kept token ids, held_out-*.npz never learnt from
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from leadout.build.data import EVALUATION_SEED
from leadout.build.draft_card import policy_hash, write_card
from leadout.build.draft_folder import alone_in, check_new, open_folder, read_metrics
from leadout.build.draft_parts import TrainingParts, build_parts
from leadout.build.draft_plan import DraftPlan, draft_settings
from leadout.build.kept_rollouts import read_rollouts, unscored_group, write_rollouts
from leadout.build.process import prepare_process
from leadout.errors import CheckpointError, ConfigError
from leadout.logprob.recorded import recorded_output
from leadout.models.cut_layers import copy_tokenizer
from leadout.models.eagle3 import Eagle3Head
from leadout.models.eagle3_io import write_speculators
from leadout.models.loading import resolve
from leadout.pipeline.folder import write_text
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.records import Group, Prompt, Request
from leadout.storage import UNREADABLE, writing
from leadout.train.cotrain import DraftTrainer
from leadout.train.students import HeadStudent

LENGTH = "draft/expected_acceptance_length"


def train_draft(plan: DraftPlan, out: Path, console: Console) -> dict[str, float]:
    """Train, or go on where an earlier call stopped; the measurements of the best head.

    Raises:
        LeadoutError: bad input, or a folder that holds another training.

    """
    prepare_process(0)
    check_new(out)
    path = resolve(plan.model, progress=console.print)
    fingerprint = plan.fingerprint(policy_hash(path))
    with alone_in(out):
        return _train(plan, path, out, console, fingerprint)


def _train(
    plan: DraftPlan, path: Path, out: Path, console: Console, fingerprint: Mapping[str, Any]
) -> dict[str, float]:
    state = open_folder(out, fingerprint)
    parts = build_parts(plan, path, None if state is None else out / str(state["last"]))
    trainer = DraftTrainer(parts.student, draft_settings(plan), temperature=plan.temperature, seed=plan.seed)
    session = _Session(plan, parts, trainer, out, console, fingerprint)
    if state is not None:
        session.restore(state)
    for cost in parts.costs:
        console.print(f"batch {cost.rows}: a round of {plan.num_drafts} drafts costs {cost.round_cost:.2f} plain steps")
    return session.run()


class _Batch(NamedTuple):
    """Rollouts to learn from."""

    groups: list[Group]
    states: list[Tensor] | None
    """The policy's states of each rollout, if they were kept."""


class _Session:
    """One training, from wherever it stands to its end."""

    def __init__(
        self,
        plan: DraftPlan,
        parts: TrainingParts,
        trainer: DraftTrainer,
        out: Path,
        console: Console,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self._plan, self._parts, self._trainer = plan, parts, trainer
        self._out, self._console, self._fingerprint = out, console, fingerprint
        self._done = 0
        self._trained: dict[str, float] = {}
        self._seconds = {"rollout": 0.0, "train": 0.0}
        self._best: dict[str, float] = {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the last measurement; measurements after it are cut off.

        Raises CheckpointError where what it says is not of this training, or its best drafter is gone.
        """
        file, total = self._out / "state.pt", self._plan.num_batches * self._plan.passes
        try:
            self._trainer.load_state_dict(state["trainer"])
            self._done, self._best = state["done"], {str(name): float(value) for name, value in state["best"].items()}
            self._seconds = {stage: float(state["seconds"][stage]) for stage in self._seconds}
        except UNREADABLE as error:
            raise CheckpointError(
                f"{file}: expected the state of this training, got {error!r}; start anew in another folder"
            ) from error
        if not 0 <= self._done <= total:
            raise CheckpointError(f"{file}: expected at most {total} batches done, got {self._done}; start anew")
        gone = [name for name in ("config.json", "model.safetensors") if not (self._out / name).is_file()]
        if self._best and gone:
            raise CheckpointError(
                f"{self._out}: expected the best drafter so far, its {' and '.join(gone)} is gone; "
                f"start anew in another folder, or take the latest one from {self._out / state['last']}"
            )
        write_text(self._out / "metrics.jsonl", read_metrics(self._out, state["rows"]))

    def run(self) -> dict[str, float]:
        """All batches that are left."""
        plan, total = self._plan, self._plan.num_batches * self._plan.passes
        held_out = {name: self._held_out(name, prompts) for name, prompts in self._parts.held_out.items()}
        if self._done == 0:
            self._measure(held_out)
        while self._done < total:
            made = self._batch(self._done)
            began = time.monotonic()
            self._learn(made)
            self._seconds["train"] += time.monotonic() - began
            self._done += 1
            if self._done % plan.measure_every == 0 or self._done == total:
                self._measure(held_out)
        return self._best

    def _batch(self, number: int) -> _Batch:
        """A batch by its number over all passes: made in the first pass, read again in the others."""
        plan = self._plan
        epoch, index = divmod(number, plan.num_batches)
        if epoch:
            index = int(np.random.default_rng((plan.seed, epoch)).permutation(plan.num_batches)[index])
            file = self._file(f"{index:05d}")
            if not file.is_file():
                self._make(index)
            return _Batch(read_rollouts(file, self._vocab_size), None)
        return self._make(index)

    def _make(self, index: int) -> _Batch:
        """Generate a batch of the first pass and keep it."""
        plan, prompts = self._plan, self._parts.prompts
        first = index * plan.batch
        count = min(plan.batch, plan.num_rollouts - first)
        draws = range(first // plan.num_generations, -(-(first + count) // plan.num_generations))
        picked = [prompts[draw % len(prompts)] for draw in draws]
        requests = make_requests(picked, self._parts.params, plan.num_generations, draws.start)[:count]
        # States are not kept on disk: a batch that an interrupted training had made is made again, token for token.
        return self._generate(self._file(f"{index:05d}"), requests)

    def _held_out(self, name: str, prompts: Sequence[Prompt]) -> list[Group]:
        file = self._file(f"held_out-{name.replace('/', '_')}")
        if not file.is_file():
            params = replace(self._parts.params, seed=self._plan.seed + EVALUATION_SEED)
            self._generate(file, make_requests(prompts, params, 1))
        return read_rollouts(file, self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        return self._parts.forward.embedding_VH.shape[0]

    def _file(self, name: str) -> Path:
        return self._out / "rollouts" / f"{name}.npz"

    def _generate(self, file: Path, requests: Sequence[Request]) -> _Batch:
        began = time.monotonic()
        rollouts = generate(self._parts.generator, requests)
        write_rollouts(file, rollouts)
        # Neighbours share an update: they should be of different prompts.
        spread = sorted(rollouts, key=lambda rollout: (rollout.request_id.sibling, rollout.request_id.draw))
        states = [self._parts.recorder.take(rollout.request_id) for rollout in spread]
        self._seconds["rollout"] += time.monotonic() - began
        return _Batch([unscored_group([rollout]) for rollout in spread], states)

    def _learn(self, made: _Batch) -> None:
        trainer, forward = self._trainer, self._parts.forward
        trainer.begin_step(sum(len(group.rollouts) for group in made.groups))
        for batch in forward.pack(made.groups, [np.zeros(len(group.rollouts)) for group in made.groups]):
            if batch.response_R.numel():
                if made.states is None:
                    with torch.no_grad():
                        output = forward.run(batch, taps=trainer.taps)
                else:
                    first = batch.first_rollout
                    output = recorded_output(forward, batch, made.states[first : first + len(batch.rollouts)])
                trainer.observe(batch, output, forward)
        self._trained = trainer.finish_step(forward)

    def _measure(self, held_out: Mapping[str, Sequence[Group]]) -> None:
        """Measure on held-out rollouts, keep the best drafter, and save where training stands."""
        row: dict[str, float] = {
            "rollouts": float(self._num_learnt()),
            "seconds/rollout": self._seconds["rollout"],
            "seconds/train": self._seconds["train"],
        }
        if self._done:
            row |= {name: self._trained[name] for name in ("draft/loss", "draft/learning_rate")}
        by_set = {name: self._trainer.evaluate(groups, self._parts.forward) for name, groups in held_out.items()}
        if not all(by_set.values()):
            raise ConfigError("held-out rollouts have fewer than two tokens each; raise the completion length")
        row |= {f"{metric}/{name}": value for name, figures in by_set.items() for metric, value in figures.items()}
        shared = set.intersection(*(set(figures) for figures in by_set.values()))
        row |= {m: float(np.mean([f[m] for f in by_set.values()])) for m in sorted(shared)}
        for cost in self._parts.costs:
            row[f"speedup/batch_{cost.rows}"] = row[LENGTH] / cost.round_cost
        self._report(row)
        with (self._out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if row[LENGTH] > self._best.get(LENGTH, 0.0):
            self._best = row
            self._write_best()
            write_card(self._out, self._fingerprint, row)
        self._save()

    def _num_learnt(self) -> int:
        """Rollouts so far, passes counted; the last batch of a pass may be a short one."""
        plan = self._plan
        passes, batches = divmod(self._done, plan.num_batches)
        return passes * plan.num_rollouts + min(batches * plan.batch, plan.num_rollouts)

    def _report(self, row: Mapping[str, float]) -> None:
        rates = [f"{row[f'draft/expected_acceptance_rate_pos_{i + 1}']:.3f}" for i in range(self._plan.num_drafts)]
        speeds = ", ".join(f"{row[f'speedup/batch_{c.rows}']:.2f}x at batch {c.rows}" for c in self._parts.costs)
        loss = f"loss {row['draft/loss']:.3f}, " if "draft/loss" in row else ""
        self._console.print(
            f"{row['rollouts']:6.0f} rollouts, {row['seconds/train']:5.0f} s: {loss}"
            f"acceptance length {row[LENGTH]:.3f}, by position {' '.join(rates)}, expected speedup {speeds}"
        )

    def _write_best(self) -> None:
        student = self._trainer.student.frozen_copy()
        student.module.to(torch.bfloat16)
        if self._plan.format == "hf":
            if isinstance(student, HeadStudent) and isinstance(student.head, Eagle3Head):
                student.head.form = None
            student.save(self._out)
            if self._plan.method == "small_model":
                copy_tokenizer(resolve(str(self._plan.init)), self._out)
            return
        assert isinstance(student, HeadStudent) and isinstance(student.head, Eagle3Head), "the command line checks it"
        embedding_PH = self._parts.forward.embedding_VH
        drafts = self._plan.num_drafts
        write_speculators(student.head, self._out, embedding_PH, policy=self._plan.model, drafts=drafts)

    def _save(self) -> None:
        """Where training stands; an interruption leaves the state before, with the drafter that belongs to it."""
        last = f"last-{self._done:05d}"
        self._trainer.student.save(self._out / last)
        rows = len((self._out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        state = {
            "trainer": self._trainer.state_dict(),
            "done": self._done,
            "best": self._best,
            "seconds": self._seconds,
            "rows": rows,
            "last": last,
        }
        temporary = self._out / ".state.pt.tmp"
        with writing(self._out / "state.pt"):
            torch.save(state, temporary)
        temporary.replace(self._out / "state.pt")
        for folder in self._out.glob("last-*"):
            if folder.name != last:
                shutil.rmtree(folder)
