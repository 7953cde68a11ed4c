"""`leadout bench --calibrate`: this machine's rounds by drafter, prefill and learner, as a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from leadout.bench.bare import BareParts, seconds_in_turn
from leadout.bench.calibration import (
    MEASURED_DRAFTS,
    RoundTimes,
    Shape,
    drafter_times,
    fit_line,
    pass_curve,
    round_grids,
)
from leadout.bench.contender import Tell
from leadout.bench.limits import product_flops, read_bandwidth
from leadout.bench.native import NativeContender
from leadout.bench.set_acceptance import SetAcceptance
from leadout.bench.workload import Workload, make_prompt
from leadout.build.bench import BenchOptions, describe
from leadout.build.bench_learner import learner_times
from leadout.build.bench_machine import BenchMachine, DrafterChoice, check_draft
from leadout.config import BenchMethod
from leadout.draft_length.controller import FixedLength
from leadout.errors import ConfigError
from leadout.models.loading import read_spec, resolve
from leadout.records import Prompt
from leadout.sim.profile import Limits, Linear, PartTime, Profile, RoundGrid

ROUNDS = 9
"""Timed rounds of one run, the first left out."""
_FEWER_ROUNDS, _MANY_ROWS = 5, 64
"""As many are enough beyond so many rows, whose rounds are long and alike."""
PASSES, _FEWER_PASSES, _SOME_ROWS = 4, 2, 8
"""Times that shapes come up, in turn; fewer beyond so many rows, where rounds are longer than the machine's whims."""
FAR = 320
"""Tokens of the longer prompts."""
ROOM = ROUNDS + 2 * (max(MEASURED_DRAFTS) + 1)
"""New tokens that any run may need."""
_PROBE_RUNS = 3
_PART_REPEATS = 7
_AT_ONCE = 3
"""Positions that a parallel head is timed at."""
_PLAIN: BenchMethod = "none"

Times = dict[BenchMethod, dict[Shape, RoundTimes]]
"""By drafter; plain rounds under none."""


class Probe:
    """One fixed plain run: the machine's pace."""

    def __init__(self, machine: BenchMachine) -> None:
        rows = 8
        self._workload = Workload(name="probe", prompts=machine.prompts(rows, 16), lengths=(16,) * rows)
        generator = machine.generator(DrafterChoice(method=_PLAIN), rows=rows, max_len=self._workload.longest)
        self._contender = NativeContender("probe", generator, FixedLength(0), drafts=False)
        self.seconds()

    def seconds(self) -> float:
        """Median of a few runs."""
        return float(np.median([self._contender.run(self._workload, 0).seconds for _ in range(_PROBE_RUNS)]))


def calibrate(
    options: BenchOptions, *, tell: Tell, drafters: Mapping[BenchMethod, str | None] | None = None, passes: int = PASSES
) -> Profile:
    """Measure, with rows as in `batch_sizes` and prompts of `context` and of 320 tokens, less in a short context.

    `drafters`: methods, each with its folder where it has one; the method of the options if not given. The learner is
    timed with the first that is a draft head learning along. `passes`: turns over the shapes. Raises ConfigError when
    the model's context does not hold two lengths, and for a look-up with a model, whose rounds are of either kind.
    """
    drafters = {options.method: options.draft} if drafters is None else drafters
    for method, draft in drafters.items():
        if "+" in method:
            each = ",".join(method.split("+"))
            raise ConfigError(f"--method {method}: expected drafters by themselves in a profile, such as {each}")
        check_draft(method, draft)
    prompts = options.context, _far(options)
    machine = BenchMachine(options.model, max_len=prompts[1] + ROOM, dtype=options.dtype, threads=options.threads)
    choices = [
        DrafterChoice(method=method, draft=draft, rule=SetAcceptance(0.0), full=True)
        for method, draft in drafters.items()
        if method != _PLAIN
    ]
    probe = Probe(machine)
    probes = [probe.seconds()]
    times: Times = {}
    for turn in range(passes):
        for rows in sorted(options.batch_sizes):
            turns = min(passes, _FEWER_PASSES) if rows > _SOME_ROWS else passes
            if turn >= turns:
                continue
            tell(f"rounds of {rows} rows, {turn + 1} of {turns}")
            _join(times, _rounds(machine, choices, rows, prompts, turn))
            probes.append(probe.seconds())
    tell("prefill")
    prefill = _prefill(machine, prompts)
    tell("parts of a round")
    parts = _parts(machine, choices, options.batch_sizes, options.context, times[_PLAIN])
    tell("learner")
    learner = learner_times(machine, options, next((choice for choice in choices if choice.head is not None), None))
    return Profile(
        machine=f"{describe(machine)['processor']}, {machine.threads} threads",
        model=options.model,
        probe_s=float(np.median(probes)),
        rounds=_grids(times),
        prefill=prefill,
        refit=learner.refit,
        logprob=learner.logprob,
        train=learner.train,
        parts=tuple(parts),
        limits=Limits(read_bytes_per_s=read_bandwidth(), product_flops=product_flops()),
        forward=pass_curve(times[_PLAIN], drafts=False),
        drafters={choice.method: drafter_times(times[choice.method]) for choice in choices},
    )


def _far(options: BenchOptions) -> int:
    """Tokens of the longer prompts."""
    context = read_spec(resolve(options.model)).max_position_embeddings
    far = min(max(FAR, 2 * options.context), context - ROOM)
    if far <= options.context:
        raise ConfigError(
            f"--context: expected fewer than {context - ROOM} tokens, so that longer prompts fit the model's context "
            f"of {context} too, got {options.context}"
        )
    return far


