"""Calibrated machines the tests share, written as profiles."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from leadout.sim.scenario import Scenario
from tests.sim.scenarios import small


def write_profile(folder: Path, rounds: Iterable[tuple[str, int]]) -> Path:
    """A machine whose rounds of (method, k) take (10 ms + 1 ms a row) (1 + k / 4), and whose training takes 1 s."""
    grids = [
        {
            "method": method,
            "k": k,
            "rows": [1, 16],
            "contexts": [0.0, 1000.0],
            "seconds": [[(1 + k / 4) * (0.01 + 0.001 * b)] * 2 for b in (1, 16)],
        }
        for method, k in rounds
    ]
    path = folder / "profile.json"
    path.write_text(json.dumps({"machine": "toy", "rounds": grids, "train": {"fixed_s": 1.0}}))
    return path


def calibrated(folder: Path, *overrides: str, ks: Iterable[int] = (1, 3, 5), plain: bool = True) -> Scenario:
    """Eight short rollouts on such a machine, EAGLE-3 measured at `ks`."""
    path = write_profile(folder, [*([("none", 0)] if plain else []), *(("eagle3", k) for k in ks)])
    words = ("gpus=1", f"profile={path}", "workload.num_prompts=2", "workload.num_generations=4")
    lengths = "workload.lengths={mean: 60, cv: 0.5, cap: 128}"
    return small(*words, lengths, "workload.prompt_length=10", *overrides)
