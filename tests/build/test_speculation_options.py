"""Every method drafts from the command line, and every option of a drafter changes what it drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from leadout.metrics import read_rows
from leadout.models.cut_layers import write_cut_model
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.records import Prompt, Request, Rollout, SamplingParams
from leadout.rollout.engine import METHODS
from tests.build.test_drafters import engine
from tests.build.tiny_runs import model_folder, recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model_folder(path / "policy")
    write_cut_model(path / "policy", [0, 3], path / "small")
    return path


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_and_drafts_from_the_command_line(tmp_path, folder, leadout_run, method):
    speculation = {"method": method, "num_speculative_tokens": 2}
    if method.endswith("small_model"):
        speculation["model"] = str(folder / "small")
    path = recipe(
        tmp_path,
        folder / "policy",
        rollout__speculative_config=speculation,
        draft__vocab_size=128 if method.endswith(("eagle3", "parallel")) else None,
        pipeline__max_steps=1,
    )
    code, out, err = leadout_run("train", path)
    assert code == 0, err
    assert "Next: leadout report" in out
    (row,) = read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert row["spec/num_draft_tokens"] > 0


def requests(siblings: int = 4, first_draw: int = 0, **params: object) -> list[Request]:
    """Several answers, with their drafts, to each of four short prompts."""
    texts = [b"abcabdb", b"xyzzyxy", b"121312", b"mnmnopmn"]
    prompts = [
        Prompt(id=str(i), token_ids=np.frombuffer(t, np.uint8).astype(np.int32), text="") for i, t in enumerate(texts)
    ]
    sampling = SamplingParams(**{"max_new_tokens": 24, "temperature": 0.5, "trace": True, **params})
    return make_requests(prompts, sampling, siblings, first_draw)


def sums(rollouts: list[Rollout]) -> tuple[int, int]:
    """Drafted and accepted in all."""
    return tuple(sum(int(getattr(r.rounds, n).sum()) for r in rollouts) for n in ("drafted", "accepted"))


def looked_up(context: list[int], longest: int) -> int | None:
    """What follows the latest earlier occurrence of the longest suffix of at most `longest` tokens."""
    for size in range(longest, 0, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                return context[end]
    return None


def ambiguous_prompt(number: int) -> list[int]:
    """One token followed by each of some others, and the others once more by themselves: two tokens say more than one.

    Example, with three others: 9 1 9 2 9 3 | 3 2 1 | 9. After it 2 is followed by 9 or by 1.
    """
    lead, *others = np.random.default_rng(number).permutation(256)[:21].tolist()
    return [token for other in others for token in (lead, other)] + others[::-1] + [lead]


def test_a_longer_lookup_follows_the_longer_match(folder):
    prompts = [Prompt(id=str(i), token_ids=np.array(ambiguous_prompt(i), np.int32), text="") for i in range(24)]
    asked = make_requests(prompts, SamplingParams(max_new_tokens=3, temperature=1.5, trace=True), 8)
    drafts: dict[int, dict[tuple[int, int], int]] = {}
    for longest in (1, 3):
        generator = engine(folder, method="ngram", num_speculative_tokens=1, prompt_lookup_max=longest)
        drafts[longest] = {}
        for index, rollout in enumerate(generate(generator, asked)):
            text = [*rollout.prompt.token_ids.tolist(), *rollout.token_ids.tolist()]
            for position, draft in zip(rollout.trace.position_D.tolist(), rollout.trace.draft_D.tolist(), strict=True):
                assert draft == looked_up(text[: len(rollout.prompt.token_ids) + position], longest)
                drafts[longest][index, position] = draft
    shared = drafts[1].keys() & drafts[3].keys()
    assert sum(drafts[1][key] != drafts[3][key] for key in shared) > 5


def test_auto_drafts_up_to_the_longest_draft_it_is_allowed(folder, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"forward": {"1": 1.0, "64": 1.01}, "draft": {"1": 1e-4}}))
    longest = []
    for bound in (1, 3, 6):
        options = {"max_draft_length": bound, "cost_profile": str(profile)}
        generator = engine(folder, method="small_model", model=str(folder / "policy"), leadout=options)
        rollouts = generate(generator, requests())
        longest.append(max(int(rollout.rounds.drafted.max()) for rollout in rollouts))
    assert longest == [1, 3, 6]


def test_the_draft_temperature_flattens_and_sharpens_q(folder):
    laws, shares = {}, {}
    for temperature in (0.5, 1.0, 3.0):
        generator = engine(
            folder,
            method="small_model",
            model=str(folder / "policy"),
            num_speculative_tokens=2,
            leadout={"draft_temperature": temperature},
        )
        rollouts = generate(generator, requests())
        laws[temperature] = np.stack([rollout.trace.probs_DV[0] for rollout in rollouts if rollout.length > 1])
        drafted, accepted = sums(rollouts)
        shares[temperature] = accepted / drafted
    for temperature in (0.5, 3.0):
        q_NV = laws[1.0] ** (1.0 / temperature)
        np.testing.assert_allclose(laws[temperature], q_NV / q_NV.sum(-1, keepdims=True), rtol=0, atol=1e-9)
    assert shares[1.0] == 1.0
    assert 0.0 < shares[0.5] < 0.95 and 0.0 < shares[3.0] < 0.95


def test_more_kept_rollouts_of_a_prompt_give_more_drafts(folder):
    found = {}
    for kept in (1, 32):
        generator = engine(
            folder,
            method="history",
            num_speculative_tokens=3,
            prompt_lookup_min=2,
            leadout={"history_rollouts": kept},
        )
        generate(generator, requests(temperature=0.2))
        held = generator.state_dict()["history"]["prompts"]
        assert [len(rollouts) for _, rollouts in held] == [min(kept, 4)] * 4
        found[kept] = sums(generate(generator, requests(first_draw=4, temperature=0.2, seed=9)))
    assert found[32][0] > found[1][0]
    assert found[32][1] > found[1][1]
