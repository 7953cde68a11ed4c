"""A bench from its options: the policy loaded once, our contenders and the peers, cell after cell."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from leadout.bench.contender import Contender, Tell, interleave
from leadout.bench.native import NativeContender
from leadout.bench.peers.contender import PeerContender, PeerPlan, check_peers, start_peer
from leadout.bench.results import AGAIN, AUTO, PLAIN, Cell, summarise
from leadout.bench.set_acceptance import SetAcceptance
from leadout.bench.workload import LONG_TAIL_ROWS, LONG_TAIL_SIBLINGS, Workload, long_tail, long_tail_lengths
from leadout.build.bench_machine import BenchMachine, DrafterChoice, check_draft
from leadout.config import BenchMethod, LeadoutSpeculation
from leadout.draft_length.controller import FixedLength, GoodputLength
from leadout.errors import ConfigError
from leadout.models.aliases import cache_folder
from leadout.models.kv import KVSlots

_SETTLED_ROUNDS, _MOST_WARM_UPS = 300, 8
"""`auto` starts out not knowing this machine or its drafter, and probes rarely; in training it goes on from step to
step, so it is measured after about as many rounds as it needs to settle.
"""

Length = int | Literal["auto"]
Show = Callable[[Cell], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure."""

    model: str = "smollm2-135m"
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    lengths: tuple[Length, ...] = (0, 1, 3, 5, "auto")
    """k of our contenders; plain is always among them."""
    method: BenchMethod = "eagle3"
    draft: str | None = None
    set_acceptance: float | None = None
    """Keep each draft with this probability, whatever the policy says; None is the exact rule."""
    context: int = 64
    """Tokens of each prompt."""
    new_tokens: int = 64
    repeats: int = 5
    workload: Literal["fixed", "longtail"] = "fixed"
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    threads: int | None = None
    """None takes every core."""
    against: tuple[str, ...] = ()
    """Peers, of `leadout.bench.peers.contender.PEERS`."""
    vllm_python: Path | None = None
    """Interpreter of an environment with vLLM; None is the one in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything measured."""

    options: BenchOptions
    machine: dict[str, object]
    peers: dict[str, dict[str, object]]
    """Version, and the processor time of each while it was stopped."""
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        python = self.options.vllm_python
        return {
            "options": asdict(self.options) | {"vllm_python": None if python is None else str(python)},
            "machine": self.machine,
            "peers": self.peers,
            "cells": [cell.to_json() for cell in self.cells],
        }


def bench(options: BenchOptions, *, tell: Tell, show: Show) -> BenchReport:
    """Measure every cell; `show` gets each as soon as it is there."""
    check_draft(options.method, options.draft)
    check_peers(options.against, peer_python(options))
    if options.workload == "longtail" and "hf" in options.against:
        raise ConfigError("--against hf: model.generate has one length for all rows; use --workload fixed")
    machine = BenchMachine(options.model, max_len=longest_row(options), dtype=options.dtype, threads=options.threads)
    choice = drafter_choice(options)
    machine.check_room(choice, rows=_most_rows(options), max_len=longest_row(options), width=_widest(options))
    cells = []
    with TemporaryDirectory(prefix="leadout-bench-") as logs, ExitStack() as running:
        peers = start_peers(options, machine, Path(logs), running, tell)
        for workload in workloads(options, machine):
            cell = measure(machine, choice, workload, options.lengths, options.repeats, tell=tell, peers=peers)
            show(cell)
            cells.append(cell)
        told = {peer.name: describe_peer(peer) for peer in peers}
    return BenchReport(options=options, machine=describe(machine), peers=told, cells=tuple(cells))


def peer_python(options: BenchOptions) -> Path:
    """The interpreter with vLLM."""
    return options.vllm_python or cache_folder() / "vllm" / "bin" / "python"


def start_peers(
    options: BenchOptions, machine: BenchMachine, logs: Path, running: ExitStack, tell: Tell
) -> list[PeerContender]:
    """Start and load the peers asked for; `running` ends them."""
    rows = _most_rows(options)
    longest = longest_row(options)
    plan = PeerPlan(
        model=machine.path,
        max_len=longest,
        max_rows=rows,
        # Peers keep their caches in blocks, so every row may need a part of one more.
        kv_bytes=rows * KVSlots.bytes_per_slot(machine.spec, longest + 128, torch.bfloat16),
        threads=machine.threads,
        vllm_python=peer_python(options),
    )
    peers = []
    for name in options.against:
        tell(f"starting {name}")
        peer = start_peer(name, plan, log=logs / f"{name}.log")
        running.enter_context(peer.process)
        peers.append(peer)
    return peers


