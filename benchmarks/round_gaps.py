"""Milliseconds of a round inside native calls and between them, where Python and PyTorch work with cold caches.

    python benchmarks/round_gaps.py                                               # plain steps of one row
    python benchmarks/round_gaps.py --rows 64
    python benchmarks/round_gaps.py --rows 1 --drafts 3 --draft drafts/smollm2-135m-eagle3

Medians over the rounds of some generations. Timed by itself in a loop the same Python takes a fraction of this: a step
streams all weights through the caches, and nothing of the interpreter is left in them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import leadout.rollout.engine as engine
from leadout.bench.native import NativeContender
from leadout.bench.workload import Workload
from leadout.build.bench_machine import BenchMachine, DrafterChoice
from leadout.draft_length.controller import FixedLength
from leadout.models.native.fields import SIGNATURES
from leadout.models.native.library import native_library

PROMPT, NEW = 64, 96


@dataclass
class Clock:
    """When native calls began and ended, and when rounds began."""

    calls: list[tuple[str, float, float]] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def timed(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        """The function, noted."""

        def noted(*arguments: object) -> object:
            began = time.perf_counter()
            result = function(*arguments)
            self.calls.append((name, began, time.perf_counter()))
            return result

        return noted

    def clear(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.rounds.clear()


def watch(clock: Clock) -> None:
    """Note every native call and every round from now on."""
    library = native_library()
    if library is None:
        raise SystemExit("the native kernels are needed; the log says why they are off")
    for name in SIGNATURES:
        setattr(library.functions, name, clock.timed(name.removeprefix("lo_"), getattr(library.functions, name)))
    run_round = engine.run_round

    def noted(*arguments: object) -> object:
        clock.rounds.append(time.perf_counter())
        return run_round(*arguments)  # type: ignore[arg-type]

    engine.run_round = noted  # type: ignore[assignment]


def show(clock: Clock, generations: int) -> None:
    """Medians of the rounds of several generations."""
    calls = [call for call in clock.calls if call[1] >= clock.rounds[0]]
    inside, between = defaultdict(list), defaultdict(list)
    for name, began, ended in calls:
        inside[name].append(1e3 * (ended - began))
    for (name, _, ended), (following, began, _) in itertools.pairwise(calls):
        between[f"{name} to {following}"].append(1e3 * (began - ended))
    rounds = len(clock.rounds)
    spans = [1e3 * (b - a) for a, b in itertools.pairwise(clock.rounds)]
    print(f"a round of {generations} generations: {statistics.median(spans):.2f} ms\n")
    for title, parts in (("native call", inside), ("between", between)):
        print(f"| {title} | ms | a round |\n|---|---|---|")
        usual = {name: values for name, values in parts.items() if len(values) > rounds / 2}
        for name, values in usual.items():
            print(f"| {name} | {statistics.median(values):.3f} | {len(values) / rounds:.1f} |")
        print(f"| all of them | {sum(statistics.median(v) * len(v) / rounds for v in usual.values()):.3f} | |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=0, help="drafts a round; 0 is plain decoding")
    parser.add_argument("--draft", help="folder of an EAGLE-3 head; without one an untrained head")
    parser.add_argument("--generations", type=int, default=3)
    options = parser.parse_args()
    clock = Clock()
    watch(clock)
    machine = BenchMachine(options.model, max_len=PROMPT + NEW)
    choice = DrafterChoice(method="eagle3", draft=options.draft) if options.drafts else DrafterChoice(method="none")
    generator = machine.generator(choice, rows=options.rows, max_len=PROMPT + NEW)
    contender = NativeContender("it", generator, FixedLength(options.drafts), drafts=options.drafts > 0)
    workload = Workload(name="fixed", prompts=machine.prompts(options.rows, PROMPT), lengths=(NEW,) * options.rows)
    contender.timed_rounds(workload, 0)
    clock.clear()
    for repeat in range(1, options.generations + 1):
        contender.timed_rounds(workload, repeat)
    show(clock, options.generations)


if __name__ == "__main__":
    main()
