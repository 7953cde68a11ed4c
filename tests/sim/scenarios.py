"""Scenarios the tests share, small enough to project in milliseconds."""

from __future__ import annotations

from typing import Any

from leadout.sim.scenario import Scenario, apply_overrides, parse


def small(*overrides: str, **sections: Any) -> Scenario:
    """Qwen3-8B on 8 H100, 128 rollouts; `a.b=c` words and whole sections change it."""
    data: dict[str, object] = {
        "model": "Qwen3-8B",
        "gpu": "H100",
        "gpus": 8,
        "workload": {"num_prompts": 16, "num_generations": 8, "lengths": {"mean": 1500, "cv": 0.8, "cap": 4096}},
        "draws": 1,
    }
    return parse(apply_overrides({**data, **sections}, list(overrides)))


def asynchronous(lag: int, *overrides: str, method: str = "in_flight") -> Scenario:
    """The same on 6 generating and 2 training GPUs."""
    words = (
        "generation.gpus=6",
        "pipeline.mode=async",
        f"pipeline.max_staleness={lag}",
        f"refit.method={method}",
        *overrides,
    )
    return small(*words)
