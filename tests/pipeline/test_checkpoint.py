import json

import pytest

from leadout.errors import CapacityError, CheckpointError
from leadout.pipeline.checkpoint import Checkpoints, RunState
from tests.fakes import FakeLearner


def state(step=3):
    return RunState(
        step=step, next_draw=12, seed=1, metrics_bytes=100, rollouts_bytes=200, parts={"source": {"epoch": 1}}
    )


def test_state_and_learner_come_back_as_they_were_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state(), FakeLearner(version=3, weight=1.25))
    learner = FakeLearner()
    newest = checkpoints.newest()
    checkpoints.load_learner(newest, learner)
    assert newest == state()
    assert (learner.version, learner.weight) == (3, 1.25)


def test_the_newest_n_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 10, 11):
        checkpoints.save(state(step), FakeLearner())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000010", "step_000011"]


def test_without_checkpoints_there_is_no_newest(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints").newest() is None


def test_unfinished_and_foreign_folders_are_passed_over(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(state(3), FakeLearner())
    for name in ("step_000009", "step_000008.partial", "best", "step_x"):
        (folder / name).mkdir()
    assert checkpoints.newest().step == 3


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "step_000008.partial" / "learner").mkdir(parents=True)
    Checkpoints(tmp_path).remove_partial()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected the state of a run, got something else"),
        ("[]", "expected the state of a run, got something else"),
        ('{"format": 1, "step": 3}', "expected the state of a run, got something else"),
        ('{"format": 1, "step": 3, "surprise": 1}', "expected the state of a run, got something else"),
    ],
)
def test_a_state_that_is_not_one_is_refused_by_name(tmp_path, text, message):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(state(3), FakeLearner())
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"step_000003/state\.json: {message}"):
        checkpoints.newest()


def test_another_format_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(state(3), FakeLearner()) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="expected format 1, got 2"):
        checkpoints.newest()


def test_a_folder_renamed_to_another_step_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(3), FakeLearner()).rename(tmp_path / "step_000007")
    with pytest.raises(CheckpointError, match="expected step 7, got 3"):
        checkpoints.newest()


class Failing(FakeLearner):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def save(self, folder):
        (folder / "half").write_text("x")
        raise self.error


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(3), FakeLearner())
    with pytest.raises(CapacityError, match="disk full"):
        checkpoints.save(state(4), Failing(OSError(28, "No space left on device")))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_a_full_disk_is_recognised_whatever_the_library_calls_it(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    with pytest.raises(CapacityError, match="disk full"):
        Checkpoints(tmp_path).save(state(4), Failing(RuntimeError("PytorchStreamWriter failed writing file")))


def test_any_other_failure_passes_through_and_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        Checkpoints(tmp_path).save(state(4), Failing(RuntimeError("broken")))
    assert list(tmp_path.iterdir()) == []
