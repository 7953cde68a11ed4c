"""How fast the simulator is: one scenario with ranges, and a sweep over draft length, acceptance, rows and length.

Usage: ``python benchmarks/simulator_speed.py [POINTS] [PROCESSES]`` (10,000 points on 2 processes by default).
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from leadout.sim.project import project
from leadout.sim.scenario import Scenario, parse
from leadout.sim.sections import Acceptance, Speculation
from leadout.sim.setup import Workbench
from leadout.sim.simulate import simulate

BASE: dict[str, object] = {
    "model": "Qwen3-8B",
    "gpu": "H100",
    "gpus": 8,
    "workload": {"num_prompts": 64, "num_generations": 8, "lengths": {"mean": 4000, "cap": 8192}},
    "speculation": {"num_speculative_tokens": 3},
    "draws": 1,
}


def point(rng: np.random.Generator, base: Scenario) -> Scenario:
    """A random point of the sweep."""
    section = Speculation(
        num_speculative_tokens=int(rng.integers(0, 8)), acceptance=Acceptance(rate=float(rng.uniform(0.3, 0.95)))
    )
    lengths = base.workload.lengths.model_copy(update={"mean": float(rng.uniform(500, 6000))})
    workload = base.workload.model_copy(update={"num_prompts": int(rng.integers(8, 129)), "lengths": lengths})
    return base.model_copy(update={"speculation": section, "workload": workload})


def sweep(seed: int, points: int) -> float:
    """Project `points` random scenarios; the mean step, so that nothing is skipped."""
    rng, bench, base = np.random.default_rng(seed), Workbench(), parse(BASE)
    return float(np.mean([project(point(rng, base), bench).step_s for _ in range(points)]))


def main() -> None:
    """Print both times."""
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    begin = time.perf_counter()
    simulate(parse(BASE))
    print(f"one scenario with its plain twin and ranges: {time.perf_counter() - begin:.2f} s")
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        means = list(pool.map(sweep, range(processes), [points // processes] * processes))
    seconds = time.perf_counter() - begin
    print(
        f"{points} points on {processes} processes: {seconds:.1f} s, {points / seconds:.0f} a second "
        f"({np.mean(means):.1f} s a step in the mean)"
    )


if __name__ == "__main__":
    main()
