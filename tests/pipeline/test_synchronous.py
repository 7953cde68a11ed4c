from leadout.clock import Clock, SimulatedClock
from leadout.records import Stage
from tests.fakes import FakeGenerator, FakeLearner
from tests.pipeline.builders import make_pipeline


def test_stages_run_in_the_order_of_their_names():
    seen = []
    make_pipeline(clock=Clock(on_enter=seen.append)).step(1)
    assert seen == list(Stage)


def test_rollouts_are_made_by_the_weights_that_learn_from_them():
    pipeline = make_pipeline()
    versions = [pipeline.step(number).report for number in (1, 2, 3)]
    assert [report.version for report in versions] == [0, 1, 2]
    assert [report.metrics["lag/max"] for report in versions] == [0.0, 0.0, 0.0]
    assert pipeline.generator.version == 2 and pipeline.learner.version == 3


def test_seconds_are_counted_for_the_stage_that_spent_them():
    clock = SimulatedClock()
    generator = FakeGenerator(k=0, clock=clock, seconds_per_round=0.5)
    finished = make_pipeline(generator=generator, clock=clock).step(1)
    report = finished.report
    assert report.seconds[Stage.ROLLOUT] == 0.5 * report.metrics["spec/rounds"]
    assert sum(report.seconds.values()) == report.seconds[Stage.ROLLOUT]
    expected = report.metrics["tokens/completion"] / report.seconds[Stage.ROLLOUT]
    assert report.metrics["rollout/tokens_per_second"] == expected
    assert report.metrics["step/tokens_per_second"] == expected


def test_speeds_are_absent_when_no_time_passed():
    metrics = make_pipeline(clock=SimulatedClock()).step(1).report.metrics
    assert "rollout/tokens_per_second" not in metrics and "step/tokens_per_second" not in metrics


def test_what_the_logprob_pass_measured_first_counts():
    report = make_pipeline(learner=FakeLearner(separate_logprobs=True)).step(1).report
    assert report.metrics["entropy"] == 2.0
    assert report.metrics["loss"] < 0.0


def test_checksum_is_of_the_weights_that_made_the_rollouts():
    pipeline = make_pipeline()
    before = f"{pipeline.learner.publish().manifest['policy'].crc32:08x}"
    assert pipeline.step(1).report.metrics["policy/checksum"] == before
    assert "draft/checksum" not in pipeline.step(2).report.metrics


def test_the_step_can_be_dropped_until_the_learner_changes():
    pipeline = make_pipeline()
    versions = []
    pipeline.step(1, before_update=lambda: versions.append(pipeline.learner.version))
    assert versions == [0]


def test_every_request_of_the_step_is_in_a_group():
    finished = make_pipeline().step(1)
    asked = [request.rollout_id for request in finished.requests]
    assert asked == [rollout.request_id for group in finished.groups for rollout in group.rollouts]
    assert len(asked) == 4
