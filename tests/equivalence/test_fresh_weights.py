"""On fresh weights the learner finds a ratio of one: both sides mean the same log-probability.

At any temperature it is that of softmax(logits / T). Under filters it stays the full softmax at T on both sides, not
the law the token was drawn from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby

import numpy as np
import pytest
import torch

from leadout.metrics import read_rows
from leadout.records import Group, Rollout, Score
from leadout.train.learner import UpdateSettings
from leadout.train.loss import LossSettings
from tests.build.tiny_runs import model_folder, recipe, train
from tests.equivalence.tiny_engines import (
    drafted,
    eagle3_drafter,
    eagle3_head,
    engine,
    generate,
    ngram_drafter,
    ragged_requests,
)
from tests.models.tiny import policy
from tests.train.learner_fakes import make_learner

TEMPERATURE = 0.6
LAWS = [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}]


def make_drafter(name, llama, fused):
    drafters = {
        "none": lambda: None,
        "ngram": lambda: ngram_drafter(16),
        "eagle3": lambda: eagle3_drafter(eagle3_head(llama), fused, 16),
    }
    return drafters[name]()


def grouped(rollouts: Mapping[object, Rollout]) -> list[Group]:
    groups = []
    for _, run in groupby(rollouts.values(), key=lambda rollout: rollout.prompt.id):
        siblings = tuple(run)
        scores = tuple(Score(reward=float(i % 2), parts={}, text="") for i in range(len(siblings)))
        groups.append(Group(prompt=siblings[0].prompt, rollouts=siblings, scores=scores))
    return groups


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("name", ["none", "ngram", "eagle3"])
def test_the_learner_finds_a_ratio_of_one_on_the_rollouts_of_its_own_weights(llama, fused, name, law):
    k = 0 if name == "none" else 3
    requests = ragged_requests(4, 4, temperature=TEMPERATURE, seed=1, **law)
    rollouts = generate(engine(fused, make_drafter(name, llama, fused), k), requests)
    assert (drafted(rollouts) > 0) == (k > 0)
    groups = grouped(rollouts)
    update = UpdateSettings(recompute="always")
    learner = make_learner(llama, update=update, temperature=TEMPERATURE, is_policy_law=not law)
    logprobs = learner.logprobs(groups)
    assert logprobs is not None
    ordered = [rollout for group in groups for rollout in group.rollouts]
    for values_T, rollout in zip(logprobs.values, ordered, strict=True):
        np.testing.assert_allclose(np.exp(values_T - rollout.policy_logprobs), 1.0, rtol=0, atol=1e-9)
    # Under a filter the law drawn from is another one: what it left out is shared among the rest.
    gaps = np.concatenate([rollout.logprobs - rollout.policy_logprobs for rollout in ordered])
    assert gaps.min() > -1e-12
    assert (gaps.max() > 0.01) == bool(law)


def test_the_first_importance_ratios_of_a_fresh_policy_are_one_at_a_temperature_of_0_6(fused):
    groups = grouped(generate(engine(fused, ngram_drafter(16), 3), ragged_requests(3, 4, temperature=TEMPERATURE)))
    loss = LossSettings(importance_clip_max=2.0, max_completion_length=24)
    metrics = (
        make_learner(policy("llama", torch.float64), loss=loss, temperature=TEMPERATURE).step(groups, None).metrics
    )
    for name in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(1.0, abs=1e-9)
    wrong = make_learner(policy("llama", torch.float64), loss=loss, temperature=1.0).step(groups, None).metrics
    assert abs(wrong["sampling/importance_sampling_ratio/min"] - 1.0) > 0.1


@pytest.mark.parametrize(
    ("filters", "warned"),
    [({}, False), ({"rollout__top_p": 0.9}, True), ({"rollout__top_k": 20}, True)],
    ids=["no filter", "top-p", "top-k"],
)
def test_a_run_keeps_to_the_full_softmax_at_its_temperature_and_warns_of_filters(tmp_path, caplog, filters, warned):
    model = model_folder(tmp_path / "model")
    changes = {"rollout__temperature": TEMPERATURE, "rollout__dtype": "float64", "pipeline__max_steps": 1, **filters}
    with caplog.at_level(logging.WARNING):
        folder, _ = train(recipe(tmp_path, model, **changes))
    (row,) = read_rows(folder / "metrics.jsonl")
    assert row["spec/num_draft_tokens"] > 0
    assert abs(row["mismatch_kl"]) < 1e-6
    assert row["sampling/sampling_logp_difference/max"] < 1e-3
    warnings = [record.getMessage() for record in caplog.records if "gradient is biased" in record.getMessage()]
    assert len(warnings) == int(warned)
