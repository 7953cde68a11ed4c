"""`leadout audit` from the command line: its exit codes, its list of faults and the verdict it writes."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from leadout.audit.faults import faults
from tests.build.tiny_runs import model_folder

ENOUGH = "5000"
FEW = "100"
CODES = {"pass": 0, "fail": 1, "could not judge": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def audit(leadout_run):
    """Runs the command; its exit code and what it wrote to either stream."""
    return partial(leadout_run, "audit")


@pytest.fixture
def verdict_of(audit, model, tmp_path):
    """Audits the tiny model; exit code, what was printed, and the verdict as it was written."""

    def call(*options: str) -> tuple[int, str, dict]:
        path = tmp_path / "verdict.json"
        code, out, _ = audit("--model", model, "--json", str(path), *options)
        return code, out, json.loads(path.read_text(encoding="utf-8"))

    return call


@pytest.fixture
def refused(audit, monkeypatch):
    """The one line of bad input; no model may be opened for it."""

    def no_model(*_: object) -> None:
        raise AssertionError("the audit began")

    monkeypatch.setattr("leadout.build.audit.load_policy", no_model)

    def call(*options: str) -> str:
        code, out, err = audit(*options)
        assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
        return err

    return call


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_honest_sampler_ends_with_code_0(verdict_of, dtype):
    code, out, verdict = verdict_of("--dtype", dtype, "--tokens", ENOUGH)
    assert (code, verdict["outcome"]) == (0, "pass"), verdict["reason"]
    assert "PASS" in out
    assert verdict["settings"]["precision"] == dtype
    assert {"j=1 after rejection", "j=1 after full acceptance", "j=2", "j=3", "bonus"} <= verdict["class_tokens"].keys()


def test_an_honest_sampler_passes_under_filters_and_with_looked_up_drafts(verdict_of):
    options = ("--dtype", "float64", "--tokens", ENOUGH, "--temperature", "0.7", "--top-p", "0.9", "--method", "ngram")
    code, _, verdict = verdict_of(*options)
    assert (code, verdict["outcome"]) == (0, "pass"), verdict["reason"]
    assert (verdict["settings"]["temperature"], verdict["settings"]["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("dtype", "fault", "test"),
    [("float32", "policy-residual", "T2"), ("float64", "logprobs-before-temperature", "T6")],
)
def test_a_fault_that_acts_ends_with_code_1_and_the_test_that_caught_it(verdict_of, dtype, fault, test):
    code, out, verdict = verdict_of("--dtype", dtype, "--tokens", "1500", "--inject", fault)
    assert (code, verdict["outcome"]) == (1, "fail")
    assert "FAIL" in out and f"with the fault {fault}" in out
    assert test in {result["test"] for result in verdict["results"] if result["outcome"] == "fail"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sample_too_small_to_judge_ends_with_code_3_and_says_how_many_tokens_are_missing(verdict_of, dtype):
    code, out, verdict = verdict_of("--dtype", dtype, "--tokens", FEW)
    assert (code, verdict["outcome"]) == (3, "could not judge")
    assert "COULD NOT JUDGE" in out
    (whole,) = [short for short in verdict["shortages"] if short["class_name"] == "all"]
    assert whole["tokens"] == verdict["tokens"] < whole["needed"]
    assert f"{whole['needed'] - whole['tokens']:,} more of all" in verdict["reason"]


@pytest.mark.parametrize(
    "options",
    [("--tokens", FEW), ("--tokens", FEW, "--method", "none"), ("--tokens", "600", "--inject", "late-stop")],
    ids=["few tokens", "no drafter", "a fault"],
)
def test_the_written_outcome_is_that_of_the_exit_code(verdict_of, options):
    code, _, verdict = verdict_of("--dtype", "float64", *options)
    assert CODES[verdict["outcome"]] == code != 0


def test_the_list_of_faults_has_one_line_for_each_and_opens_no_model(audit, monkeypatch):
    monkeypatch.setattr("leadout.build.audit.load_policy", None)
    code, out, err = audit("--list-faults", "--model", "/no/model")
    assert (code, err) == (0, "")
    assert out.splitlines() == [fault.line for fault in faults()]
    assert [line.split(":")[0] for line in out.splitlines()] == [fault.name for fault in faults()]
    assert sum(line.endswith("(harmless: must pass)") for line in out.splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--inject", "stale"), ["--list-faults", "'stale'", "stale-cache"]),
        (("--inject", ""), ["--list-faults", "''"]),
        (("--method", "ngram", "--draft", "drafts/mine"), ["--method ngram", "--draft drafts/mine"]),
        (("--temperature", "nan"), ["--temperature", "finite", "nan"]),
        (("--min-p", "inf"), ["--min-p", "finite", "inf"]),
        (("--repetition-penalty=-inf",), ["--repetition-penalty", "finite", "-inf"]),
        (("--temperature", "-1"), ["temperature", "-1"]),
        (("--tokens", "99"), ["--tokens", "100"]),
        (("--method", "eagle3"), ["--method eagle3", "--draft"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_cannot_be_are_one_line_and_code_2(audit, model, options, words):
    code, out, err = audit("--model", model, *options)
    assert (code, out.strip(), err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err


def test_a_fault_under_a_setting_where_it_does_nothing_is_refused(refused, model):
    err = refused("--model", model, "--inject", "logprobs-before-temperature", "--temperature", "1")
    assert "acts only with --temperature 0.7" in err


def test_prompts_that_cannot_be_read_are_one_line_and_code_2(refused, model, tmp_path):
    missing, broken, empty = (tmp_path / name for name in ("gone.txt", "latin.txt", "empty.txt"))
    broken.write_bytes("Wie heißt du?\n".encode("latin-1"))
    empty.write_text("\n  \n")
    for path in (missing, broken, tmp_path):
        err = refused("--model", model, "--prompts", str(path))
        assert "--prompts: expected a text file with one prompt a line" in err and str(path) in err
    assert "at least one prompt" in refused("--model", model, "--prompts", str(empty))


def test_a_verdict_that_could_not_be_written_is_refused_before_the_audit(refused, model, tmp_path):
    err = refused("--model", model, "--json", str(tmp_path / "gone" / "verdict.json"))
    assert "--json: expected a file in a folder that exists" in err
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or a pipe" in refused("--model", model, "--json", str(tmp_path / "pipe"))
