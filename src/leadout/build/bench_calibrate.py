"""`leadout bench --calibrate`: this machine's rounds, prefill and learner, as a profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leadout.bench.bare import BareParts, seconds_in_turn
from leadout.bench.calibration import (
    MEASURED_DRAFTS,
    RoundTimes,
    Shape,
    draft_curve,
    fit_line,
    forward_curve,
    round_grids,
)
from leadout.bench.contender import Tell
from leadout.bench.limits import product_flops, read_bandwidth
from leadout.bench.native import NativeContender
from leadout.bench.set_acceptance import SetAcceptance
from leadout.bench.workload import Workload
from leadout.build.bench import BenchOptions, describe
from leadout.build.bench_learner import learner_times
from leadout.build.bench_machine import BenchMachine, DrafterChoice, check_draft
from leadout.draft_length.controller import FixedLength
from leadout.errors import ConfigError
from leadout.models.loading import read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.sim.profile import Limits, Linear, PartTime, Profile

ROUNDS = 9
"""Timed rounds of one run, the first left out."""
PASSES = 2
"""Times that every shape comes up, in turn."""
FAR = 320
"""Tokens of the longer prompts."""
ROOM = ROUNDS + 2 * (max(MEASURED_DRAFTS) + 1)
"""New tokens that any run may need."""
_PART_REPEATS = 7


def calibrate(options: BenchOptions, *, tell: Tell) -> Profile:
    """Measure, with rows as in `batch_sizes` and prompts of `context` and of 320 tokens, less in a short context.

    Raises ConfigError when the model's context does not hold two lengths.
    """
    check_draft(options.method, options.draft)
    near, far = options.context, _far(options)
    machine = BenchMachine(options.model, max_len=far + ROOM, dtype=options.dtype, threads=options.threads)
    choice = DrafterChoice(method=options.method, draft=options.draft, rule=SetAcceptance(0.0))
    times: dict[Shape, RoundTimes] = {}
    probes: list[float] = []
    for turn in range(PASSES + 1):
        for rows in sorted(options.batch_sizes):
            tell(f"rounds of {rows} rows, {'warming up' if not turn else f'{turn} of {PASSES}'}")
            found = _rounds(machine, choice, rows, (near, far), turn)
            if turn:  # the first turn warms up
                for shape, each in found.items():
                    whole = times.setdefault(shape, RoundTimes())
                    whole.whole += each.whole
                    whole.draft += each.draft
                    whole.verify += each.verify
        probes.append(_probe(machine, near))
    tell("prefill")
    prefill = _prefill(machine, (near, far))
    tell("parts of a round")
    parts = _parts(machine, choice, options.batch_sizes, near, times)
    tell("learner")
    learner = learner_times(machine, options)
    return Profile(
        machine=f"{describe(machine)['processor']}, {machine.threads} threads",
        model=options.model,
        probe_s=float(np.median(probes)),
        rounds=round_grids(options.method, times),
        prefill=prefill,
        refit=learner.refit,
        logprob=learner.logprob,
        train=learner.train,
        parts=tuple(parts),
        limits=Limits(read_bytes_per_s=read_bandwidth(), product_flops=product_flops()),
        forward=forward_curve(times),
        draft=draft_curve(times),
    )


def _far(options: BenchOptions) -> int:
    """Tokens of the longer prompts."""
    context = DecoderSpec.from_config(read_config(resolve(options.model))).max_position_embeddings
    far = min(max(FAR, 2 * options.context), context - ROOM)
    if far <= options.context:
        raise ConfigError(
            f"--context: expected fewer than {context - ROOM} tokens, so that longer prompts fit the model's context "
            f"of {context} too, got {options.context}"
        )
    return far


def _rounds(
    machine: BenchMachine, choice: DrafterChoice, rows: int, prompts: Sequence[int], turn: int
) -> dict[Shape, RoundTimes]:
    """One run of every k and context; rows share a prompt, and no draft is kept, so that all rounds are alike."""
    found: dict[Shape, RoundTimes] = {}
    for length in prompts:
        prompt = machine.prompts(1, length)[0]
        generator = machine.generator(choice, rows=rows, max_len=length + ROOM)
        for k in MEASURED_DRAFTS if choice.method != "none" else (0,):
            # The last k rounds draft less, since fewer tokens remain; the first ROUNDS are alike.
            workload = Workload(name="rounds", prompts=(prompt,) * rows, lengths=(ROUNDS + 1 + k,) * rows)
            contender = NativeContender("rounds", generator, FixedLength(k), drafts=k > 0)
            timer, _ = contender.timed_rounds(workload, turn)
            del timer.rounds[ROUNDS:]
            each = found[k, rows, length + ROUNDS // 2] = RoundTimes()
            each.add(timer, rows)
    return found


def _probe(machine: BenchMachine, context: int) -> float:
    """One fixed plain run: the machine's pace."""
    rows = 8
    workload = Workload(name="probe", prompts=machine.prompts(rows, min(context, 16)), lengths=(16,) * rows)
    generator = machine.generator(DrafterChoice(method="none"), rows=rows, max_len=workload.longest)
    return NativeContender("probe", generator, FixedLength(0), drafts=False).run(workload, 0).seconds


def _prefill(machine: BenchMachine, lengths: Sequence[int]) -> Linear:
    """Runs that end with their first token."""
    tokens, seconds = [], []
    for repeat in range(3):
        for length in lengths:
            for groups in (1, 4):
                workload = Workload(name="prefill", prompts=machine.prompts(groups, length), lengths=(1,) * groups)
                generator = machine.generator(DrafterChoice(method="none"), rows=groups, max_len=workload.longest)
                contender = NativeContender("prefill", generator, FixedLength(0), drafts=False)
                measured = contender.run(workload, repeat).seconds
                if repeat:
                    tokens.append(float(groups * length))
                    seconds.append(measured)
    return fit_line(tokens, seconds)


def _parts(
    machine: BenchMachine,
    choice: DrafterChoice,
    batch_sizes: Sequence[int],
    context: int,
    times: dict[Shape, RoundTimes],
) -> list[PartTime]:
    """Forward passes of one and four tokens a row, sampler, draft, and what is left of a plain step for the host."""
    head = machine.head(choice.draft) if choice.method == "eagle3" else None
    found = []
    for rows in sorted(batch_sizes):
        bare = BareParts(machine.decoder, head, rows=rows, context=context, width=4)
        parts = {"forward": bare.forward(1), "forward 4": bare.forward(4), "sampler": bare.sampler()}
        if head is not None:
            parts["draft"] = bare.draft()
        seconds = seconds_in_turn(parts, _PART_REPEATS)
        plain = min((shape for shape in times if shape[:2] == (0, rows)), key=lambda shape: shape[2])
        rest = float(np.median(times[plain].whole)) - seconds["forward"] - seconds["sampler"]
        seconds["host"] = max(rest, 0.0)
        found += [
            PartTime(
                name=name.partition(" ")[0],
                rows=rows,
                tokens_per_row=4 if name == "forward 4" else 1,
                context=float(context),
                seconds=value,
            )
            for name, value in seconds.items()
        ]
    return found
