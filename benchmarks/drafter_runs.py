"""Training runs of the comparison of drafters: the policy tuned to the task, and frozen against online drafters."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.drafter_bench import Bench
from benchmarks.drafter_cells import MIDDLE_LENGTH, Cell
from benchmarks.drafter_store import Online, Tuned
from leadout.build.run import train
from leadout.config import RunConfig
from leadout.errors import ConfigError
from leadout.metrics import read_rows
from leadout.models.cut_layers import copy_tokenizer
from leadout.models.loading import resolve


def measure_policy(bench: Bench, cell: Cell) -> Tuned:
    """The given policy, or one trained here for some updates."""
    options, out = bench.options, bench.store.out / "policy"
    raw = resolve(options.model)
    if options.tuned is not None:
        _copy_policy(options.tuned, raw, out)
        return Tuned(folder=out.absolute(), updates=None)
    rows = _run(bench, "tuned", {"speculative_config": None}, {}, options.policy_updates)
    checkpoint = bench.store.out / "runs" / "tuned" / "checkpoints" / f"step_{options.policy_updates:06d}"
    _copy_policy(checkpoint / "learner" / "policy", raw, out)
    _drop_checkpoints(bench, "tuned")
    tenth = max(1, len(rows) // 10)

    def ends(name: str) -> tuple[float, float] | None:
        values = [float(row[name]) for row in rows if name in row]
        return (statistics.fmean(values[:tenth]), statistics.fmean(values[-tenth:])) if values else None

    return Tuned(
        folder=out.absolute(), updates=options.policy_updates, rewards=ends("reward"), entropies=ends("entropy")
    )


def _drop_checkpoints(bench: Bench, name: str) -> None:
    """Weights and moments of a finished run: gigabytes that nothing reads again."""
    shutil.rmtree(bench.store.out / "runs" / name / "checkpoints", ignore_errors=True)


def _copy_policy(source: Path, raw: Path, out: Path) -> None:
    """The policy with a tokenizer, which checkpoints leave out."""
    if not (source / "config.json").is_file():
        raise ConfigError(f"--tuned: expected the folder of a model, got {source}, which has no config.json")
    temporary = out.with_name(f".{out.name}.tmp")
    for old in (temporary, out):
        shutil.rmtree(old, ignore_errors=True)
    temporary.mkdir(parents=True)
    copy_tokenizer(raw, temporary)
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    temporary.replace(out)


def measure_online(bench: Bench, cell: Cell) -> Online:
    """A run from the head with k = 3, learning along or as it is."""
    assert cell.drafter is not None, "a drafter is measured"
    speculation = {
        "method": cell.drafter.method,
        "model": bench.folder(cell.drafter),
        "num_speculative_tokens": MIDDLE_LENGTH,
    }
    draft = {"enabled": cell.online}
    rows = _run(bench, cell.name, {"speculative_config": speculation}, draft, bench.options.updates)
    _drop_checkpoints(bench, cell.name)
    found = [row.get("spec/acceptance_length") for row in rows]
    return Online(lengths=tuple(None if value is None else float(value) for value in found))


def _run(bench: Bench, name: str, rollout: dict[str, Any], draft: dict[str, Any], updates: int) -> list[dict[str, Any]]:
    """The metrics of a training run on arithmetic, begun or gone on with."""
    options, folder = bench.options, bench.store.out / "runs" / name
    config = RunConfig.model_validate(
        {
            "name": name,
            "output_dir": str(folder.parent),
            "model": options.model,
            "data": {"train": {"task": "arithmetic"}},
            "rollout": {
                "num_prompts": options.step_prompts,
                "num_generations": options.generations,
                "max_completion_length": options.step_tokens,
                "dtype": options.dtype,
                **rollout,
            },
            "draft": draft,
            "optim": {"learning_rate": options.learning_rate},
            "train": {"dtype": options.dtype},
            "pipeline": {"max_steps": updates},
            "checkpoint": {"every": 20, "keep": 1},
            "log": {"benchmark": False, "rollouts": False},
            "threads": options.threads,
        }
    )
    begun = (folder / "config.yaml").is_file()
    train(config, resume=folder if begun else None, console=bench.console)
    return [dict(row) for row in read_rows(folder / "metrics.jsonl")]
