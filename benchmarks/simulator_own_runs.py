"""Measure paired cells on this machine, for the simulator to be held against.

Usage: ``python benchmarks/simulator_own_runs.py OUT --profile FILE [--small-model DIR] [--eagle3 DIR] [--pairs 5]``,
then ``leadout simulate --run OUT --profile FILE --validate``. FILE comes from ``leadout bench --calibrate FILE --method
ngram,small_model,eagle3 --draft small_model=DIR --batch-sizes 1,2,8,32,96``. Without DIR the small model is cut from
layers 0, 1 and 29 of the policy, and the head is untrained: seconds do not depend on weights, and acceptance is in the
log.

Cells: batch 1, 4, 16, 64 x k 0, 1, 3, 5 x drafters (k = 0 once), prompts of 88 to 104 tokens that up to eight rows
share, lengths that differ by row: no shape of the calibration. A pair is [probe, run, plain run, probe], where a probe
serves the pair after it too; the cells of a batch come in turn, and every pair of a cell repeats the same work. Only
the rollout stage is run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from leadout.bench.native import NativeContender
from leadout.bench.workload import Workload
from leadout.build.bench_calibrate import Probe
from leadout.build.bench_machine import BenchMachine, DrafterChoice
from leadout.draft_length.controller import FixedLength
from leadout.models.cut_layers import write_cut_model
from leadout.models.loading import resolve
from leadout.records import Rollout, Stage
from leadout.sim.profile import Profile, load_profile
from leadout.sim.replay import PAIRS, validated

LONGEST = {1: 56, 4: 48, 16: 40, 64: 28}
"""New tokens of the longest row, by batch; the shortest has half as many."""
DRAFTS = (1, 3, 5)
GROUPS = {1: 1, 4: 2, 16: 4, 64: 8}
"""Rows that share a prompt, by batch."""
PROMPTS = (96, 88, 104)
"""Tokens of the prompts, in turn."""
LAYERS = (0, 1, 29)
ROLLOUT = Stage.ROLLOUT.value


@dataclass(slots=True, kw_only=True)
class Cell:
    """One shape and what was measured of it."""

    method: str
    k: int
    workload: Workload
    run: NativeContender
    plain: NativeContender | None
    """None where the cell itself is plain."""
    log: dict[str, Any] = field(default_factory=dict)
    plain_log: dict[str, Any] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, before: float, probe: Probe) -> float:
        """Add a pair; the probe after it."""
        rollouts, seconds = self.run.timed_rollouts(self.workload, 0)
        pair: dict[str, Any] = {"probe_before": before, "measured": {ROLLOUT: seconds}}
        self.log = of_log(rollouts)
        if self.plain is not None:
            rollouts, pair["plain_measured"] = self.plain.timed_rollouts(self.workload, 0)
            self.plain_log = of_log(rollouts)
        pair["probe_after"] = probe.seconds()
        self.pairs.append(pair)
        return float(pair["probe_after"])

    def row(self) -> dict[str, Any]:
        """As `leadout.sim.replay.read_cells` takes it."""
        rows = self.workload.rows
        return {
            "name": f"batch {rows}, k {self.k}, {self.method}" if self.k else f"batch {rows}, plain",
            "method": self.method,
            "k": self.k,
            "slots": rows,
            "group": GROUPS[rows],
            "prompts": [len(prompt.token_ids) for prompt in self.workload.prompts],
            "run": self.log,
            **({"plain": self.plain_log} if self.plain is not None else {}),
            "pairs": self.pairs,
        }


def of_log(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What a log of these rollouts would say."""
    drafted = Counter(k for rollout in rollouts for k in rollout.rounds.drafted.tolist())
    total = drafted.total()
    return {
        "lengths": [rollout.length for rollout in rollouts],
        "rounds": [len(rollout.rounds.drafted) for rollout in rollouts],
        "drafted": {str(k): count / total for k, count in sorted(drafted.items())},
    }


