"""How fast a drafter learns in a run, by what it starts from and by what the recipe says."""

from __future__ import annotations

import pytest

from leadout.metrics import read_rows
from tests.build.tiny_runs import model_folder, recipe, train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "policy")


def test_a_head_that_was_trained_before_takes_fewer_and_smaller_steps_than_a_new_one(tmp_path, model):
    unset = {"draft__learning_rate": None, "draft__micro_rollouts": None, "pipeline__max_steps": 2}
    new, _ = train(recipe(tmp_path, model, name="new", **unset))
    head = new / "checkpoints" / "step_000002" / "learner" / "draft"
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    given, _ = train(
        recipe(tmp_path, model, name="given", rollout__speculative_config=speculation, draft__vocab_size=None, **unset)
    )
    rates = [[row["draft/learning_rate"] for row in read_rows(run / "metrics.jsonl")] for run in (new, given)]
    assert rates == [[1e-3, 1e-3], [1e-4, 1e-4]]


def test_the_drafters_learning_rate_falls_over_the_run_where_it_is_told_to(tmp_path, model):
    changes = {
        **{"draft__lr_scheduler_type": "linear", "draft__learning_rate": 1e-3, "draft__warmup_steps": 0},
        **{"draft__micro_rollouts": 3, "draft__token_fraction": 1.0, "pipeline__max_steps": 4},
    }
    folder, _ = train(recipe(tmp_path, model, name="falls", **changes))
    # Two updates a step; a row shows the rate after its updates, never below a twentieth.
    rates = [row["draft/learning_rate"] for row in read_rows(folder / "metrics.jsonl")]
    assert rates == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.05e-3])


def test_the_vocabulary_of_a_new_head_is_not_that_of_a_given_one_and_that_is_said(tmp_path, model, caplog):
    new, _ = train(recipe(tmp_path, model, name="new", pipeline__max_steps=1))
    head = new / "checkpoints" / "step_000001" / "learner" / "draft"
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    changes = {"rollout__speculative_config": speculation, "draft__vocab_size": 64, "pipeline__max_steps": 1}
    train(recipe(tmp_path, model, name="given", **changes))
    assert f"draft.vocab_size: 64 is for a new head, the one in {head} drafts from 128 tokens" in caplog.text
