"""How often a drafter is accepted, on a few fresh rollouts of its policy."""

from __future__ import annotations

from pathlib import Path

from leadout.build.draft_parts import build_parts
from leadout.build.draft_plan import DraftPlan, draft_settings
from leadout.build.draft_training import LENGTH
from leadout.build.drafter import head_method
from leadout.build.process import prepare_process
from leadout.config import Dataset
from leadout.models.head_io import is_head
from leadout.models.loading import resolve
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import make_requests
from leadout.records import Score
from leadout.train.cotrain import DraftTrainer

_NEXT_TO_NOTHING = 0.02


def measure_head(
    folder: str,
    model: str,
    name: str,
    dataset: Dataset,
    *,
    num_rollouts: int,
    max_completion_length: int,
    temperature: float,
) -> dict[str, str]:
    """Expected acceptance and speedup, in words; names what to look at where nothing is accepted.

    Raises:
        ModelError: not a drafter, or not one of this policy.

    """
    prepare_process(0)
    plan = DraftPlan(
        model=model,
        data={name: dataset},
        batch=num_rollouts,
        max_completion_length=max_completion_length,
        temperature=temperature,
        init=Path(folder),
        method=head_method(folder) if is_head(Path(folder)) else "small_model",
    )
    parts = build_parts(plan, resolve(model), None)
    prompts = [parts.prompts[i % len(parts.prompts)] for i in range(num_rollouts)]
    rollouts = generate(parts.generator, make_requests(prompts, parts.params, 1))
    groups = group_by_draw(rollouts, [Score(reward=0.0, parts={}, text="")] * len(rollouts))
    trainer = DraftTrainer(parts.student, draft_settings(plan), temperature=temperature, seed=0)
    figures = trainer.evaluate(groups, parts.forward)
    rates = [figures[f"draft/expected_acceptance_rate_pos_{i + 1}"] for i in range(plan.num_drafts)]
    row = {
        "acceptance": f"length {figures[LENGTH]:.3f}, by position {' '.join(f'{rate:.3f}' for rate in rates)}",
        "speedup": ", ".join(f"{figures[LENGTH] / c.round_cost:.2f}x at batch {c.rows}" for c in parts.costs),
    }
    if rates[0] < _NEXT_TO_NOTHING:
        row["warning"] = (
            "next to nothing is accepted: trained on other layers, with another vocabulary map, or for another policy; "
            "or not trained at all"
        )
    return row
