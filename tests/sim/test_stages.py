"""Seconds of the stages that are not generation."""

from __future__ import annotations

import pytest

from leadout.records import Stage
from leadout.sim.project import project
from leadout.sim.stages import reward_seconds
from tests.sim.scenarios import asynchronous, small


@pytest.mark.parametrize(
    ("samples", "seconds", "workers", "rollouts", "expected"),
    [
        (512, 10.0, 1, 100.0, 5120 - 100 + 10),  # one worker scores for 5,120 s, of which 100 beside the rollouts
        (512, 10.0, 32, 100.0, 160 - 100 + 10),
        (512, 10.0, 64, 100.0, 10.0),  # 80 s of work beside 100 s of rollouts: the last sample
        (10, 2.0, 4, 0.0, 6.0),  # nothing to overlap with: three waves
        (10, 0.0, 1, 5.0, 0.0),
    ],
)
def test_overlapped_scoring_exposes_what_the_workers_are_behind_by(samples, seconds, workers, rollouts, expected):
    found = reward_seconds(samples, seconds, workers, overlapped=True, rollout_seconds=rollouts)
    assert found == pytest.approx(expected)


def test_scoring_after_the_rollouts_takes_whole_waves():
    assert reward_seconds(130, 10.0, 64, overlapped=False, rollout_seconds=1e6) == 30.0


def test_a_step_waits_for_a_reward_that_one_worker_scores():
    projection = project(small("reward.seconds_per_sample=10", "reward.workers=1"))
    assert projection.exposed[Stage.REWARD] == pytest.approx(128 * 10 - projection.rollout_s + 10)


@pytest.mark.parametrize("seconds", [0.2, 0.5, 10.0])
def test_an_asynchronous_step_is_never_shorter_than_its_scoring(seconds):
    words = (f"reward.seconds_per_sample={seconds}", "reward.workers=1")
    slow, free = project(asynchronous(1, *words)), project(asynchronous(1))
    assert slow.step_s >= 128 * seconds * (1 - 1e-12)
    assert slow.step_s >= free.step_s * (1 - 1e-12)