def _join(times: Times, found: Times) -> None:
    for method, shapes in found.items():
        for shape, each in shapes.items():
            known = times.setdefault(method, {})
            if shape in known:
                known[shape].join(each)
            else:
                known[shape] = each


def _grids(times: Times) -> tuple[RoundGrid, ...]:
    """Plain rounds once, then every drafter's; the line between k = 0 and 1 is never needed."""
    grids = list(round_grids(_PLAIN, times[_PLAIN]))
    for method, shapes in times.items():
        if method != _PLAIN:
            grids += [grid for grid in round_grids(method, {**times[_PLAIN], **shapes}) if grid.k]
    return tuple(grids)


def _rounds(
    machine: BenchMachine, choices: Sequence[DrafterChoice], rows: int, prompts: Sequence[int], turn: int
) -> Times:
    """A run of every drafter, k and context; no draft is kept, so that all rounds are alike.

    A short run warms a generator up; in the first turn one before every k does.
    """
    found: Times = {}
    count = ROUNDS if rows <= _MANY_ROWS else _FEWER_ROUNDS
    for length in prompts:
        row_prompts = _row_prompts(machine, rows, length)
        for choice in choices or [DrafterChoice(method=_PLAIN)]:
            generator, is_new = machine.generator(choice, rows=rows, max_len=length + ROOM), True
            for k in MEASURED_DRAFTS if choice.method != _PLAIN else (0,):
                # Plain rounds belong to no drafter.
                if not k and choices and choice is not choices[0]:
                    continue
                contender = NativeContender("rounds", generator, FixedLength(k), drafts=k > 0)
                if not turn or is_new:
                    contender.timed_rounds(_workload(row_prompts, 2 + k), 0)
                is_new = False
                # The last k rounds draft less, since fewer tokens remain; the first `count` are alike.
                timer, _ = contender.timed_rounds(_workload(row_prompts, count + 1 + k), turn)
                del timer.rounds[count:]
                read = [len(prompt.token_ids) for prompt in row_prompts[:2]]
                each = RoundTimes(prompts=len(read), prompt_tokens=sum(read))
                each.add(timer, rows)
                found.setdefault(choice.method if k else _PLAIN, {})[k, rows, length + ROUNDS // 2] = each
    return found


def _row_prompts(machine: BenchMachine, rows: int, length: int) -> tuple[Prompt, ...]:
    """One prompt for all rows but the first, whose own is a token longer: rows of a run are never all equally long."""
    (longer,) = machine.prompts(1, length + 1)
    prompt = make_prompt(longer.token_ids[1:].tolist(), 1)
    return (prompt,) if rows == 1 else (longer, *(prompt,) * (rows - 1))


def _workload(prompts: tuple[Prompt, ...], length: int) -> Workload:
    return Workload(name="rounds", prompts=prompts, lengths=(length,) * len(prompts))


def _prefill(machine: BenchMachine, lengths: Sequence[int]) -> Linear:
    """Runs that end with their first token."""
    tokens, prompts, seconds = [], [], []
    for repeat in range(3):
        for length in lengths:
            for groups in (1, 4):
                workload = Workload(name="prefill", prompts=machine.prompts(groups, length), lengths=(1,) * groups)
                generator = machine.generator(DrafterChoice(method=_PLAIN), rows=groups, max_len=workload.longest)
                contender = NativeContender("prefill", generator, FixedLength(0), drafts=False)
                measured = contender.run(workload, repeat).seconds
                if repeat:
                    tokens.append(float(groups * length))
                    prompts.append(float(groups))
                    seconds.append(measured)
    return fit_line(tokens, seconds, prompts)


def _parts(
    machine: BenchMachine,
    choices: Sequence[DrafterChoice],
    batch_sizes: Sequence[int],
    context: int,
    plain_times: Mapping[Shape, RoundTimes],
) -> list[PartTime]:
    """Forward passes of one and four tokens a row, sampler, draft heads, and what is left of a plain step for the host.

    Look-ups have no pass; a small model's passes are timed in its rounds only.
    """
    found = []
    for rows in sorted(batch_sizes):
        bare = BareParts(machine.decoder, None, rows=rows, context=context, width=4)
        parts = {"forward": bare.forward(1), "forward 4": bare.forward(4), "sampler": bare.sampler()}
        for choice in choices:
            if choice.head is not None:
                head = machine.head(choice.draft, choice.head)
                own = BareParts(machine.decoder, head, rows=rows, context=context, width=4)
                parts[f"draft {choice.method}"] = own.parallel_draft(_AT_ONCE) if head.parallel else own.draft()
        seconds = seconds_in_turn(parts, _PART_REPEATS)
        shape = min((shape for shape in plain_times if shape[1] == rows), key=lambda shape: shape[2])
        rest = float(np.median(plain_times[shape].whole)) - seconds["forward"] - seconds["sampler"]
        seconds["host"] = max(rest, 0.0)
        for name, value in seconds.items():
            part, _, rest_of_name = name.partition(" ")
            width = {"forward 4": 4, "draft parallel": _AT_ONCE}.get(name, 1)
            found.append(
                PartTime(
                    name=part,
                    rows=rows,
                    tokens_per_row=width,
                    context=float(context),
                    seconds=value,
                    method=rest_of_name if part == "draft" else "",
                )
            )
    return found
