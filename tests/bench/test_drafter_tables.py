"""The comparison of drafters over a tiny policy, from the first stage to the tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from benchmarks import drafters
from benchmarks.drafter_bench import Bench
from benchmarks.drafter_cells import cells
from benchmarks.drafter_measure import accepted
from benchmarks.drafter_store import Acceptance, Online, Speed, Store, Training, Tuned, read_options
from rich.console import Console
from safetensors.torch import load_file

from leadout.records import Finish, Prompt, Rollout, RolloutId, Rounds, Source, Span
from tests.build.tiny_runs import model_folder, write_questions

R = TypeVar("R")
SMALL: dict[str, object] = {
    **{"rollouts": 8, "loss-rollouts": 4, "passes": 1, "completion-length": 7, "vocab-size": 128, "layers": "0,3"},
    **{"losses": "tv", "seeds": "0,1", "policy-updates": 2, "lengths": "3", "prompts": 2, "rows": 2},
    **{"batches": "2", "new-tokens": 12, "pairs": 1, "updates": 2, "step-prompts": 1, "generations": 2},
    **{"step-tokens": 6, "dtype": "float32", "threads": 1},
}


def call(stage: str, out: Path, **options: object) -> int:
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return drafters.main([stage, "--out", str(out), *given])


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("policy"), context=192)


@pytest.fixture(scope="module")
def measured(policy: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison") / "out"
    given = {name.replace("-", "_"): value for name, value in SMALL.items()}
    files = {"gsm8k_train": questions, "gsm8k": questions, "other": f"{questions}@question"}
    assert call("all", out, model=policy, **given, **files) == 0
    return out


def read(out: Path, kind: type[R], name: str) -> R:
    found = Store(out).read(kind, name)
    assert found is not None
    return found


def test_every_stage_measures_every_cell(measured: Path) -> None:
    options, store = read_options(measured, {}), Store(measured)
    planned = cells(options)
    assert len(planned) == len({(cell.stage, cell.name) for cell in planned}) == 8 + 1 + 60 + 7 + 4
    assert all(store.path(cell).is_file() for cell in planned)
    assert not list(measured.rglob(".*.tmp"))
    assert read(measured, Training, "train/parallel").rollouts == 8
    plan = json.loads((measured / "drafters" / "eagle3-tv-1" / "plan.json").read_text())
    assert (plan["draft"]["loss_fn"], plan["seed"], plan["num_rollouts"]) == ("tv", 1, 4)
    plan = json.loads((measured / "drafters" / "mtp" / "plan.json").read_text())
    assert (plan["method"], sorted(plan["data"]), plan["num_rollouts"]) == ("mtp", ["arithmetic", "gsm8k"], 8)
    assert read(measured, Tuned, "policy/tuned").updates == 2
    first, *_ = read(measured, Online, "online/eagle3.online").lengths
    assert first is not None and first >= 1.0
    assert set(read(measured, Speed, "speed/mtp.batch2").speedup) == {"k=3", "auto"}


def test_a_second_call_measures_nothing_again(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in measured.rglob("cells/*/*.json")}
    assert call("all", measured) == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == files
    assert "acceptance: 0 of 60 cells left" in capsys.readouterr().err


def test_a_cell_that_is_deleted_is_the_only_one_measured_again(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ngram.gsm8k.tuned.k3.sampled"
    path = measured / "cells" / "acceptance" / f"{name}.json"
    before = json.loads(path.read_text())
    path.unlink()
    assert call("acceptance", measured, only="ngram.*") == 0
    assert json.loads(path.read_text()) == before
    assert f"acceptance 1 of 1: {name}" in capsys.readouterr().err


def test_tables_hold_the_measured_numbers(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tables", measured) == 0
    printed = capsys.readouterr().out
    assert "Not measured" not in printed
    sections = dict(part.split("\n", 1) for part in printed.split("### ")[1:])
    lengths = next(x for x in sections["Acceptance length, raw policy"].splitlines() if x.startswith("| mtp"))
    found = read(measured, Acceptance, "acceptance/mtp.gsm8k.raw.k3.sampled")
    assert lengths.split("|")[-2].strip() == f"{found.length:.2f}"
    rates = next(x for x in sections["Acceptance by position, raw policy"].splitlines() if x.startswith("| mtp"))
    assert rates.split("|")[-2].strip() == " ".join(f"{rate:.2f}" for rate in found.rates)
    greedy = read(measured, Acceptance, "acceptance/mtp.gsm8k.tuned.k3.greedy")
    both = next(x for x in sections["Sampled against greedy drafts"].splitlines() if x.startswith("| mtp"))
    assert both.split("|")[-2].split("/")[1].strip() == f"{greedy.length:.2f}"
    speed = read(measured, Speed, "speed/mtp.batch2")
    cost = next(x for x in sections["Cost and speed"].splitlines() if x.startswith("| mtp"))
    assert cost.split("|")[-3].strip() == f"{speed.speedup['k=3'].value:.2f}"
    steps = read(measured, Online, "online/eagle3.frozen").lengths
    line = next(x for x in sections["Frozen against online, 2 policy updates"].splitlines() if "eagle3, frozen" in x)
    assert line.split("|")[2:4] == [f" {value:.2f} " for value in steps if value is not None]
    found_S = [read(measured, Acceptance, f"acceptance/eagle3-tv-{i}.arithmetic.raw.k3.sampled") for i in (0, 1)]
    by_seed = [found.length for found in found_S if found.length is not None]
    losses = next(x for x in sections["Losses"].splitlines() if x.startswith("| `tv`"))
    assert losses.split("|")[2].strip() == ", ".join(f"{value:.2f}" for value in by_seed)
    assert losses.split("|")[3].strip().startswith(f"{np.mean(by_seed):.3f}")


def test_what_is_missing_is_a_dash_and_named_with_its_command(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "part"
    shutil.copytree(measured / "cells", out / "cells")
    shutil.copy(measured / "options.json", out)
    (out / "cells" / "train" / "mtp.json").unlink()
    (out / "cells" / "acceptance" / "mtp.gsm8k.raw.k3.sampled.json").unlink()
    assert call("tables", out) == 0
    printed = capsys.readouterr().out
    line = next(x for x in printed.splitlines() if x.startswith("| mtp"))
    assert [i for i, value in enumerate(line.split("|")) if value == " – "] == [3]
    assert "### Not measured yet: 2" in printed
    command = f"`python -m benchmarks.drafters acceptance --out {out} --only 'mtp.gsm8k.raw.k3.sampled'`"
    assert f"- acceptance mtp.gsm8k.raw.k3.sampled (after train/mtp): {command}" in printed


def test_cells_out_of_reach_are_left_out_aloud(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("acceptance", tmp_path / "new", model=policy, only="eagle3.*.k3.sampled") == 1
    said = capsys.readouterr().err
    assert "eagle3.arithmetic.raw.k3.sampled: left out, train/eagle3 is not measured" in said
    assert "eagle3.gsm8k.raw.k3.sampled: left out, --gsm8k must be given" in said
    assert call("tables", tmp_path / "new") == 0
    assert "--only 'eagle3.gsm8k.raw.k3.sampled' --gsm8k FILE`" in capsys.readouterr().out


def test_cells_of_other_settings_are_refused(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tables", measured, prompts=3) == 2
    said = capsys.readouterr().err
    assert "was measured with prompts 2, now 3" in said
    assert read_options(measured, {}).prompts == 2


def test_a_given_head_gets_rows_of_its_own(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "with_head"
    shutil.copytree(measured / "cells", out / "cells")
    shutil.copy(measured / "options.json", out)
    folder = tmp_path / "mine"
    shutil.copytree(read(measured, Training, "train/eagle3").folder, folder)
    assert call("acceptance", out, head=folder, only="head-mine.arithmetic.raw.k3.sampled") == 0
    given = read(out, Acceptance, "acceptance/head-mine.arithmetic.raw.k3.sampled")
    assert given == read(out, Acceptance, "acceptance/eagle3.arithmetic.raw.k3.sampled")


def test_a_tuned_policy_may_be_given(measured: Path, tmp_path: Path, policy: Path) -> None:
    out, other = tmp_path / "given", model_folder(tmp_path / "other", context=192, seed=1)
    shutil.copytree(measured / "cells" / "train", out / "cells" / "train")
    shutil.copy(measured / "options.json", out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other / file).unlink()
    assert call("policy", out, tuned=other) == 0
    assert call("acceptance", out, only="mtp.arithmetic.tuned.k3.*") == 0
    assert read(out, Acceptance, "acceptance/mtp.arithmetic.tuned.k3.sampled").tokens > 0
    loaded = Bench(read_options(out, {}), Store(out), Console()).machine("tuned").weights
    name = "model.embed_tokens.weight"
    assert torch.equal(loaded[name], load_file(other / "model.safetensors")[name])
    assert read(out, Tuned, "policy/tuned").folder == out / "policy"


def test_a_wrong_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tables", tmp_path / "new", prompts="many") == 2
    assert "--prompts: " in capsys.readouterr().err
    assert call("train", tmp_path / "new", only="nobody") == 2
    assert "--only: expected a name such as eagle3, got nobody" in capsys.readouterr().err


def test_drafters_are_measured_on_questions_that_none_is_trained_on(tmp_path: Path) -> None:
    bench = Bench(read_options(tmp_path, {}), Store(tmp_path), Console())
    train, held_out = (bench.arithmetic(*part).path for part in (("train", 500), ("held-out",)))
    assert train is not None and held_out is not None
    trained, measured = (path.read_text().splitlines() for path in (train, held_out))
    assert (len(trained), len(set(trained)), len(set(measured))) == (500, 160, 40)
    assert not set(trained) & set(measured)
    assert not set(trained[::10]) & {row for index, row in enumerate(trained) if index % 10}


def rollout(draw: int, drafted: list[int], taken: list[int], length: int) -> Rollout:
    return Rollout(
        request_id=RolloutId(draw, 0),
        prompt=Prompt(id="p", token_ids=np.zeros(1, np.int32), text=""),
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        policy_logprobs=np.zeros(length, np.float32),
        spans=(Span(length=length, source=Source.POLICY, version=0),),
        rounds=Rounds(drafted=np.array(drafted, np.int16), accepted=np.array(taken, np.int16)),
        finish=Finish.LENGTH,
    )


def test_rates_are_of_the_drafts_whose_forerunners_were_accepted() -> None:
    # Committed: 3 + 1 + 2 of the first rollout's tokens and 1 + 1 of the second's; the last round had no room.
    found = accepted([rollout(0, [2, 2, 2], [2, 0, 1], 7), rollout(1, [2, 0], [0, 0], 3)])
    assert found.rates == (2 / 4, 1 / 2)
    assert found.length == (3 + 1 + 2 + 1) / 4
    assert found.drafted == 4 / 4
    assert (found.rounds, found.tokens) == (5, 10)
    # Tokens less length x rounds: 6 - 5.25 and 1 - 1.75.
    assert found.error == pytest.approx(np.sqrt(2 * 0.75**2 * 2) / 4)
