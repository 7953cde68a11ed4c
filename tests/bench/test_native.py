from __future__ import annotations

import json

import numpy as np
import pytest

from leadout.bench.native import NativeContender, TimedLength
from leadout.bench.set_acceptance import SetAcceptance, length_at, rate_for
from leadout.bench.workload import Workload
from leadout.build.bench import BenchOptions
from leadout.build.bench_machine import BenchMachine, DrafterChoice
from leadout.draft_length.controller import FixedLength, RoundOutcome
from leadout.errors import ConfigError
from leadout.sim.profile import DrafterTimes, Limits, Profile, load_profile
from tests.build.tiny_runs import model_folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def machine(policy) -> BenchMachine:
    return BenchMachine(policy, max_len=64, dtype="float32", threads=1)


def cell(machine: BenchMachine, rows: int, length: int) -> Workload:
    return Workload(name="w", prompts=machine.prompts(rows, 8), lengths=(length,) * rows)


def contender(machine: BenchMachine, workload: Workload, choice: DrafterChoice, k: int) -> NativeContender:
    generator = machine.generator(choice, rows=workload.rows, max_len=workload.longest)
    return NativeContender("x", generator, FixedLength(k), drafts=k > 0)


def test_every_row_has_exactly_its_length(machine):
    lengths = (3, 20, 7)
    workload = Workload(name="w", prompts=machine.prompts(3, 8), lengths=lengths)
    assert contender(machine, workload, DrafterChoice(method="eagle3"), 3).run(workload, 0).tokens == sum(lengths)


def test_plain_drafts_nothing(machine):
    workload = cell(machine, 2, 12)
    sample = contender(machine, workload, DrafterChoice(method="ngram"), 0).run(workload, 0)
    assert (sample.spec["spec/num_drafts"], sample.spec["spec/rounds"]) == (0.0, 22.0)


def test_set_acceptance_is_reached_whatever_the_policy_says(machine):
    workload = cell(machine, 16, 50)
    for rate in (0.0, 0.75, 1.0):
        choice = DrafterChoice(method="eagle3", rule=SetAcceptance(rate))
        spec = contender(machine, workload, choice, 3).run(workload, 0).spec
        assert spec["spec/acceptance_rate_pos_1"] == pytest.approx(rate, abs=0.08)
        # The ends of rollouts cut rounds, so pooled lengths lie a little below.
        assert length_at(rate, 3) - 0.35 <= spec["spec/acceptance_length"] <= length_at(rate, 3) + 0.1


def test_rate_and_length_are_inverse():
    assert length_at(0.5, 3) == 1.875
    assert rate_for(1.875, 3) == pytest.approx(0.5)
    assert rate_for(4.0, 3) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="between 1 and 4"):
        rate_for(4.5, 3)


@pytest.mark.parametrize("method", ["ngram", "history", "noisy_policy", "small_model", "eagle3"])
def test_every_drafter_can_be_measured(machine, policy, method):
    draft = policy if method == "small_model" else None
    workload = cell(machine, 2, 24)
    sample = contender(machine, workload, DrafterChoice(method=method, draft=draft), 2).run(workload, 0)
    assert sample.tokens == 48
    if method == "small_model":  # the policy itself
        assert sample.spec["spec/acceptance_rate_pos_1"] == 1.0
    if method in ("noisy_policy", "eagle3"):
        assert sample.spec["spec/num_drafts"] > 10


def test_rounds_are_timed_only_between_rounds_of_the_same_rows():
    timer = TimedLength(FixedLength(0))
    for rows in (2, 2, 1, 1, 2):
        none = np.zeros(rows, np.int64)
        timer.record(
            RoundOutcome(
                num_drafts=0, num_asked=0, drafted_B=none, accepted_B=none, draft_seconds=0.0, verify_seconds=1.0
            )
        )
    assert (len(timer.seconds(2)), len(timer.seconds(1)), timer.seconds(3)) == (1, 1, [])


