"""Runs that watch their own rollouts: whatever way rollouts end, a correct run goes on."""

import json

import pytest

from leadout.metrics import read_rows
from tests.build.tiny_runs import model_folder, recipe, train

CONTEXT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.mark.parametrize(
    ("changes", "finish"),
    [
        ({}, "length"),
        ({"rollout__stop": ["a", "e", "\n", "1"]}, "stop"),
        ({"rollout__max_completion_length": 60}, "context"),
    ],
    ids=["length", "stop strings", "context"],
)
def test_an_audited_run_of_a_correct_engine_goes_on(tmp_path, model, changes, finish):
    path = recipe(tmp_path, model, audit__every=1, audit__tokens=10_000, pipeline__max_steps=2, **changes)
    folder, _ = train(path)
    rows = read_rows(folder / "metrics.jsonl")
    assert all(row["audit/tokens"] > 30 and row["audit/log_e"] < 4.0 for row in rows)
    finished = [json.loads(line)["finish"] for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert finish in finished
