import re
import subprocess
import sys
from pathlib import Path

import pytest

from leadout.metrics import read_rows
from tests.pipeline.fake_run import STEPS

ROOT = Path(__file__).parents[2]
MEASURED = re.compile(r"seconds/.*|exposed/.*|.*_per_second|memory/.*")


def start(folder, *arguments):
    command = [sys.executable, "-m", "tests.pipeline.fake_run", str(folder), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def metrics_of(folder):
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not MEASURED.fullmatch(name)} for row in rows]


@pytest.fixture(scope="module", params=["sync", "1"], ids=["synchronous", "one batch ahead"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, mode):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert finish(start(folder, mode))[0] == 0
    return folder


def assert_same_run(folder, unbroken):
    assert [row["step"] for row in metrics_of(unbroken)] == list(range(1, STEPS + 1))
    assert metrics_of(folder) == metrics_of(unbroken)
    assert (folder / "rollouts.jsonl").read_bytes() == (unbroken / "rollouts.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("where", "number"), [("rollout", 2), ("rollout", 27), ("save", 1), ("save", 3), ("row", 1), ("row", 8)]
)
def test_a_killed_run_resumes_to_the_same_files(tmp_path, unbroken, mode, where, number):
    folder = tmp_path / "run"
    assert finish(start(folder, mode, where, number))[0] == -9
    assert metrics_of(folder) != metrics_of(unbroken)
    code, _, err = finish(start(folder, mode))
    assert code == 0, err
    assert_same_run(folder, unbroken)


def test_a_run_killed_from_outside_after_any_line_resumes_to_the_same_files(tmp_path, unbroken, mode):
    folder = tmp_path / "run"
    for lines in (5, 2):  # killed, killed again while repeating steps, then left alone
        process = start(folder, mode)
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        finish(process)
    code, _, err = finish(start(folder, mode))
    assert code == 0, err
    assert_same_run(folder, unbroken)
