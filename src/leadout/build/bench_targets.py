"""`leadout bench --targets`: the cells of `leadout.bench.targets.TargetPlan`, one after another, and their checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from leadout.bench.bare import BareContender, BareParts, StreamContender, bytes_per_second
from leadout.bench.contender import Contender, Sample, Tell, interleave
from leadout.bench.native import NativeContender
from leadout.bench.peers.contender import PEERS, PeerContender, missing_vllm
from leadout.bench.results import AGAIN, AUTO, PLAIN, Cell, speedup, summarise
from leadout.bench.set_acceptance import SetAcceptance, rate_for
from leadout.bench.statistics import Ratio, ratio_of_medians
from leadout.bench.targets import (
    LONG_TAIL,
    OF_BEST_FIXED,
    OVER_BOUND,
    OVER_PREDICTED,
    ROUND_COST,
    SPEEDUP,
    Check,
    TargetPlan,
    TargetReport,
    at_least,
    at_most,
    only_measured,
    peer_limit,
    stream_share,
    tie_or_better,
)
from leadout.bench.workload import LONG_TAIL_ROWS, LONG_TAIL_SIBLINGS, Workload, long_tail, long_tail_lengths
from leadout.build.bench import (
    BenchOptions,
    Length,
    Show,
    describe,
    describe_peer,
    measure,
    own_contenders,
    peer_python,
    start_peers,
)
from leadout.build.bench_machine import BenchMachine, DrafterChoice, check_draft
from leadout.draft_length.controller import FixedLength
from leadout.errors import LeadoutError
from leadout.models.kv import KVSlots


@dataclass(slots=True, kw_only=True)
class _Session:
    """What the sections share, and what they find."""

    machine: BenchMachine
    plan: TargetPlan
    draft: str | None
    tell: Tell
    show: Show
    cells: list[Cell] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def keep(self, cell: Cell, checks: list[Check]) -> None:
        """A measured cell and what it says."""
        self.cells.append(cell)
        self.checks += checks
        self.show(cell)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times a section."""
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def workload(self, name: str, rows: int, tokens: int) -> Workload:
        """Rows of one length."""
        prompts = self.machine.prompts(rows, self.plan.context)
        return Workload(name=name, prompts=prompts, lengths=(tokens,) * rows)

    def choice(self, kind: str) -> DrafterChoice:
        """good, bad or ngram."""
        if kind == "ngram":
            return DrafterChoice(method="ngram")
        if kind == "bad":
            return DrafterChoice(method="eagle3")
        rate = rate_for(self.plan.acceptance_length, self.plan.num_drafts)
        return DrafterChoice(method="eagle3", draft=self.draft, rule=SetAcceptance(rate))


def measure_targets(options: BenchOptions, plan: TargetPlan, *, tell: Tell, show: Show) -> TargetReport:
    """Everything. Peers that cannot be had are left out with a note; of the options only model, draft, threads, dtype
    and the interpreter with vLLM count.
    """
    check_draft("eagle3", options.draft)
    longest = max(
        plan.context + max(plan.peer_tokens, plan.round_tokens, *long_tail_lengths()),
        max(plan.contexts) + plan.context_tokens,
    )
    machine = BenchMachine(options.model, max_len=longest, dtype=options.dtype, threads=options.threads)
    session = _Session(machine=machine, plan=plan, draft=options.draft, tell=tell, show=show)
    peers: dict[str, dict[str, object]] = {}
    if "peers" in plan.sections:
        with session.section("peers"), TemporaryDirectory(prefix="leadout-bench-") as logs, ExitStack() as running:
            contenders = _peers(session, options, Path(logs), running)
            _against_peers(session, contenders)
            peers = {peer.name: describe_peer(peer) for peer in contenders}
    own = {"rounds": _round_costs, "auto": _auto, "tail": _long_tail, "context": _contexts}
    for name, measured in own.items():
        if name in plan.sections:
            with session.section(name):
                measured(session)
    return TargetReport(
        machine=describe(machine),
        peers=peers,
        checks=tuple(session.checks),
        notes=tuple(session.notes),
        section_seconds=session.seconds,
        cells=tuple(session.cells),
    )