def make_workload(machine: BenchMachine, rows: int) -> Workload:
    """Rows of one batch; the first is as long as any, the others between half of that and all."""
    longest = LONGEST[rows]
    lengths = np.random.default_rng(rows).integers(longest // 2, longest + 1, rows)
    lengths[0] = longest
    count = rows // GROUPS[rows]
    prompts = [machine.prompts(count, PROMPTS[i % len(PROMPTS)])[i] for i in range(count)]
    return Workload(
        name=f"batch {rows}",
        prompts=tuple(prompts[row // GROUPS[rows]] for row in range(rows)),
        lengths=tuple(int(length) for length in lengths),
    )


def make_cells(machine: BenchMachine, choices: Sequence[DrafterChoice], rows: int) -> Iterator[Cell]:
    """Plain, then every drafter at every k; each generator has run once when its cells come."""
    workload = make_workload(machine, rows)
    for index, choice in enumerate(choices):
        generator = machine.generator(choice, rows=rows, max_len=workload.longest)
        plain = NativeContender("plain", generator, FixedLength(0), drafts=False)
        short = Workload(name="warm-up", prompts=workload.prompts, lengths=(4,) * rows)
        if not index:
            plain.run(short, 0)
            yield Cell(method="none", k=0, workload=workload, run=plain, plain=None)
        for k in DRAFTS:
            run = NativeContender(f"k={k}", generator, FixedLength(k), drafts=True)
            run.run(short, 0)
            yield Cell(method=choice.method, k=k, workload=workload, run=run, plain=plain)


def measure_batch(
    machine: BenchMachine, choices: Sequence[DrafterChoice], rows: int, pairs: int, profile: Profile
) -> list[dict[str, Any]]:
    """All cells of a batch, in turn."""
    began, probe = time.perf_counter(), Probe(machine)
    cells = list(make_cells(machine, choices, rows))
    for pair in range(pairs):
        before = probe.seconds()
        for cell in cells:
            before = cell.measure(before, probe)
        print(f"batch {rows}: pair {pair + 1} of {pairs}, {time.perf_counter() - began:.0f} s", flush=True)
    measured = [cell.row() for cell in cells]
    for row in measured:
        found = validated(row, profile)
        factor = float(np.exp(found.stage_errors[Stage.ROLLOUT]))
        speedup = "" if found.speedup_error is None else f", speedup {1 + found.speedup_error:.2f}"
        print(f"  {found.name}: predicted / measured {factor:.2f}{speedup}", flush=True)
    return measured


def main() -> None:
    """Measure and write OUT/cells.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--small-model", help="folder of a small model with the policy's tokenizer")
    parser.add_argument("--eagle3", help="folder of a trained head")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="of the small model, where none is given")
    parser.add_argument(
        "--batches", default=",".join(map(str, LONGEST)), help=f"some of {', '.join(map(str, LONGEST))}"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = BenchMachine(
        arguments.model,
        max_len=max(PROMPTS) + max(LONGEST.values()),
        dtype=arguments.dtype,
        threads=arguments.threads,
    )
    with TemporaryDirectory(prefix="leadout-own-runs-") as folder:
        small = arguments.small_model
        if small is None:
            small = str(Path(folder) / "small")
            write_cut_model(
                resolve(arguments.model), [int(layer) for layer in arguments.layers.split(",")], Path(small)
            )
        choices = (
            DrafterChoice(method="ngram"),
            DrafterChoice(method="small_model", draft=small),
            DrafterChoice(method="eagle3", draft=arguments.eagle3),
        )
        rows: list[dict[str, Any]] = []
        for batch in map(int, arguments.batches.split(",")):
            rows += measure_batch(machine, choices, batch, arguments.pairs, profile)
            temporary = arguments.out / "cells.jsonl.tmp"
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            temporary.replace(arguments.out / "cells.jsonl")


if __name__ == "__main__":
    main()