def test_the_command_writes_a_table_and_json(leadout_run, policy, tmp_path):
    out = tmp_path / "bench.json"
    options = ["--batch-sizes", "1,3", "--k", "0,2,auto", "--context", "8", "--new-tokens", "12", "--repeats", "3"]
    code, told, err = leadout_run(
        "bench", "--model", policy, "--threads", "1", "--dtype", "float32", *options, "--json", str(out)
    )
    assert (code, err) == (0, "")
    report = json.loads(out.read_text())
    assert [each["name"] for each in report["cells"]] == ["batch 1", "batch 3"]
    assert [line["name"] for line in report["cells"][1]["lines"]] == ["plain", "k=2", "auto"]
    assert report["cells"][1]["tokens"] == 36
    assert len(report["cells"][1]["lines"][1]["seconds"]) == 3
    assert report["cells"][1]["auto_against_best"]["ratio"]["pairs"] == 2
    assert "batch 3: 3 rows, prompts of 8, 36 new tokens" in told


def test_the_long_tail_is_one_cell_of_64_rows(leadout_run, policy, tmp_path):
    out = tmp_path / "bench.json"
    options = ["--workload", "longtail", "--k", "0,auto", "--context", "8", "--repeats", "1"]
    code, _, _ = leadout_run(
        "bench", "--model", policy, "--threads", "1", "--dtype", "float32", *options, "--json", str(out)
    )
    assert code == 2  # 256 new tokens do not fit the tiny model's context of 128
    big = str(model_folder(tmp_path / "big", context=512))
    code, _, _ = leadout_run(
        "bench", "--model", big, "--threads", "1", "--dtype", "float32", *options, "--json", str(out)
    )
    (found,) = json.loads(out.read_text())["cells"]
    assert (code, found["rows"], found["name"]) == (0, 64, "long tail")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--batch-sizes", "1,x"),
            "--batch-sizes: expected whole numbers from 1 to 1024 with commas, such as 1,4, got '1,x'",
        ),
        (("--batch-sizes", "0"), "--batch-sizes: expected whole numbers"),
        (("--batch-sizes", ""), "--batch-sizes: expected whole numbers"),
        (("--k", "3,fast"), "--k: expected numbers from 0 to 16 or auto with commas, such as 0,3,auto, got '3,fast'"),
        (("--k", "17"), "--k: expected numbers from 0 to 16"),
        (("--method", "small_model"), "--method small_model needs --draft"),
        (("--method", "history+small_model"), "--method history+small_model needs --draft"),
        (
            ("--method", "history+eagle3", "--calibrate", "x.json"),
            "--method history+eagle3: expected drafters by themselves in a profile, such as history,eagle3",
        ),
        (("--method", "ngram", "--draft", "x"), "--method ngram drafts without a model, got --draft x"),
        (("--method", "eagle"), "--method: expected one of none, noisy_policy, eagle3, parallel, mtp, ngram"),
        (("--method", "ngram,eagle3"), "--method: several drafters go with --calibrate only, got 'ngram,eagle3'"),
        (
            ("--method", "ngram,small_model", "--draft", "x", "--calibrate", "x.json"),
            "--draft: expected METHOD=DIR with a method of ngram, small_model, separated by commas, got 'x'",
        ),
        (
            ("--method", "ngram,mtp", "--draft", "mtp=./gone", "--calibrate", "x.json"),
            "--draft: expected the folder of a draft head, got ./gone",
        ),
        (("--draft", "./gone"), "--draft: expected the folder of a draft head, got ./gone, which is not there"),
        (("--set-acceptance", "0.5", "--method", "none"), "--set-acceptance needs a drafter, got --method none"),
        (("--targets", "--calibrate", "x.json"), "--targets and --calibrate are two measurements"),
        (("--sections", "auto"), "--sections goes with --targets only"),
        (("--targets", "--k", "3"), "--targets does not take --k; leave it out (it takes --targets, --model, --draft"),
        (("--targets", "--repeats", "9"), "--targets does not take --repeats; leave it out"),
        (("--calibrate", "x.json", "--against", "hf"), "--calibrate does not take --against; leave it out"),
        (("--json", "./gone/x.json"), "--json: expected a file in a folder that exists"),
        (("--context", "120"), "expected at most 128 tokens in a row, the model's context, got 184"),
    ],
)
def test_bad_options_are_one_line(leadout_run, policy, options, words):
    code, _, err = leadout_run("bench", "--model", policy, "--dtype", "float32", "--threads", "1", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_more_rows_than_memory_holds_are_refused_before_any_is_taken(leadout_run, policy, monkeypatch):
    class Free:
        available = 1 << 16

    monkeypatch.setattr("leadout.build.bench_machine.psutil.virtual_memory", Free)
    options = ("--context", "8", "--new-tokens", "12", "--batch-sizes", "1,64", "--dtype", "float32", "--threads", "1")
    code, _, err = leadout_run("bench", "--model", policy, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "64 rows of 20 tokens need 0.0 GiB for caches and logits, and 0.0 GiB are free; lower --batch-sizes" in err


def test_a_profile_can_hold_several_drafters_each_with_its_folder(leadout_run, policy, tmp_path, monkeypatch):
    asked: list[dict[str, str | None]] = []

    def measure(options: BenchOptions, *, tell: object, drafters: dict[str, str | None]) -> Profile:
        asked.append(drafters)
        limits = Limits(read_bytes_per_s=2e9, product_flops=3e9)
        times = DrafterTimes(draft={1: 0.1}, verify={2: 0.2})
        return Profile(machine="m", rounds=(), limits=limits, drafters=dict.fromkeys(drafters, times))

    monkeypatch.setattr("leadout.build.bench_calibrate.calibrate", measure)
    path = tmp_path / "profile.json"
    several = ("--method", "ngram,small_model,eagle3", "--draft", "small_model=a=b,eagle3=c")
    code, told, _ = leadout_run("bench", "--model", policy, "--calibrate", str(path), *several)
    assert (code, load_profile(path).drafters["eagle3"].draft) == (0, {1: 0.1})
    assert "ngram, small_model, eagle3; 0 grids of rounds, 2.0 GB/s, 3 GFLOP/s" in " ".join(told.split())
    leadout_run("bench", "--model", policy, "--calibrate", str(path), "--draft", "c")
    leadout_run("bench", "--model", policy, "--calibrate", str(path), "--draft", "eagle3=c")
    assert asked == [{"ngram": None, "small_model": "a=b", "eagle3": "c"}, {"eagle3": "c"}, {"eagle3": "c"}]


def test_a_head_of_another_width_is_one_line(leadout_run, policy, tmp_path):
    from leadout.models.eagle3_io import write_eagle3

    machine = BenchMachine(policy, max_len=64, dtype="float32", threads=1)
    head = machine.head(None)
    write_eagle3(head, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    wide = {name: 2 * value if "hidden_size" in name else value for name, value in config.items()}
    (tmp_path / "head" / "config.json").write_text(json.dumps(wide))
    code, _, err = leadout_run(
        "bench", "--model", policy, "--dtype", "float32", "--threads", "1", "--draft", str(tmp_path / "head")
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "error: " in err and "64" in err


def test_transformers_is_a_peer(leadout_run, policy, tmp_path):
    out = tmp_path / "bench.json"
    options = ["--batch-sizes", "2", "--k", "0", "--context", "8", "--new-tokens", "6", "--repeats", "2"]
    code, told, _ = leadout_run(
        "bench", "--model", policy, "--threads", "1", "--against", "hf", *options, "--json", str(out)
    )
    report = json.loads(out.read_text())
    assert code == 0
    assert [line["name"] for line in report["cells"][0]["lines"]] == ["plain", "hf"]
    assert report["cells"][0]["lines"][1]["peak_bytes"] > 100 << 20
    assert report["peers"]["hf"]["idle_cpu_seconds"] == 0.0
    assert "in which it used 0.00 s of processor time" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--against", "sglang"), "--against: expected some of hf, vllm with commas, got 'sglang'"),
        (
            ("--against", "vllm", "--vllm-python", "/gone/bin/python"),
            "no /gone/bin/python; make it with `make vllm-env`",
        ),
        (("--against", "hf", "--workload", "longtail"), "--against hf: model.generate has one length for all rows"),
    ],
)
def test_bad_peers_are_one_line(leadout_run, policy, options, words):
    code, _, err = leadout_run("bench", "--model", policy, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