def _peers(session: _Session, options: BenchOptions, logs: Path, running: ExitStack) -> list[PeerContender]:
    """Those that can be had."""
    plan, contenders = session.plan, []
    sized = replace(options, batch_sizes=plan.peer_batches, context=plan.context, new_tokens=plan.peer_tokens)
    for name in PEERS:
        python = peer_python(options)
        if name == "vllm" and not python.is_file():
            session.notes.append(f"skipped: {missing_vllm(python)}")
            continue
        try:
            contenders += start_peers(replace(sized, against=(name,)), session.machine, logs, running, session.tell)
        except LeadoutError as error:
            session.notes.append(f"skipped: {error}")
    return contenders


def _against_peers(session: _Session, peers: list[PeerContender]) -> None:
    plan = session.plan
    for rows in plan.peer_batches:
        workload = session.workload(f"peers, batch {rows}", rows, plan.peer_tokens)
        ours = own_contenders(session.machine, DrafterChoice(method="none"), workload, ())
        here = [peer for peer in peers if peer.name != "hf" or rows in plan.hf_batches]
        samples = interleave([*ours, *here], workload, plan.peer_repeats, session.tell)
        checks = [_peer_check(peer.name, rows, speedup(samples[PLAIN], samples[peer.name])) for peer in here]
        session.keep(summarise(workload, samples), checks)


def _peer_check(peer: str, rows: int, ratio: Ratio) -> Check:
    name, limit = f"batch {rows}: plain / {peer}", peer_limit(peer, rows)
    return only_measured(name, ratio, "") if limit is None else at_least(name, ratio, limit)


def _round_costs(session: _Session) -> None:
    machine, plan = session.machine, session.plan
    k = plan.num_drafts
    for rows in plan.round_batches:
        workload = session.workload(
            f"rounds, batch {rows}, length {plan.acceptance_length} set", rows, plan.round_tokens
        )
        middle = plan.context + plan.round_tokens // 2
        bare = BareParts(machine.decoder, machine.head(session.draft), rows=rows, context=middle, width=k + 1)
        contenders: list[Contender] = [
            *own_contenders(machine, session.choice("good"), workload, (k,)),
            BareContender("bare step", [(bare.forward(1), 1)]),
            BareContender("bare round", [(bare.forward(k + 1), 1), (bare.draft(), k)]),
            StreamContender("reading"),
        ]
        samples = interleave(contenders, workload, plan.round_repeats, session.tell)
        bandwidth = bytes_per_second(samples.pop("reading"))
        cell = summarise(workload, samples, apart=("bare step", "bare round"))
        session.keep(cell, _round_checks(session, rows, cell, samples, bandwidth))


def _round_checks(
    session: _Session, rows: int, cell: Cell, samples: dict[str, list[Sample]], bandwidth: float
) -> list[Check]:
    plan = session.plan
    line, step = cell.line(f"k={plan.num_drafts}"), cell.line(PLAIN).round_seconds
    assert line.round_cost is not None and line.against_plain is not None and step is not None
    bound = ratio_of_medians(
        [sample.seconds for sample in samples["bare round"]], [sample.seconds for sample in samples["bare step"]]
    )
    name, best = f"batch {rows}", plan.acceptance_length / bound.value
    checks = [only_measured(f"{name}: bound of the round cost", bound, "")]
    if rows == 1:
        checks.append(at_most(f"{name}: round cost, k={plan.num_drafts}", line.round_cost, ROUND_COST))
        checks.append(stream_share(session.machine.weight_bytes, bandwidth, step))
        checks.append(at_least(f"{name}: speedup at length {plan.acceptance_length}", line.against_plain, SPEEDUP))
        return checks
    limit = OVER_BOUND * bound.value
    why = f" ({OVER_BOUND} x bound)"
    checks.append(at_most(f"{name}: round cost, k={plan.num_drafts}", line.round_cost, limit, why))
    speed = f"{name}: speedup at length {plan.acceptance_length}"
    if rows <= 4:
        checks.append(at_least(speed, line.against_plain, best, " (length / bound)"))
    else:
        checks.append(only_measured(speed, line.against_plain, f"length / bound is {best:.2f}"))
    return checks


