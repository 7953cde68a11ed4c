"""Hold the simulator against this machine: calibrate a profile, then measure paired cells on other shapes.

Usage: ``python benchmarks/simulator_own_runs.py OUT [--pairs 5] [--threads 2] [--quick]``, then
``leadout simulate --run OUT --profile OUT/profile.json --validate``.

Calibration: rounds of the native engine at fixed k, by drafter, rows (1, 2, 8, 32, 96) and prompt length (16, 160).
Cells: batch 1, 4, 16, 64 x k 0, 1, 3, 5 x drafters (k = 0 once), prompts of 48 tokens, lengths 24-56: none of these
shapes is in the grid. A cell is measured as pairs of [probe, speculative run, plain run, probe], the probe being one
fixed plain run. Only the rollout stage is run; the native engine drafts by n-gram and EAGLE-3 (an untrained head: its
time does not depend on its weights, its acceptance is what it is).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leadout.build.drafter import new_head
from leadout.build.generator import make_decoder, make_device, make_generator
from leadout.config import Draft, LeadoutSpeculation, RolloutSection, SpeculativeConfig
from leadout.draft_length.controller import FixedLength, RoundOutcome
from leadout.models.loading import iter_weights, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt, Request, Rollout, RolloutId, SamplingParams
from leadout.rollout.engine import NativeGenerator
from leadout.sim.profile import Linear, Profile, RoundGrid
from leadout.sim.replay import rollout_seconds
from leadout.sim.runs import RecordedStep
from leadout.text import TextCodec

MODEL = "smollm2-135m"
METHODS = ("ngram", "eagle3")
ROWS = (1, 2, 8, 32, 96)
PROMPTS = (16, 160)
CELL_BATCHES, DRAFTS, CELL_PROMPT = (1, 4, 16, 64), (1, 3, 5), 48
GROUP = 8
CALIBRATION_TOKENS = 20


@dataclass(slots=True)
class Timed(FixedLength):
    """Always k, and the wall time at the end of every round with its rows."""

    k: int
    ends: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        FixedLength.__init__(self, self.k)

    def record(self, outcome: RoundOutcome) -> None:
        """Note when a round ended."""
        self.ends.append((time.perf_counter(), int(outcome.drafted_B.shape[0])))


class Machine:
    """The engine with its drafters."""

    def __init__(self, slots: int) -> None:
        path = resolve(MODEL)
        spec = DecoderSpec.from_config(read_config(path))
        weights = dict(iter_weights(path))
        codec = TextCodec.from_pretrained(path)
        decoder = make_decoder(spec, weights, dtype="bfloat16", max_len=256, device=make_device("cpu"))
        head = new_head(Draft(), decoder, weights, [], seed=0, temperature=1.0, keep=())
        self._vocab = spec.vocab_size
        self._generators: dict[str, NativeGenerator] = {}
        for method in METHODS:
            section = RolloutSection(
                speculative_config=SpeculativeConfig(
                    method=method,  # type: ignore[arg-type]
                    num_speculative_tokens=3,
                    leadout=LeadoutSpeculation(),
                )
            )
            self._generators[method] = make_generator(
                decoder, codec, section, num_rows=slots, head=head if method == "eagle3" else None
            )
        self._draws = 0

    def run(self, method: str, k: int, lengths: Sequence[int], prompt: int) -> tuple[float, list[Rollout], Timed]:
        """Generate rows of exactly these lengths: (seconds, rollouts, round ends)."""
        timer = Timed(k)
        base = self._generators[METHODS[0] if k == 0 else method]
        generator = base.variant(timer, drafts=k > 0)
        rng = np.random.default_rng(self._draws)
        requests = []
        for i, length in enumerate(lengths):
            if i % GROUP == 0:
                self._draws += 1
                # Words come back in the prompt, so that n-grams have something to find.
                ids = np.tile(rng.integers(100, self._vocab, 8), -(-prompt // 8))[:prompt].astype(np.int32)
                source = Prompt(id=f"p{self._draws}", token_ids=ids, text="")
            params = SamplingParams(max_new_tokens=int(length), seed=self._draws)
            requests.append(Request(rollout_id=RolloutId(self._draws, i % GROUP), prompt=source, params=params))
        begin = time.perf_counter()
        generator.submit(requests)
        done: list[Rollout] = []
        while len(done) < len(requests):
            done += generator.collect()
        return time.perf_counter() - begin, done, timer

    def probe(self) -> float:
        """One fixed plain run; the machine's pace."""
        return self.run("ngram", 0, [16] * 8, 16)[0]