def describe_peer(peer: PeerContender) -> dict[str, object]:
    """Its version, and the proof that it took no processor time out of its turn."""
    peer.process.resume()
    idle = peer.process.idle
    peer.process.pause()
    return {"version": peer.version, "idle_seconds": idle.seconds, "idle_cpu_seconds": idle.cpu_seconds}


def _most_rows(options: BenchOptions) -> int:
    """Of any cell."""
    return LONG_TAIL_ROWS if options.workload == "longtail" else max(options.batch_sizes)


def _widest(options: BenchOptions) -> int:
    """Tokens of a row that one pass may verify."""
    if options.method == "none":
        return 1
    most = LeadoutSpeculation().max_draft_length
    return 1 + max((most if length == AUTO else int(length) for length in options.lengths), default=0)


def longest_row(options: BenchOptions) -> int:
    """Tokens of the longest row of any cell."""
    new = max(long_tail_lengths()) if options.workload == "longtail" else options.new_tokens
    return options.context + new


def drafter_choice(options: BenchOptions) -> DrafterChoice:
    """Drafter and rule."""
    choice = DrafterChoice(method=options.method, draft=options.draft)
    if options.set_acceptance is None:
        return choice
    if options.method == "none":
        raise ConfigError("--set-acceptance needs a drafter, got --method none; leave one of them out")
    return replace(choice, rule=SetAcceptance(options.set_acceptance))


def workloads(options: BenchOptions, machine: BenchMachine) -> Iterator[Workload]:
    """The cells asked for."""
    if options.workload == "longtail":
        yield long_tail(machine.prompts(LONG_TAIL_ROWS // LONG_TAIL_SIBLINGS, options.context))
        return
    for rows in options.batch_sizes:
        prompts = machine.prompts(rows, options.context)
        yield Workload(name=f"batch {rows}", prompts=prompts, lengths=(options.new_tokens,) * rows)


def own_contenders(
    machine: BenchMachine,
    choice: DrafterChoice,
    workload: Workload,
    lengths: Sequence[Length],
    *,
    plain_again: bool = False,
) -> list[NativeContender]:
    """Plain first, then the k asked for; all share one generator, so one cache and one copy of the weights.

    `plain_again`: plain once more at the end.
    """
    generator = machine.generator(choice, rows=workload.rows, max_len=workload.longest)
    plain = FixedLength(0)
    contenders = [NativeContender(PLAIN, generator, plain, drafts=False)]
    if choice.method == "none":
        return contenders
    for length in dict.fromkeys(lengths):
        if length == AUTO:
            rule = GoodputLength(LeadoutSpeculation().max_draft_length)
            warm_ups = min(math.ceil(_SETTLED_ROUNDS / max(workload.lengths)), _MOST_WARM_UPS)
            contenders.append(NativeContender(AUTO, generator, rule, drafts=True, warm_ups=warm_ups))
        elif length:
            assert isinstance(length, int)
            contenders.append(NativeContender(f"k={length}", generator, FixedLength(length), drafts=True))
    if plain_again:
        contenders.append(NativeContender(AGAIN, generator, plain, drafts=False))
    return contenders


def measure(
    machine: BenchMachine,
    choice: DrafterChoice,
    workload: Workload,
    lengths: Sequence[Length],
    repeats: int,
    *,
    tell: Tell,
    peers: Sequence[Contender] = (),
    plain_again: bool = False,
) -> Cell:
    """One cell: our contenders and the peers, in turn; `plain_again` tells the scatter of the cell's ratios."""
    ours = own_contenders(machine, choice, workload, lengths, plain_again=plain_again)
    samples = interleave([*ours, *peers], workload, repeats, tell)
    return summarise(workload, samples, fixed=[each.name for each in ours if each.name not in (AUTO, AGAIN)])


def describe(machine: BenchMachine) -> dict[str, object]:
    """What was measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": machine.threads,
        "torch": torch.__version__,
        "native_kernels": machine.decoder.is_native,
        "load_average": os.getloadavg()[0],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 (not a file on disk)
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