def _auto(session: _Session) -> None:
    plan = session.plan
    for kind, rows, tokens, pairs in plan.auto_cells:
        groups = -(-rows // plan.auto_siblings)
        prompts = session.machine.prompts(groups, plan.context)
        prompts = tuple(prompts[row // plan.auto_siblings] for row in range(rows))
        workload = Workload(name=f"auto, {kind} drafter, batch {rows}", prompts=prompts, lengths=(tokens,) * rows)
        lengths: list[Length] = [*plan.auto_fixed, AUTO] if kind == "good" else [AUTO]
        cell = measure(
            session.machine,
            session.choice(kind),
            workload,
            lengths,
            pairs,
            tell=session.tell,
            plain_again=True,
        )
        against_plain, best = cell.line(AUTO).against_plain, cell.auto_against_best
        assert against_plain is not None
        checks = [tie_or_better(f"{kind}, batch {rows}: auto / plain", against_plain)]
        if best is not None:
            checks.append(at_least(f"{kind}, batch {rows}: auto / best fixed ({best.best})", best.ratio, OF_BEST_FIXED))
        noise = cell.line(AGAIN).against_plain
        assert noise is not None
        checks.append(
            only_measured(f"{kind}, batch {rows}: plain again / plain", noise, "equal: the scatter of this cell")
        )
        session.keep(cell, checks)


def _long_tail(session: _Session) -> None:
    prompts = session.machine.prompts(LONG_TAIL_ROWS // LONG_TAIL_SIBLINGS, session.plan.context)
    workload = replace(long_tail(prompts), name="long tail, good drafter")
    choice = session.choice("good")
    cell = measure(session.machine, choice, workload, [AUTO], session.plan.tail_pairs, tell=session.tell)
    ratio = cell.line(AUTO).against_plain
    assert ratio is not None
    session.keep(cell, [at_least("long tail, 64 rows: auto / plain", ratio, LONG_TAIL)])


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A contender that always generates its own workload."""

    name: str
    inner: NativeContender
    workload: Workload
    warm_ups: int = 1

    def run(self, workload: Workload, repeat: int) -> Sample:
        return self.inner.run(self.workload, repeat)


def _contexts(session: _Session) -> None:
    """Plain steps after short and long prompts; the rows share a prompt, so that one prefill serves all."""
    machine, plan = session.machine, session.plan
    rows = plan.context_rows
    contenders: list[_Fixed] = []
    for length in plan.contexts:
        prompts = machine.prompts(1, length) * rows
        workload = Workload(name=f"context {length}", prompts=prompts, lengths=(plan.context_tokens,) * rows)
        generator = machine.generator(DrafterChoice(method="none"), rows=rows, max_len=workload.longest)
        inner = NativeContender(PLAIN, generator, FixedLength(0), drafts=False)
        contenders.append(_Fixed(f"context {length}", inner, workload))
    longest = replace(contenders[-1].workload, name=f"contexts, batch {rows}")
    samples = interleave([*contenders, StreamContender("reading")], longest, plan.context_repeats, session.tell)
    bandwidth = bytes_per_second(samples.pop("reading"))
    short, long = ([sample.round_seconds or sample.seconds for sample in each] for each in samples.values())
    ratio = ratio_of_medians(long, short)
    short_bytes, long_bytes = (
        KVSlots.bytes_per_slot(machine.spec, length, machine.decoder.dtype) for length in plan.contexts
    )
    # Attention at these sizes waits for keys and values: its products are twice as fast as the reading.
    seconds = rows * (long_bytes - short_bytes) / bandwidth
    predicted = 1.0 + seconds / float(np.median(short))
    name = f"batch {rows}: step at context {plan.contexts[1]} / {plan.contexts[0]}"
    why = f" ({OVER_PREDICTED} x {predicted:.2f}, from the bytes at {bandwidth / 1e9:.1f} GB/s)"
    session.keep(summarise(longest, samples), [at_most(name, ratio, OVER_PREDICTED * predicted, why)])
