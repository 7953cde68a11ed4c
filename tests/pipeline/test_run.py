import io
import os
import signal
from dataclasses import dataclass

import pytest
from rich.console import Console

from leadout.errors import CapacityError, CheckpointError
from leadout.metrics import read_rows
from leadout.pipeline.checkpoint import Checkpoints
from tests.fakes import FakeGenerator, FakeLearner
from tests.pipeline.builders import make_pipeline, make_run
from tests.pipeline.test_resume import metrics_of


@dataclass
class InterruptedGenerator(FakeGenerator):
    """Ctrl-C arrives while it generates its `left`-th rollout."""

    left: int = 0

    def collect(self, timeout=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().collect(timeout)


@dataclass
class InterruptedLearner(FakeLearner):
    """Ctrl-C arrives `times` times in the middle of its update at `at`."""

    at: int = 0
    times: int = 1

    def step(self, groups, logprobs):
        self.momentum += 0.125
        if self.version == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        self.momentum -= 0.125
        return super().step(groups, logprobs)


@pytest.fixture
def unbroken(tmp_path):
    run = make_run(tmp_path / "unbroken")
    run.train()
    return run.folder.path


def test_a_run_writes_a_row_per_step_and_a_line_per_rollout(unbroken):
    assert [row["step"] for row in read_rows(unbroken / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    lines = read_rows(unbroken / "rollouts.jsonl")
    assert [(line["step"], line["draw"], line["sibling"]) for line in lines[:5]] == [
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
        (2, 2, 0),
    ]
    assert len({(line["draw"], line["sibling"]) for line in lines}) == 28


def test_the_newest_checkpoints_are_kept_and_the_last_step_has_one(unbroken):
    assert Checkpoints(unbroken / "checkpoints").steps() == [6, 7]


def test_train_returns_the_last_step(tmp_path):
    assert make_run(tmp_path / "run", max_steps=3).train().report.step == 3


def test_evaluation_stands_in_the_rows_where_it_is_due(unbroken):
    rows = read_rows(unbroken / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/mean@2" in row] == [2, 4, 6, 7]


def test_evaluation_does_not_change_the_training(tmp_path, unbroken):
    pipelines = [make_pipeline(generator=FakeGenerator(k=2)) for _ in range(2)]
    for pipeline, evaluate in zip(pipelines, (True, False), strict=True):
        make_run(tmp_path / str(evaluate), pipeline, evaluate=evaluate).train()
    assert pipelines[0].learner == pipelines[1].learner


def test_ctrl_c_during_generation_drops_the_step_and_the_run_resumes_exactly(tmp_path, unbroken):
    generator = InterruptedGenerator(k=None, left=22)
    run = make_run(tmp_path / "run", make_pipeline(generator=generator))
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 4, state saved; go on with: .*--resume .*run$"):
        run.train()
    assert [row["step"] for row in metrics_of(run.folder.path)] == [1, 2, 3, 4]
    assert Checkpoints(run.folder.checkpoints).steps() == [3, 4]
    make_run(tmp_path / "run").train()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken)


def test_ctrl_c_during_the_update_finishes_the_step_first(tmp_path, unbroken):
    run = make_run(tmp_path / "run", make_pipeline(learner=InterruptedLearner(at=4)))
    with pytest.raises(KeyboardInterrupt, match="after step 5"):
        run.train()
    assert [row["step"] for row in metrics_of(run.folder.path)] == [1, 2, 3, 4, 5]
    make_run(tmp_path / "run").train()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken)


def test_a_second_ctrl_c_during_the_update_falls_back_to_the_checkpoint(tmp_path, unbroken):
    run = make_run(tmp_path / "run", make_pipeline(learner=InterruptedLearner(at=4, times=2)))
    with pytest.raises(KeyboardInterrupt, match="after step 3"):
        run.train()
    assert Checkpoints(run.folder.checkpoints).steps() == [3]
    make_run(tmp_path / "run").train()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken)


def test_ctrl_c_before_the_first_step_is_over_saves_nothing_and_resumes_from_the_start(tmp_path, unbroken):
    run = make_run(tmp_path / "run", make_pipeline(generator=InterruptedGenerator(k=None, left=2)))
    with pytest.raises(KeyboardInterrupt, match="before any state was saved"):
        run.train()
    assert not run.folder.checkpoints.exists()
    make_run(tmp_path / "run").train()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken)


def test_the_handler_of_ctrl_c_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    make_run(tmp_path / "run", max_steps=1).train()
    assert signal.getsignal(signal.SIGINT) is before


def test_resuming_a_finished_run_says_so_and_changes_nothing(tmp_path, unbroken):
    files = [unbroken / "metrics.jsonl", unbroken / "rollouts.jsonl"]
    before = [file.read_bytes() for file in files]
    screen = io.StringIO()
    assert make_run(unbroken, console=Console(file=screen, width=300)).train() is None
    assert "is finished: 7 of 7 steps are done" in screen.getvalue()
    assert [file.read_bytes() for file in files] == before


def test_a_finished_run_can_be_made_longer(tmp_path, unbroken):
    make_run(unbroken, max_steps=9, evaluate_every=2).train()
    make_run(tmp_path / "long", max_steps=9).train()
    assert [row["reward"] for row in metrics_of(unbroken)] == [row["reward"] for row in metrics_of(tmp_path / "long")]


def test_another_seed_cannot_continue_a_run(tmp_path, unbroken):
    pipeline = make_pipeline()
    pipeline.params = type(pipeline.params)(seed=5)
    with pytest.raises(CheckpointError, match="expected the seed of its checkpoint, 0, got 5"):
        make_run(unbroken, pipeline).train()


def test_a_checkpoint_of_other_parts_is_refused(unbroken):
    run = make_run(unbroken, max_steps=9)
    run._stateful["history"] = run.pipeline.source
    with pytest.raises(CheckpointError, match=r"state of \['generator', 'history', 'source'\], got"):
        run.train()


def test_missing_rows_are_refused(unbroken):
    (unbroken / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: expected at least the \d+ bytes it had"):
        make_run(unbroken, max_steps=9).train()


def test_a_full_disk_ends_the_run_with_a_clear_error_and_whole_lines(tmp_path, monkeypatch, unbroken):
    class Full(FakeLearner):
        def save(self, folder):
            raise OSError(28, "No space left on device")

    run = make_run(tmp_path / "run", make_pipeline(learner=Full()))
    with pytest.raises(CapacityError, match="disk full: expected room for a checkpoint"):
        run.train()
    assert not any(run.folder.checkpoints.iterdir())
    make_run(tmp_path / "run").train()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken)


def test_rollouts_are_not_written_when_not_wanted(tmp_path):
    run = make_run(tmp_path / "run", save_rollouts=False)
    run.train()
    assert read_rows(run.folder.rollouts) == []


def test_tensorboard_is_written_beside_the_rows(tmp_path):
    run = make_run(tmp_path / "run", max_steps=1, log_to=("console", "tensorboard"))
    run.train()
    assert len(list((run.folder.path / "tensorboard").iterdir())) == 1
