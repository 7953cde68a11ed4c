import pytest

from leadout.clock import Clock, SimulatedClock
from leadout.records import Stage


def test_seconds_of_a_stage_entered_twice_add_up():
    clock = SimulatedClock()
    for seconds in (1.5, 2.0):
        with clock.stage(Stage.ROLLOUT):
            clock.advance(seconds)
    assert clock.finish_step()[Stage.ROLLOUT] == 3.5


def test_every_stage_is_reported_and_those_not_entered_are_zero():
    clock = SimulatedClock()
    with clock.stage(Stage.TRAIN):
        clock.advance(1.0)
    assert clock.finish_step() == {
        Stage.DATA: 0.0,
        Stage.REFIT: 0.0,
        Stage.ROLLOUT: 0.0,
        Stage.REWARD: 0.0,
        Stage.LOGPROB: 0.0,
        Stage.TRAIN: 1.0,
    }


def test_time_between_stages_belongs_to_none():
    clock = SimulatedClock()
    clock.advance(5.0)
    with clock.stage(Stage.DATA):
        clock.advance(1.0)
    assert sum(clock.finish_step().values()) == 1.0


def test_the_next_step_starts_from_zero():
    clock = SimulatedClock()
    with clock.stage(Stage.DATA):
        clock.advance(1.0)
    clock.finish_step()
    assert clock.finish_step()[Stage.DATA] == 0.0


def test_seconds_are_kept_when_the_stage_raises():
    clock = SimulatedClock()
    with pytest.raises(KeyError), clock.stage(Stage.DATA):
        clock.advance(1.0)
        raise KeyError
    assert clock.finish_step()[Stage.DATA] == 1.0


def test_stages_do_not_nest():
    clock = SimulatedClock()
    with (
        pytest.raises(AssertionError, match="train entered inside stage data"),
        clock.stage(Stage.DATA),
        clock.stage(Stage.TRAIN),
    ):
        pass


def test_listener_hears_each_stage_as_it_begins():
    heard = []
    clock = Clock(on_enter=heard.append)
    with clock.stage(Stage.DATA):
        assert heard == [Stage.DATA]


def test_real_clock_measures_the_block():
    times = iter((10.0, 12.5))
    clock = Clock(now=lambda: next(times))
    with clock.stage(Stage.REWARD):
        pass
    assert clock.finish_step()[Stage.REWARD] == 2.5
