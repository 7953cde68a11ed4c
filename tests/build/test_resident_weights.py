"""What serves after a run of several steps: the learner's weights, and nothing of earlier ones."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from leadout.build.generator import make_decoder, make_generator
from leadout.build.run import RunParts, build_run
from leadout.drafters.combined import CombinedDrafter
from leadout.metrics import read_rows
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.recipe import load_recipe
from leadout.records import SamplingParams
from leadout.text import TextCodec
from tests.build.tiny_runs import STEPS, recipe, train


def after_a_run(path) -> RunParts:
    """The objects of a run that has done its steps, its generator put to sleep, woken and given the newest weights."""
    parts = build_run(load_recipe(path), resume=None, console=Console(file=io.StringIO(), width=120))
    parts.run.train()
    parts.generator.set_awake(False)
    parts.generator.set_awake(True)
    report = parts.generator.refit(parts.run.pipeline.learner.publish())
    assert (report.version, report.draft_version) == (STEPS, STEPS)
    return parts


@pytest.mark.parametrize("method", ["eagle3", "history+eagle3"])
def test_after_sleep_and_refit_drafter_and_policy_are_the_learners(tmp_path, model, method):
    speculation = {"method": method, "num_speculative_tokens": 2}
    path = recipe(tmp_path, model, rollout__speculative_config=speculation, rollout__dtype="float64")
    parts = after_a_run(path)
    generator, learner = parts.generator, parts.run.pipeline.learner
    drafter = generator._parts.drafter
    resident = (drafter.model if isinstance(drafter, CombinedDrafter) else drafter)._head.state_dict()
    learnt = learner.drafter.student.module.state_dict()
    assert resident.keys() == learnt.keys()
    for name, tensor in learnt.items():
        expected = tensor.double() if tensor.is_floating_point() else tensor
        assert torch.equal(resident[name], expected), name
    started = load_file(parts.run.folder.path / "draft_start" / "model.safetensors")
    assert not torch.equal(resident["fc.weight"], started["fc.weight"].double())

    held = generator._parts.decoder
    decoder = make_decoder(
        held.spec,
        learner.forward.model.state_dict(),
        dtype="float64",
        max_len=held.max_len,
        device=held.device,
    )
    section = load_recipe(path).rollout.model_copy(update={"speculative_config": None})
    fresh = make_generator(decoder, TextCodec.from_pretrained(model), section, num_rows=6)
    prompts = parts.run.pipeline.source.take(3)
    requests = make_requests(prompts, SamplingParams(max_new_tokens=10, temperature=0.0), 2)
    used, new = generate(generator, requests), generate(fresh, requests)
    assert [r.token_ids.tolist() for r in used] == [r.token_ids.tolist() for r in new]
    assert sum(int(rollout.rounds.drafted.sum()) for rollout in used) > 0


METHODS = [None, "history", "history+eagle3"]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_same_prompts_every_step_are_answered_by_the_newest_weights_alone(tmp_path, model, method):
    speculation = None if method is None else {"method": method, "num_speculative_tokens": 2}
    changes = {
        "rollout__speculative_config": speculation,
        "rollout__dtype": "float64",
        "data__train": {"task": "arithmetic", "num_rows": 2},
        "optim__learning_rate": 0.1,
    }
    folder, _ = train(recipe(tmp_path, model, **changes))
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) == STEPS
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in rows)
    assert (sum(row.get("spec/num_draft_tokens", 0) for row in rows) > 0) == (method is not None)
    newest = load_file(folder / "checkpoints" / f"step_{STEPS:06d}" / "learner" / "policy" / "model.safetensors")
    first = load_file(model / "model.safetensors")
    assert float((newest["model.norm.weight"] - first["model.norm.weight"]).abs().max()) > 0.1