def calibrate(machine: Machine, grid: Sequence[int], drafts: Sequence[int]) -> Profile:
    """Median seconds of a round by method, k, rows and prompt length; prefill by regression."""
    probes = [machine.probe() for _ in range(5)]
    grids, prefills = [], []
    for method, k in [("none", 0), *((m, k) for m in METHODS for k in drafts)]:
        seconds = np.zeros((len(grid), len(PROMPTS)))
        for i, rows in enumerate(grid):
            for j, prompt in enumerate(PROMPTS):
                total, _, timer = machine.run(method, k, [CALIBRATION_TOKENS] * rows, prompt)
                ends = [end for end, live in timer.ends if live == rows]
                gaps = np.diff(ends)
                seconds[i, j] = float(np.median(gaps)) if len(gaps) else total
                groups = -(-rows // GROUP)
                rounds = timer.ends[-1][0] - timer.ends[0][0] + seconds[i, j]
                prefills.append((groups * prompt, total - rounds))
        probes.append(machine.probe())
        contexts = tuple(float(prompt + CALIBRATION_TOKENS / 2) for prompt in PROMPTS)
        rising = np.maximum(seconds, 1e-9)
        grids.append(
            RoundGrid(
                method=method,
                k=k,
                rows=tuple(grid),
                contexts=contexts,
                seconds=tuple(tuple(float(s) for s in line) for line in rising),
            )
        )
        print(f"calibrated {method} k={k}: {np.round(rising * 1e3, 1).tolist()} ms", flush=True)
    tokens, rest = (np.array(column) for column in zip(*prefills, strict=True))
    slope = max(float(np.polyfit(tokens, rest, 1)[0]), 0.0)
    fixed = max(float(np.median(rest - slope * tokens)), 0.0)
    return Profile(
        machine=f"{torch.get_num_threads()} threads",
        model=MODEL,
        probe_s=float(np.median(probes)),
        rounds=tuple(grids),
        prefill=Linear(fixed_s=fixed, seconds_per_token=slope),
    )


def recorded(rollouts: Sequence[Rollout]) -> RecordedStep:
    """What a log of these rollouts would say."""
    drafted: dict[int, float] = {}
    for rollout in rollouts:
        for k in rollout.rounds.drafted.tolist():
            drafted[k] = drafted.get(k, 0.0) + 1.0
    total = sum(drafted.values())
    return RecordedStep(
        step=1,
        seconds={},
        lengths=np.array([float(rollout.length) for rollout in rollouts]),
        prompts=np.full(len(rollouts), float(CELL_PROMPT)),
        rounds=np.array([float(len(rollout.rounds.drafted)) for rollout in rollouts]),
        drafted={k: share / total for k, share in drafted.items()},
    )


def predict(profile: Profile, rollouts: Sequence[Rollout], method: str, k: int) -> float:
    """Seconds of the rollout stage from its log; every round drafts k (the tail's shorter drafts cost as much)."""
    step = recorded(rollouts)
    step = RecordedStep(
        step=1,
        seconds={},
        lengths=step.lengths,
        prompts=step.prompts,
        rounds=step.rounds,
        drafted={k: 1.0},
    )
    return rollout_seconds(step, profile, method, slots=max(len(rollouts), 1), group=GROUP, prompt=float(CELL_PROMPT))


def measure_cell(machine: Machine, profile: Profile, batch: int, k: int, method: str, pairs: int) -> dict[str, Any]:
    """Pairs of [probe, run, plain run, probe] of one cell."""
    rng = np.random.default_rng(batch * 100 + k)
    out = []
    for _ in range(pairs):
        lengths = rng.integers(24, 57, batch).tolist()
        before = machine.probe()
        seconds, rollouts, _ = machine.run(method, k, lengths, CELL_PROMPT)
        pair = {
            "probe_before": before,
            "measured": {"rollout": seconds},
            "predicted": {"rollout": predict(profile, rollouts, method, k)},
        }
        if k:
            plain, plain_rollouts, _ = machine.run(method, 0, lengths, CELL_PROMPT)
            pair |= {"plain_measured": plain, "plain_predicted": predict(profile, plain_rollouts, "none", 0)}
        out.append({**pair, "probe_after": machine.probe()})
    return {"name": f"batch {batch}, k {k}, {method if k else 'plain'}", "pairs": out}


def main() -> None:
    """Calibrate, measure, write OUT/profile.json and OUT/cells.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="batch 4, k 0 and 3 only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(slots=8 if arguments.quick else max(ROWS))
    machine.probe()
    grid, batches, drafts = ((1, 2, 8), (4,), (3,)) if arguments.quick else (ROWS, CELL_BATCHES, DRAFTS)
    profile = calibrate(machine, grid, drafts)
    (arguments.out / "profile.json").write_text(profile.model_dump_json(indent=1))
    cells = [(batch, 0, "none") for batch in batches]
    cells += [(batch, k, method) for batch in batches for k in drafts for method in METHODS]
    with (arguments.out / "cells.jsonl").open("w") as file:
        for batch, k, method in cells:
            row = measure_cell(machine, profile, batch, k, method, arguments.pairs)
            file.write(json.dumps(row) + "\n")
            file.flush()
            ratios = [p["predicted"]["rollout"] / p["measured"]["rollout"] for p in row["pairs"]]
            print(row["name"], "predicted / measured, unscaled:", np.round(ratios, 2).tolist(), flush=True)


if __name__ == "__main__":
    main()
