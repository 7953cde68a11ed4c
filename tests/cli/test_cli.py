from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import leadout
from leadout.cli.entry import main
from leadout.cli.main import run
from leadout.config import RunConfig
from leadout.errors import AuditError, DataError, LeadoutError

DEMO = str(Path(__file__).parents[2] / "recipes" / "demo.yaml")


@dataclass
class FakeBuild:
    """Stands in for the module that builds and runs; notes what it was asked for."""

    failure: BaseException | None = None
    trained: list[tuple[RunConfig, Path | None]] = field(default_factory=list)
    evaluated: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def train(self, config: RunConfig, *, resume: Path | None) -> Path:
        if self.failure is not None:
            raise self.failure
        self.trained.append((config, resume))
        return Path("runs/x")

    def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        self.evaluated.append((args, kwargs))
        return {"pass@1": 0.25}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    module = ModuleType("leadout.build")
    module.__dict__.update(train=fake.train, evaluate=fake.evaluate)
    monkeypatch.setitem(sys.modules, "leadout.build", module)
    monkeypatch.setattr(leadout, "build", module, raising=False)
    return fake


def test_training_starts_with_the_recipe_and_the_overrides(build: FakeBuild, leadout_run: Any) -> None:
    code, out, err = leadout_run("train", DEMO, "pipeline.max_steps=3", "seed=5")
    ((config, resume),) = build.trained
    assert (code, err, resume) == (0, "", None)
    assert (config.pipeline.max_steps, config.seed) == (3, 5)
    assert "Next: leadout report runs/x" in out


def test_a_run_without_a_name_is_called_after_recipe_and_time(build: FakeBuild, leadout_run: Any) -> None:
    leadout_run("train", DEMO)
    leadout_run("train", DEMO, "name=mine")
    names = [config.name for config, _ in build.trained]
    assert re.fullmatch(r"demo-\d{8}-\d{6}", str(names[0]))
    assert names[1] == "mine"


def test_a_dry_run_prints_the_whole_recipe_and_starts_nothing(
    build: FakeBuild, leadout_run: Any, tmp_path: Path
) -> None:
    code, out, _ = leadout_run("train", DEMO, "seed=5", "--dry-run")
    assert (code, build.trained) == (0, [])
    (tmp_path / "printed.yaml").write_text(out, encoding="utf-8")
    leadout_run("train", str(tmp_path / "printed.yaml"), "name=x")
    leadout_run("train", DEMO, "seed=5", "name=x")
    assert build.trained[0] == build.trained[1]


