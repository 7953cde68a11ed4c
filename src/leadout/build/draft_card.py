"""The card beside a trained drafter: of which policy, from which recipe, and how often it is accepted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadout.pipeline.folder import write_text

_CHUNK = 1 << 20
_TITLES = {
    "eagle3": "EAGLE-3 draft head",
    "parallel": "Parallel EAGLE-3 draft head",
    "mtp": "Multi-token head",
    "small_model": "Small draft model",
}


def policy_hash(path: Path) -> str:
    """sha256 over the policy's safetensors files, in name order."""
    total = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as reader:
            while piece := reader.read(_CHUNK):
                total.update(piece)
    return total.hexdigest()


def write_card(folder: Path, plan: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """README.md with the plan and the measurements."""
    sets = sorted(
        {name.rsplit("/", 1)[1] for name in figures if name.startswith("draft/expected") and name.count("/") == 2}
    )
    depth = sum(name.startswith("draft/expected_acceptance_rate_pos_") and name.count("/") == 1 for name in figures)
    lines = [
        f"# {_TITLES[plan['method']]}",
        "",
        f"Policy: safetensors sha256 `{plan['policy']}`.",
        f"Trained on {figures['rollouts']:.0f} rollouts (passes counted) at temperature {plan['temperature']}.",
        "",
        f"Expected acceptance on held-out prompts, {depth} drafts a round, sampled:",
        "",
        "| data | length |" + "".join(f" position {i + 1} |" for i in range(depth)),
        "|---|---|" + "---|" * depth,
    ]
    for name in [*sets, ""]:
        suffix = f"/{name}" if name else ""
        rates = [figures[f"draft/expected_acceptance_rate_pos_{i + 1}{suffix}"] for i in range(depth)]
        length = figures[f"draft/expected_acceptance_length{suffix}"]
        lines.append(f"| {name or 'mean'} | {length:.3f} |" + "".join(f" {rate:.3f} |" for rate in rates))
    lines += ["", "Recipe:", "", "```json", json.dumps(dict(plan), indent=2), "```", ""]
    write_text(folder / "README.md", "\n".join(lines))
