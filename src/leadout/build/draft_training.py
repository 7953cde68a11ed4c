"""Offline training of an EAGLE-3 head on the policy's own rollouts: generate, learn, measure on held-out prompts.

The first pass learns from every batch of rollouts as soon as it is generated and keeps it; further passes go over the
kept ones in another order. Every few batches the head is measured on rollouts of held-out prompts, and the one with
the best expected acceptance length (not the lowest loss) is the result. The folder::

    config.json, model.safetensors   the best head so far
    README.md                        what it was made from and how often it is accepted
    metrics.jsonl                    a row per measurement
    last/, state.pt                  where an interrupted training goes on; plan.json says with what settings
    rollouts/                        kept token ids, held_out-*.npz never learnt from
"""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from leadout.build.data import EVALUATION_SEED, load_data, sampling_params
from leadout.build.draft_card import policy_hash, write_card
from leadout.build.draft_plan import DraftPlan, draft_settings
from leadout.build.drafter import load_head, new_head, spread_prompts
from leadout.build.generator import make_decoder, make_device, make_generator
from leadout.build.kept_rollouts import read_rollouts, write_rollouts
from leadout.build.learner import load_trainable
from leadout.build.process import prepare_process
from leadout.build.round_cost import RoundCost, measure_round_costs
from leadout.config import Data, RolloutSection
from leadout.errors import CheckpointError, ConfigError
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.eagle3 import Eagle3Head
from leadout.models.eagle3_io import write_eagle3
from leadout.models.loading import read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.pipeline.folder import write_json, write_text
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.records import Group, Prompt, SamplingParams
from leadout.rollout.engine import NativeGenerator
from leadout.text import TextCodec
from leadout.train.cotrain import DraftTrainer

LENGTH = "draft/expected_acceptance_length"
_HELD_OUT_EVERY = 10
_RANKED_PROMPTS = 64
_PACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """What a training is made of."""

    prompts: list[Prompt]
    held_out: dict[str, list[Prompt]]
    generator: NativeGenerator
    params: SamplingParams
    forward: PackedForward
    head: Eagle3Head
    costs: list[RoundCost]


def train_draft(plan: DraftPlan, out: Path, console: Console) -> dict[str, float]:
    """Train, or go on where an earlier call stopped; the measurements of the best head.

    Raises:
        LeadoutError: bad input, or a folder that holds another training.

    """
    prepare_process(0)
    path = resolve(plan.model, progress=console.print)
    fingerprint = plan.fingerprint(policy_hash(path))
    going_on = _open(out, fingerprint)
    parts = build_parts(plan, path, out / "last" if going_on else None)
    trainer = DraftTrainer(parts.head, draft_settings(plan), temperature=plan.temperature, seed=plan.seed)
    session = _Session(plan, parts, trainer, out, console, fingerprint)
    if going_on:
        session.restore()
    for cost in parts.costs:
        console.print(f"batch {cost.rows}: a round of {plan.num_drafts} drafts costs {cost.round_cost:.2f} plain steps")
    return session.run()


def _open(out: Path, fingerprint: Mapping[str, Any]) -> bool:
    """Whether the folder holds the beginning of this very training; a new folder is made ready."""
    file = out / "plan.json"
    if file.is_file():
        held = json.loads(file.read_text(encoding="utf-8"))
        wrong = sorted(name for name in held.keys() | fingerprint.keys() if held.get(name) != fingerprint.get(name))
        if wrong:
            raise ConfigError(
                f"{out} holds a training with other settings ({', '.join(wrong)}); repeat them or name another folder"
            )
        return (out / "state.pt").is_file()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"expected a new or empty folder for the draft head, got {out}; name another one")
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, dict(fingerprint))
    return False