def test_resuming_takes_the_recipe_of_the_run(build: FakeBuild, leadout_run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 9\n")
    leadout_run("train", "--resume", str(tmp_path))
    leadout_run("train", "--resume", str(tmp_path), "pipeline.max_steps=7")
    assert [(config.seed, config.pipeline.max_steps, resume) for config, resume in build.trained] == [
        (9, 20, tmp_path),
        (9, 7, tmp_path),
    ]


def test_resuming_what_is_no_run_is_refused(build: FakeBuild, leadout_run: Any, tmp_path: Path) -> None:
    code, _, err = leadout_run("train", "--resume", str(tmp_path))
    assert code == 2
    assert err == f"error: cannot resume {tmp_path}: expected the folder of a run with config.yaml, found none\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "error: expected a recipe, got none; try: leadout train recipes/demo.yaml\n"),
        (("train", "gone.yaml"), "error: no recipe gone.yaml; expected a YAML file such as recipes/demo.yaml\n"),
        (("train", DEMO, "rollout.n=3"), "error: rollout.n is another framework's name; use rollout.num_generations\n"),
        (("train", DEMO, "seed=x"), "error: seed: expected an integer, got 'x'\n"),
        (("trian",), "error: No such command 'trian'"),
        (("train", DEMO, "--nope"), "error: No such option: --nope"),
        (("eval",), "error: Missing option '--model'"),
        (("models", "fetch", "smollm"), "error: expected one of the aliases smollm2-135m, got 'smollm'\n"),
        (("report",), "error: Missing argument 'RUN ...'"),
    ],
)
def test_bad_arguments_get_one_line_and_code_2(
    build: FakeBuild, leadout_run: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = leadout_run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (DataError("x.jsonl line 3: broken"), 2, "error: x.jsonl line 3: broken"),
        (LeadoutError("two\nlines"), 2, "error: two lines"),
        (AuditError("not lossless"), 1, "error: not lossless"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"),
            2,
            "error: disk full while writing runs/x/metrics.jsonl; free some space and run the same command again",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 2, "error: [Errno 13] Permission denied: 'runs'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("stopped at step 3; go on with: leadout train --resume runs/x"), 130, "stopped at step 3;"),
    ],
)
def test_failures_get_one_line_and_their_code(
    build: FakeBuild, leadout_run: Any, failure: BaseException, code: int, message: str
) -> None:
    build.failure = failure
    got, out, err = leadout_run("train", DEMO)
    assert (got, out) == (code, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--debug", "train", DEMO), ("train", DEMO, "--debug")])
def test_debug_lets_the_traceback_through(
    build: FakeBuild, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    build.failure = DataError("x")
    monkeypatch.setattr(sys, "argv", ["leadout", *arguments])
    with pytest.raises(DataError):
        run()


def test_an_error_of_the_program_itself_is_not_dressed_up(build: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    build.failure = ZeroDivisionError()
    monkeypatch.setattr(sys, "argv", ["leadout", "train", DEMO])
    with pytest.raises(ZeroDivisionError):
        run()


def test_an_error_of_the_program_itself_is_one_line_and_code_70() -> None:
    code = (
        "import sys; from leadout.cli import main\n"
        "def fail(arguments): raise ZeroDivisionError('by\\nzero')\n"
        "main._invoke = fail; main.run()"
    )
    plain = subprocess.run([sys.executable, "-c", code, "train"], capture_output=True, text=True, check=False)
    assert plain.returncode == 70
    assert plain.stderr == (
        "error: internal error (ZeroDivisionError: by zero); run again with --debug for the traceback\n"
    )
    debugged = subprocess.run([sys.executable, "-c", code, "--debug"], capture_output=True, text=True, check=False)
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


@pytest.mark.parametrize("end", [0, None, "bye"])
def test_an_exit_from_inside_never_looks_like_success(build: FakeBuild, leadout_run: Any, end: object) -> None:
    build.failure = SystemExit(end)
    code, out, err = leadout_run("train", DEMO)
    assert (code, out) == (70, "")
    assert err == f"error: something called exit({end!r}) in the middle of the command; see --debug\n"


def test_an_interrupt_while_the_program_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "leadout.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "leadout.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_a_dry_run_checks_what_it_would_resume(build: FakeBuild, leadout_run: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    code, out, err = leadout_run("train", DEMO, "--dry-run", "--resume", str(missing))
    assert (code, out) == (2, "")
    assert err == f"error: cannot resume {missing}: expected the folder of a run with config.yaml, found none\n"


def test_a_missing_evaluation_file_names_the_option(build: FakeBuild, leadout_run: Any) -> None:
    code, _, err = leadout_run("eval", "--model", "m", "--data", "gone.jsonl")
    assert (code, err) == (2, "error: gone.jsonl: no such data file; check --data (relative to where you run)\n")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_options_must_be_finite(build: FakeBuild, leadout_run: Any, value: str) -> None:
    code, _, err = leadout_run("eval", "--model", "m", "--data", "arithmetic", "--temperature", value)
    assert (code, err.count("\n")) == (2, 1)
    assert "error: Invalid value for '--temperature'" in err
    assert "expected a finite number, got inf" in err or value == "nan"
    assert build.evaluated == []
    code, _, err = leadout_run("audit", "--top-p", value)
    assert (code, err) == (2, f"error: --top-p: expected a finite number, got {value}\n")


def test_an_audit_of_a_method_without_a_model_takes_no_draft(leadout_run: Any) -> None:
    code, _, err = leadout_run("audit", "--method", "ngram", "--draft", "drafts/mine")
    assert code == 2
    assert err == "error: --method ngram drafts without a model, got --draft drafts/mine; leave one of them out\n"


def test_where_the_verdict_goes_is_checked_before_the_audit(leadout_run: Any, tmp_path: Path) -> None:
    code, _, err = leadout_run("audit", "--model", "/no/model", "--json", str(tmp_path / "gone" / "x.json"))
    assert code == 2
    assert f"--json: expected a file in a folder that exists, {tmp_path}/gone/x.json lies in" in err
    code, _, err = leadout_run("audit", "--model", "/no/model", "--json", str(tmp_path))
    assert (code, f"{tmp_path} is a folder; name another file" in err) == (2, True)


@pytest.mark.parametrize(
    ("data", "source", "reward"),
    [
        ("arithmetic", {"task": "arithmetic"}, "task"),
        ("some/file.jsonl", {"path": Path("some/file.jsonl")}, "number"),
        ("hub:openai/gsm8k:main", {"hub": "openai/gsm8k:main", "split": "test"}, "number"),
    ],
)
def test_evaluation_finds_out_what_the_data_is(
    build: FakeBuild,
    leadout_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: str,
    source: dict[str, object],
    reward: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file.jsonl").write_text("{}")
    code, out, _ = leadout_run("eval", "--model", "m", "--data", data, "--num-prompts", "8")
    (((model, dataset), options),) = build.evaluated
    assert (code, model, options["num_prompts"], options["reward"]) == (0, "m", 8, reward)
    assert {name: getattr(dataset, name) for name in source} == source
    assert "pass@1                           0.25" in out


def test_a_report_goes_beside_its_run(monkeypatch: pytest.MonkeyPatch, leadout_run: Any) -> None:
    asked: list[tuple[list[Path], Path]] = []

    def write_report(runs: list[Path], out: Path) -> Path:
        asked.append((runs, out))
        return out

    monkeypatch.setattr("leadout.report.page.write_report", write_report)
    leadout_run("report", "runs/a")
    leadout_run("report", "runs/a", "runs/b", "--out", "both.html")
    assert asked == [
        ([Path("runs/a")], Path("runs/a/report.html")),
        ([Path("runs/a"), Path("runs/b")], Path("both.html")),
    ]


def test_the_version_is_printed(leadout_run: Any) -> None:
    assert leadout_run("--version") == (0, f"leadout {leadout.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command_with_an_example(leadout_run: Any, arguments: tuple[str, ...]) -> None:
    code, out, _ = leadout_run(*arguments)
    assert code == 0
    for expected in ("train", "eval", "report", "models", "Example: leadout train recipes/demo.yaml"):
        assert expected in out


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys; from leadout.cli.main import run; sys.argv = ['leadout', '--help']\n"
        "try: run()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", "from leadout.cli.main import run; run()", "train", DEMO, "--dry-run"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")
