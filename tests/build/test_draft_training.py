from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from leadout.build import draft_training
from leadout.build.draft_folder import alone_in
from leadout.build.draft_info import draft_info
from leadout.build.draft_plan import DraftPlan, draft_settings
from leadout.build.draft_training import LENGTH, train_draft
from leadout.build.kept_rollouts import read_rollouts
from leadout.config import Dataset, Draft
from leadout.errors import CheckpointError, ConfigError
from leadout.models.cut_layers import write_cut_model
from leadout.models.eagle3_io import read_eagle3
from leadout.models.loading import load_policy
from tests.build.tiny_runs import model_folder, write_questions

IDS = 100_000
"""More than any vocabulary here has."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> DraftPlan:
    folder = tmp_path_factory.mktemp("policy")
    questions = write_questions(folder / "sums.jsonl")
    return DraftPlan(
        model=str(model_folder(folder / "policy")),
        data={"sums": Dataset(path=questions, prompt_key="question")},
        num_rollouts=40,
        passes=3,
        batch=8,
        num_generations=1,
        measure_every=3,
        held_out=3,
        max_completion_length=12,
        temperature=0.6,
        draft=Draft(vocab_size=128, layer_ids=(1, 2, 3), learning_rate=5e-3, warmup_steps=2),
        dtype="float32",
    )


@pytest.mark.parametrize(
    ("changes", "rate", "rollouts"),
    [
        ({}, 1e-3, 4),
        ({"init": Path("head")}, 1e-4, 8),
        ({"init": Path("cut"), "method": "small_model"}, 1e-3, 4),
        ({"init": Path("head"), "draft": Draft(learning_rate=2e-4, micro_rollouts=2)}, 2e-4, 2),
    ],
)
def test_a_head_to_go_on_from_takes_fewer_and_smaller_steps_unless_told_otherwise(changes, rate, rollouts):
    plan = DraftPlan(model="policy", data={}, num_rollouts=64, passes=1, **changes)
    settings = draft_settings(plan)
    assert (settings.learning_rate, settings.micro_rollouts) == (rate, rollouts)
    assert settings.decay_updates == 64 // rollouts


@pytest.mark.parametrize(("share", "expected"), [(None, 8), (0.0, 0), (0.25, 4), (1.0, 16)])
def test_the_learning_rate_falls_after_half_of_the_updates_unless_told_otherwise(share, expected):
    changes = {} if share is None else {"lr_decay_from": share}
    settings = draft_settings(DraftPlan(model="policy", data={}, num_rollouts=64, passes=1, **changes))
    assert (settings.decay_from, settings.decay_updates) == (expected, 16)


def train(plan: DraftPlan, out: Path) -> tuple[dict[str, float], str]:
    screen = StringIO()
    return train_draft(plan, out, Console(file=screen, width=200)), screen.getvalue()


def last(folder: Path) -> Path:
    """Where training stood: there is one such folder."""
    (found,) = folder.glob("last-*")
    return found


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(plan, tmp_path_factory) -> tuple[Path, dict[str, float], str]:
    out = tmp_path_factory.mktemp("head") / "new"
    best, screen = train(plan, out)
    return out, best, screen


def test_held_out_acceptance_rises_and_the_best_head_is_kept(trained):
    out, best, screen = trained
    rows = rows_of(out)
    lengths = [row[LENGTH] for row in rows]
    assert [row["rollouts"] for row in rows] == [0, 24, 48, 72, 96, 120]
    assert best[LENGTH] == max(lengths) > lengths[0] + 0.02
    assert screen.count("acceptance length") == 6
    assert "expected speedup" in screen
    head = read_eagle3(out)
    assert (head.spec.draft_vocab_size, head.spec.layer_ids) == (128, (1, 2, 3))
    assert head.fc.weight.dtype is torch.bfloat16
    card = (out / "README.md").read_text()
    assert f"{best[LENGTH]:.3f}" in card and "sums" in card


@pytest.mark.parametrize("method", ["parallel", "mtp", "small_model"])
def test_other_drafters_learn_resume_and_fit_their_policy(plan, tmp_path, method, monkeypatch):
    changes = {"method": method, "num_rollouts": 40 if method == "parallel" else 24, "passes": 2}
    if method != "parallel":
        changes["draft"] = Draft(learning_rate=5e-3, warmup_steps=2)
    if method == "small_model":
        write_cut_model(Path(plan.model), [0, 3], tmp_path / "start")
        changes["init"] = tmp_path / "start"
    plan = replace(plan, **changes)
    made, calls = draft_training._Session._learn, []

    def stops_after_four(self, groups):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        made(self, groups)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    best, _ = train(plan, whole)
    lengths = [row[LENGTH] for row in rows_of(whole)]
    assert best[LENGTH] == max(lengths) > lengths[0]
    info = draft_info(str(whole), plan.model)
    assert info["policy"].startswith(("fits", "same tokenizer"))
    assert method in info["kind"].replace(" ", "_")
    assert json.loads((whole / "plan.json").read_text())["method"] == method

    monkeypatch.setattr(draft_training._Session, "_learn", stops_after_four)
    with pytest.raises(KeyboardInterrupt):
        train(plan, broken)
    monkeypatch.undo()
    train(plan, broken)
    one, other = (load_file(last(folder) / "model.safetensors") for folder in (whole, broken))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_head_is_written_in_the_speculators_form(plan, tmp_path):
    plan = replace(plan, num_rollouts=8, passes=1, method="parallel", format="speculators")
    train(plan, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "peagle"
    assert draft_info(str(tmp_path / "head"), plan.model)["embeddings"] == "its own"


def test_rollouts_are_the_policys_own_and_held_out_prompts_are_never_learnt_from(trained, plan):
    out, _, _ = trained
    files = sorted((out / "rollouts").glob("0*.npz"))
    learnt = [group for file in files for group in read_rollouts(file, IDS)]
    held_out = read_rollouts(out / "rollouts" / "held_out-sums.npz", IDS)
    assert (len(learnt), len(held_out)) == (40, 3)
    assert not {g.prompt.token_ids.tobytes() for g in learnt} & {g.prompt.token_ids.tobytes() for g in held_out}
    model = load_policy(Path(plan.model), torch.float32)
    surprise, entropy = [], []
    for group in learnt:
        tokens = np.concatenate([group.prompt.token_ids, group.rollouts[0].token_ids]).astype(np.int64)
        first = len(group.prompt.token_ids)
        with torch.no_grad():
            log_p = (model(torch.from_numpy(tokens)[None]).logits[0, first - 1 : -1] / plan.temperature).log_softmax(-1)
        surprise += (-log_p.gather(-1, torch.from_numpy(tokens[first:])[:, None])).flatten().tolist()
        entropy += (-(log_p.exp() * log_p).sum(-1)).tolist()
    assert np.mean(surprise) == pytest.approx(np.mean(entropy), abs=0.3)


def test_a_question_that_comes_up_again_is_held_out_every_time(plan, tmp_path):
    questions = [f"{n % 20} + 1?" for n in range(120)]
    file = tmp_path / "again.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in questions))
    data = {"again": Dataset(path=file, prompt_key="question", answer_key=None)}
    train(replace(plan, data=data, num_rollouts=104, batch=104, passes=1, held_out=9), tmp_path / "head")
    made, held_out = (
        {
            group.prompt.token_ids.tobytes()
            for group in read_rollouts(tmp_path / "head" / "rollouts" / f"{name}.npz", IDS)
        }
        for name in ("00000", "held_out-again")
    )
    assert (len(made), len(held_out), len(made & held_out)) == (18, 2, 0)


def test_rollouts_of_one_prompt_are_kept_as_siblings(plan, tmp_path):
    plan = replace(plan, num_generations=4, num_rollouts=16, batch=16, passes=2)
    train(plan, tmp_path / "head")
    groups = read_rollouts(tmp_path / "head" / "rollouts" / "00000.npz", IDS)
    assert [len(group.rollouts) for group in groups] == [4, 4, 4, 4]
    assert len({rollout.token_ids.tobytes() for rollout in groups[0].rollouts}) > 1


def test_an_interrupted_training_ends_in_the_same_head(plan, trained, tmp_path, monkeypatch):
    whole, _, _ = trained
    made = draft_training._Session._learn
    calls = []

    def stops_after_eight(self, groups):
        if len(calls) == 8:
            raise KeyboardInterrupt
        calls.append(1)
        made(self, groups)

    monkeypatch.setattr(draft_training._Session, "_learn", stops_after_eight)
    with pytest.raises(KeyboardInterrupt):
        train(plan, tmp_path / "head")
    monkeypatch.undo()
    train(plan, tmp_path / "head")
    one, other = (read_eagle3(last(folder)).state_dict() for folder in (whole, tmp_path / "head"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())

    def figures(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in r.items() if not k.startswith(("seconds", "speedup"))} for r in rows_of(folder)]

    assert figures(whole) == figures(tmp_path / "head")


def test_a_training_killed_while_it_saves_goes_on_from_the_state_before(plan, trained, tmp_path, monkeypatch):
    saved = torch.save
    calls = []

    def killed_at_the_third(state, path):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        saved(state, path)

    monkeypatch.setattr(torch, "save", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        train(plan, tmp_path / "head")
    monkeypatch.undo()
    train(plan, tmp_path / "head")
    one, other = (read_eagle3(last(folder)).state_dict() for folder in (trained[0], tmp_path / "head"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("plan.json", "{", "expected JSON"),
        ("plan.json", "[]", "settings of a training"),
        ("state.pt", "", "whole file"),
        ("state.pt", "text in the place of a state", "whole file"),
    ],
)
def test_a_damaged_file_of_a_training_is_named(plan, trained, tmp_path, file, text, words):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    (out / file).write_text(text)
    with pytest.raises(CheckpointError, match=words) as raised:
        train(plan, out)
    assert str(raised.value).startswith(str(out / file))


@pytest.mark.parametrize("own", [Draft(vocab_size=64), Draft(layer_ids=(1, 2, 3))])
def test_a_head_to_go_on_from_keeps_its_own_shape(own):
    with pytest.raises(ConfigError, match="--start: head has a vocabulary and layers of its own"):
        DraftPlan(model="policy", data={}, init=Path("head"), draft=own)


def test_a_finished_training_is_not_repeated(trained, plan):
    out, best, _ = trained
    before = (out / "metrics.jsonl").read_bytes()
    again, _ = train(plan, out)
    assert again == best
    assert (out / "metrics.jsonl").read_bytes() == before


def test_other_settings_do_not_go_on_in_the_same_folder(trained, plan):
    with pytest.raises(ConfigError, match=r"other settings \(passes\)"):
        train(replace(plan, passes=4), trained[0])


def test_a_folder_with_something_else_is_left_alone(plan, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="new or empty folder"):
        train(plan, tmp_path)


def test_damaged_rollouts_are_named(tmp_path):
    file = tmp_path / "00000.npz"
    file.write_bytes(b"PK not a zip")
    with pytest.raises(CheckpointError, match=r"00000\.npz"):
        read_rollouts(file, IDS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_X": [5, 99999]}, r"tokens 5\.\.99999 of a vocabulary of"),
        ({"prompts_X": [-5, 3]}, r"tokens -5\.\.3 of a vocabulary of"),
        ({"tokens_X": [5.0, 6.0]}, "an array of float64"),
        ({"lengths_N": [3]}, "2 tokens for 1 rollouts"),
        ({"lengths_N": [0]}, "2 tokens for 1 rollouts"),
        ({"lengths_N": np.zeros(0, int), "tokens_X": np.zeros(0, int)}, "0 tokens for 0 rollouts"),
    ],
)
def test_rollouts_of_anything_but_token_ids_are_refused(tmp_path, changes, words):
    arrays = {"prompt_lengths_N": [2], "lengths_N": [2], "prompts_X": [1, 2], "tokens_X": [3, 4]} | changes
    np.savez(tmp_path / "kept.npz", **{name: np.array(array) for name, array in arrays.items()})
    with pytest.raises(CheckpointError, match=words):
        read_rollouts(tmp_path / "kept.npz", 257)


def test_rollouts_of_the_last_batch_are_counted_as_many_as_there_are(plan, tmp_path):
    train(replace(plan, num_rollouts=12, passes=2, measure_every=1), tmp_path / "head")
    assert [row["rollouts"] for row in rows_of(tmp_path / "head")] == [0.0, 8.0, 12.0, 20.0, 24.0]


def stopped_after_its_first_pass(plan, out, monkeypatch):
    """A training of two passes that was killed in the second one; measured after every batch."""
    learn, calls = draft_training._Session._learn, []

    def killed(self, made):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        learn(self, made)

    monkeypatch.setattr(draft_training._Session, "_learn", killed)
    with pytest.raises(KeyboardInterrupt):
        train(plan, out)
    monkeypatch.undo()


def test_kept_rollouts_that_were_deleted_are_made_again(plan, tmp_path, monkeypatch):
    plan = replace(plan, passes=2, measure_every=1)
    for name in ("whole", "holed"):
        stopped_after_its_first_pass(plan, tmp_path / name, monkeypatch)
    for file in (tmp_path / "holed" / "rollouts").glob("0*.npz"):
        file.unlink()
    heads = []
    for name in ("whole", "holed"):
        train(plan, tmp_path / name)
        heads.append(read_eagle3(last(tmp_path / name)).state_dict())
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


def test_a_finished_training_whose_result_is_gone_says_so(plan, trained, tmp_path):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    (out / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected the best drafter so far, its model\.safetensors is gone"):
        train(plan, out)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {}}, "expected the state of this training, got KeyError"),
        ({"trainer": None}, "something else for trainer"),
        ({"done": "x"}, "something else for done"),
        ({"done": 99}, "expected at most 15 batches done, got 99"),
        ({"best": None}, "something else for best"),
        ({"rows": 50}, r"metrics\.jsonl: expected 50 lines, got"),
    ],
)
def test_an_odd_state_of_a_training_is_named(plan, trained, tmp_path, changes, words):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    torch.save(torch.load(out / "state.pt", weights_only=True) | changes, out / "state.pt")
    with pytest.raises(CheckpointError, match=words):
        train(plan, out)


def test_measurements_of_a_training_killed_before_its_first_state_are_made_again(plan, trained, tmp_path):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    (out / "state.pt").unlink()
    train(plan, out)
    assert len(rows_of(out)) == len(rows_of(trained[0]))


def test_a_folder_in_which_nothing_was_learnt_takes_other_settings(plan, tmp_path):
    out = tmp_path / "head"
    with pytest.raises(ConfigError, match="at most the policy's 257, got 99999"):
        train(replace(plan, draft=Draft(vocab_size=99999)), out)
    train(replace(plan, num_rollouts=8, passes=1), out)
    assert rows_of(out)[-1]["rollouts"] == 8.0


def test_two_trainings_in_one_folder_are_refused(plan, tmp_path):
    with alone_in(tmp_path / "head"), pytest.raises(ConfigError, match="another training is at work there"):
        train(plan, tmp_path / "head")