def build_parts(plan: DraftPlan, path: Path, last: Path | None) -> TrainingParts:
    """Policy, engine, prompts and head; the head comes from `last`, from the plan's `init`, or is new."""
    spec = DecoderSpec.from_config(read_config(path))
    codec = TextCodec.from_pretrained(path)
    prompts, held_out = _prompts(plan, spec, codec)
    section = RolloutSection(
        temperature=plan.temperature,
        max_completion_length=plan.max_completion_length,
        dtype=plan.dtype,
        speculative_config=None,
    )
    longest = max(len(p.token_ids) for p in [*prompts, *(p for each in held_out.values() for p in each)])
    max_len = min(spec.max_position_embeddings, longest + plan.max_completion_length)
    device = make_device("auto")
    model = load_trainable(path, plan.dtype, device).requires_grad_(False)
    weights = model.state_dict()
    decoder = make_decoder(spec, weights, dtype=plan.dtype, max_len=max_len, device=device)
    if last is not None or plan.init is not None:
        head = load_head(last or plan.init or "", weights)
    else:
        ranked = spread_prompts(prompts, _RANKED_PROMPTS)
        keep, temperature = codec.eos_token_ids, plan.temperature
        head = new_head(plan.draft, decoder, weights, ranked, seed=plan.seed, temperature=temperature, keep=keep)
    forward = ForwardSettings(
        temperature=plan.temperature, max_completions=_PACK, autocast=plan.dtype == "bfloat16", chunk_size=1024
    )
    return TrainingParts(
        prompts=prompts,
        held_out=held_out,
        generator=make_generator(decoder, codec, section, num_rows=plan.batch),
        params=sampling_params(section, codec, plan.seed),
        forward=PackedForward(model, forward),
        head=head.to(device),
        costs=measure_round_costs(decoder, codec, section, head, prompts[0], num_drafts=plan.num_drafts),
    )


def _prompts(plan: DraftPlan, spec: DecoderSpec, codec: TextCodec) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Training prompts of all data sets, mixed, and the held-out ones of each."""
    train: list[Prompt] = []
    held_out: dict[str, list[Prompt]] = {}
    context = spec.max_position_embeddings - plan.max_completion_length
    for name, dataset in plan.data.items():
        section = Data(overlong="drop", max_prompt_length=context)
        prompts = load_data(dataset, section, codec, seed=plan.seed, context=context + 1).prompts.prompts
        if len(prompts) < 2:
            raise ConfigError(f"data set {name}: expected at least 2 prompts (one is held out), got {len(prompts)}")
        held_out[name] = list(prompts[::_HELD_OUT_EVERY][: plan.held_out])
        train += [prompt for index, prompt in enumerate(prompts) if index % _HELD_OUT_EVERY]
    order = np.random.default_rng(plan.seed).permutation(len(train))
    return [train[i] for i in order], held_out


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

    def restore(self) -> None:
        """Go on from the last measurement; measurements after it are cut off."""
        try:
            state = torch.load(self._out / "state.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{self._out / 'state.pt'}: expected a whole file, got {error}; start anew in another folder"
            ) from error
        self._trainer.load_state_dict(state["trainer"])
        self._done, self._best, self._seconds = state["done"], state["best"], state["seconds"]
        rows = (self._out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(self._out / "metrics.jsonl", "".join(rows[: state["rows"]]))

    def run(self) -> dict[str, float]:
        """All batches that are left."""
        plan, total = self._plan, self._plan.num_batches * self._plan.passes
        held_out = {name: self._held_out(name, prompts) for name, prompts in self._parts.held_out.items()}
        if self._done == 0:
            self._measure(held_out)
        while self._done < total:
            groups = self._batch(self._done)
            began = time.monotonic()
            self._learn(groups)
            self._seconds["train"] += time.monotonic() - began
            self._done += 1
            if self._done % plan.measure_every == 0 or self._done == total:
                self._measure(held_out)
        return self._best

    def _batch(self, number: int) -> list[Group]:
        """A batch by its number over all passes: made in the first pass, read again in the others."""
        plan = self._plan
        epoch, index = divmod(number, plan.num_batches)
        if epoch:
            index = int(np.random.default_rng((plan.seed, epoch)).permutation(plan.num_batches)[index])
        file = self._out / "rollouts" / f"{index:05d}.npz"
        if not file.is_file():
            prompts = self._parts.prompts
            first = index * plan.batch
            count = min(plan.batch, plan.num_rollouts - first)
            picked = [prompts[(first + i) % len(prompts)] for i in range(count)]
            self._generate(file, picked, self._parts.params, first)
        return read_rollouts(file)

    def _held_out(self, name: str, prompts: Sequence[Prompt]) -> list[Group]:
        file = self._out / "rollouts" / f"held_out-{name.replace('/', '_')}.npz"
        if not file.is_file():
            params = replace(self._parts.params, seed=self._plan.seed + EVALUATION_SEED)
            self._generate(file, prompts, params, 0)
        return read_rollouts(file)

    def _generate(self, file: Path, prompts: Sequence[Prompt], params: SamplingParams, first_draw: int) -> None:
        began = time.monotonic()
        write_rollouts(file, generate(self._parts.generator, make_requests(prompts, params, 1, first_draw)))
        self._seconds["rollout"] += time.monotonic() - began

    def _learn(self, groups: Sequence[Group]) -> None:
        trainer, forward = self._trainer, self._parts.forward
        trainer.begin_step(len(groups))
        for batch in forward.pack(groups, [np.zeros(1)] * len(groups)):
            if batch.response_R.numel():
                with torch.no_grad():
                    output = forward.run(batch, taps=trainer.taps)
                trainer.observe(batch, output, forward)
        self._trained = trainer.finish_step(forward)

    def _measure(self, held_out: Mapping[str, Sequence[Group]]) -> None:
        """Measure on held-out rollouts, keep the best head, and save where training stands."""
        row: dict[str, float] = {
            "rollouts": float(min(self._done * self._plan.batch, self._plan.num_rollouts * self._plan.passes)),
            "seconds/rollout": self._seconds["rollout"],
            "seconds/train": self._seconds["train"],
        }
        if self._done:
            row |= {name: self._trained[name] for name in ("draft/loss", "draft/learning_rate")}
        by_set = {name: self._trainer.evaluate(groups, self._parts.forward) for name, groups in held_out.items()}
        if not all(by_set.values()):
            raise ConfigError("held-out rollouts have fewer than two tokens each; raise the completion length")
        row |= {f"{metric}/{name}": value for name, figures in by_set.items() for metric, value in figures.items()}
        row |= {m: float(np.mean([f[m] for f in by_set.values()])) for m in next(iter(by_set.values()))}
        for cost in self._parts.costs:
            row[f"speedup/batch_{cost.rows}"] = row[LENGTH] / cost.round_cost
        self._report(row)
        with (self._out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if row[LENGTH] > self._best.get(LENGTH, 0.0):
            self._best = row
            write_eagle3(copy.deepcopy(self._trainer.head).to(torch.bfloat16), self._out)
            write_card(self._out, self._fingerprint, row)
        self._save()

    def _report(self, row: Mapping[str, float]) -> None:
        rates = [f"{row[f'draft/expected_acceptance_rate_pos_{i + 1}']:.3f}" for i in range(self._plan.num_drafts)]
        speeds = ", ".join(f"{row[f'speedup/batch_{c.rows}']:.2f}x at batch {c.rows}" for c in self._parts.costs)
        loss = f"loss {row['draft/loss']:.3f}, " if "draft/loss" in row else ""
        self._console.print(
            f"{row['rollouts']:6.0f} rollouts, {row['seconds/train']:5.0f} s: {loss}"
            f"acceptance length {row[LENGTH]:.3f}, by position {' '.join(rates)}, expected speedup {speeds}"
        )

    def _save(self) -> None:
        write_eagle3(self._trainer.head, self._out / "last")
        rows = len((self._out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        state = {
            "trainer": self._trainer.state_dict(),
            "done": self._done,
            "best": self._best,
            "seconds": self._seconds,
            "rows": rows,
        }
        temporary = self._out / ".state.pt.tmp"
        torch.save(state, temporary)
        temporary.replace(self._out / "state.pt")
