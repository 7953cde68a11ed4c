import json
import os
import signal
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from leadout.clock import Clock
from leadout.errors import CheckpointError, LeadoutError
from leadout.metrics import metric_row, read_rows
from leadout.pipeline.kept_batch import Kept, batch_state, kept_batch
from leadout.pipeline.synchronous import Batch
from leadout.records import RefitReport, Request, Stage
from tests.build.tiny_runs import unmeasured
from tests.fakes import FakeGenerator, FakeLearner, FakeSource, make_params, make_prompt, make_rollout
from tests.pipeline.builders import make_pipeline, make_run

PATIENCE = 30.0
"""Seconds after which a thread that waits for another gives up, which fails the test."""


def steps(pipeline, count):
    return [pipeline.step(number) for number in range(1, count + 1)]


def figures(finished):
    """A row without what is measured with a clock."""
    metrics = finished.report.metrics
    kept = {name: value for name, value in metrics.items() if "per_second" not in name and "memory" not in name}
    return finished.report.step, finished.report.version, kept


def texts(finished):
    return [[score.text for score in group.scores] for group in finished.groups]


def test_at_staleness_0_an_asynchronous_run_is_the_synchronous_one():
    ours, theirs = steps(make_pipeline(staleness=0), 5), steps(make_pipeline(), 5)
    assert [figures(one) for one in ours] == [figures(one) for one in theirs]
    assert [texts(one) for one in ours] == [texts(one) for one in theirs]
    assert [one.report.exposed for one in ours] == [None] * 5


def test_all_batches_but_the_first_are_made_by_weights_one_version_old():
    pipeline = make_pipeline(staleness=1)
    reports = [one.report for one in steps(pipeline, 5)]
    assert [report.version for report in reports] == [0, 0, 1, 2, 3]
    assert [report.metrics["lag/max"] for report in reports] == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_prompts_and_draws_are_those_of_a_synchronous_run():
    def asked(pipeline):
        return [(r.rollout_id, r.prompt.id) for one in steps(pipeline, 7) for r in one.requests]

    assert asked(make_pipeline(staleness=1)) == asked(make_pipeline())


def test_nothing_is_generated_after_the_last_step():
    pipeline = make_pipeline(staleness=1, last_step=4)
    finished = steps(pipeline, 4)
    assert len(pipeline.generator.submitted) == sum(len(one.requests) for one in finished) == 16
    assert pipeline.state_dict() == {"ahead": None}


@dataclass
class WaitingLearner(FakeLearner):
    """Trains only once the generator has made a rollout of the next batch."""

    generated: threading.Event = field(default_factory=threading.Event)
    waited: list[bool] = field(default_factory=list)

    def step(self, groups, logprobs):
        self.waited.append(self.generated.wait(PATIENCE))
        return super().step(groups, logprobs)


@dataclass
class AnnouncingGenerator(FakeGenerator):
    """Says that it works, and in which thread."""

    generated: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)

    def collect(self, timeout=None):
        if threading.get_ident() != threading.main_thread().ident:
            self.generated.set()
        self.threads.add(threading.get_ident())
        return super().collect(timeout)


def test_the_next_batch_is_generated_while_the_learner_trains():
    generator = AnnouncingGenerator()
    learner = WaitingLearner(generated=generator.generated)
    make_pipeline(generator, learner, staleness=1).step(1)
    assert learner.waited == [True]
    assert len(generator.threads) == 2, "the first batch here, the second in a thread of its own"


def test_seconds_of_a_hidden_rollout_are_those_of_its_batch_and_the_total_is_what_was_waited():
    class Learner(FakeLearner):
        def step(self, groups, logprobs):
            ticks[0] += 10.0
            return super().step(groups, logprobs)

    class Generator(FakeGenerator):
        def collect(self, timeout=None):
            ticks[0] += 1.0
            return super().collect(timeout)

    ticks = [0.0]
    pipeline = make_pipeline(Generator(), Learner(), clock=Clock(now=lambda: ticks[0]), staleness=1, last_step=3)
    first, second, third = steps(pipeline, 3)
    assert first.report.seconds[Stage.ROLLOUT] == 4.0, "four rollouts"
    # Both threads move this clock, so the second batch's seconds hold the learner's.
    row = metric_row(third.report)
    assert row["exposed/rollout"] == 0.0 and row["seconds/rollout"] >= 4.0
    assert row["seconds/total"] == row["exposed/train"] == 10.0
    assert second.report.wall is second.report.exposed


class Interrupted(FakeLearner):
    def logprobs(self, groups):
        raise KeyboardInterrupt


@dataclass
class EndlessGenerator(FakeGenerator):
    """Has nothing to show for a while, once the first batch is out."""

    cancelled: list[int] = field(default_factory=list)
    batch: int = 4

    def collect(self, timeout=None):
        if len(self.submitted) <= self.batch:
            return super().collect(timeout)
        threading.Event().wait(timeout)
        return []

    def cancel(self, ids):
        self.cancelled.append(len(ids))
        return super().cancel(ids)


def test_ctrl_c_while_learning_gives_the_batch_ahead_up():
    generator = EndlessGenerator()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        make_pipeline(generator, Interrupted(), staleness=1).step(1)
    assert generator.cancelled == [4] and generator.queue == []
    assert threading.active_count() == before


class LosingGenerator(FakeGenerator):
    def collect(self, timeout=None):
        if len(self.submitted) > 4:
            self.queue.clear()
        return super().collect(timeout)


def test_what_goes_wrong_while_generating_ahead_is_raised_by_the_next_step():
    pipeline = make_pipeline(LosingGenerator(), staleness=1)
    assert pipeline.step(1).report.step == 1
    assert (pipeline.source.position, pipeline.draws.next_draw) == (2, 2), "as if nothing had been asked for"
    assert pipeline.state_dict() == {"ahead": None}
    with pytest.raises(LeadoutError, match="4 did not come back"):
        pipeline.step(2)


def test_a_run_that_fails_while_generating_ahead_keeps_the_step_and_goes_on_from_it(tmp_path):
    run = make_run(tmp_path / "run", make_pipeline(LosingGenerator(), staleness=1), checkpoint_every=1)
    with pytest.raises(LeadoutError, match="4 did not come back"):
        run.train()
    assert [row["step"] for row in read_rows(run.folder.metrics)] == [1]
    make_run(tmp_path / "run", make_pipeline(staleness=1)).train()
    lines = read_rows(run.folder.rollouts)
    assert [(line["step"], line["draw"]) for line in lines[::2]] == [
        (step, step * 2 - 2 + i) for step in range(1, 8) for i in (0, 1)
    ]


def test_a_run_that_is_made_longer_begins_again_with_a_batch_of_lag_0(tmp_path):
    make_run(tmp_path / "run", make_pipeline(staleness=1, last_step=3), max_steps=3).train()
    run = make_run(tmp_path / "run", make_pipeline(staleness=1, last_step=5), max_steps=5)
    run.train()
    assert [row["lag/max"] for row in read_rows(run.folder.metrics)] == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_exposed_seconds_add_up_to_the_total_in_rows_with_an_evaluation_too(tmp_path):
    run = make_run(tmp_path / "run", make_pipeline(staleness=1))
    run.train()
    rows = read_rows(run.folder.metrics)
    assert any("eval/mean@2" in row for row in rows)
    for row in rows:
        assert row["seconds/total"] == pytest.approx(sum(row[f"exposed/{stage}"] for stage in Stage))


class AgingLearner(FakeLearner):
    """Its drafter learns in every second step, from the first on."""

    def step(self, groups, logprobs):
        age = float(self.version % 2)
        trained = super().step(groups, logprobs)
        return replace(trained, metrics={**trained.metrics, "draft/age": age})


def test_the_drafters_age_is_that_of_the_one_that_made_the_rollouts():
    rows = [one.report.metrics for one in steps(make_pipeline(FakeGenerator(k=3), AgingLearner(), staleness=1), 5)]
    assert [row["draft/age"] for row in rows] == [0.0, 0.0, 1.0, 0.0, 1.0]
    ages = [[name[-1] for name in row if name.startswith("spec/acceptance_rate_age_")] for row in rows]
    assert ages == [["0"], ["0"], ["1"], ["0"], ["1"]]


@dataclass
class InterruptedLearner(FakeLearner):
    """Ctrl-C arrives while it computes log-probabilities or trains at version `at`, so many `times`."""

    at: int = 3
    where: str = "step"
    times: int = 1

    def logprobs(self, groups):
        self._interrupt("logprobs")
        return super().logprobs(groups)

    def step(self, groups, logprobs):
        self._interrupt("step")
        return super().step(groups, logprobs)

    def _interrupt(self, where):
        if (self.version, self.where) == (self.at, where):
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("where", "times", "kept"),
    [("logprobs", 1, [1, 2, 3]), ("step", 1, [1, 2, 3, 4]), ("step", 2, [1, 2, 3])],
    ids=["before the update", "during the update", "twice during the update"],
)
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_same_rows(tmp_path, where, times, kept):
    whole = make_run(tmp_path / "whole", make_pipeline(staleness=1))
    whole.train()
    run = make_run(tmp_path / "run", make_pipeline(learner=InterruptedLearner(where=where, times=times), staleness=1))
    with pytest.raises(KeyboardInterrupt, match="go on with"):
        run.train()
    assert [row["step"] for row in read_rows(run.folder.metrics)] == kept
    make_run(tmp_path / "run", make_pipeline(staleness=1)).train()
    assert unmeasured(run.folder.path) == unmeasured(whole.folder.path)
    assert run.folder.rollouts.read_bytes() == whole.folder.rollouts.read_bytes()


def test_a_pipeline_goes_on_from_its_state_with_the_batch_made_ahead():
    whole = make_pipeline(FakeGenerator(k=3), staleness=1)
    expected = [figures(one) for one in steps(whole, 5)][3:]
    broken = make_pipeline(FakeGenerator(k=3), staleness=1)
    steps(broken, 3)
    state, source = json.loads(json.dumps(broken.state_dict())), broken.source.state_dict()
    resumed = make_pipeline(FakeGenerator(k=3), broken.learner, source=FakeSource(), staleness=1)
    resumed.draws.next_draw = broken.draws.next_draw
    resumed.load_state_dict(state)
    assert resumed.source.state_dict() == source, "behind the prompts of the batch ahead"
    assert resumed.state_dict() == broken.state_dict()
    assert [figures(resumed.step(number)) for number in (4, 5)] == expected


def test_a_kept_batch_comes_back_to_the_bit():
    prompt = make_prompt(3)
    rollout = make_rollout(7, 1, [5, 6, 2], [2, 0], [1, 0], version=4, prompt=prompt)
    request = Request(rollout_id=rollout.request_id, prompt=prompt, params=make_params())
    refitted = RefitReport(version=4, draft_version=2, checksum="00ff", draft_checksum="aa")
    batch = Batch(requests=(request,), rollouts=(rollout,), refitted=refitted, seconds=1.5, draft_age=2.0)
    state = json.loads(json.dumps(batch_state(batch, {"position": 3})))
    kept = Kept.read(state)
    again = kept_batch(kept, [request])
    assert (kept.source, kept.first_draw) == ({"position": 3}, 7)
    assert (again.refitted, again.seconds, again.draft_age) == (refitted, 1.5, 2.0)
    (back,) = again.rollouts
    for name in ("token_ids", "logprobs", "policy_logprobs"):
        old, new = getattr(rollout, name), getattr(back, name)
        assert old.dtype == new.dtype and np.array_equal(old, new)
    assert np.array_equal(back.rounds.drafted, rollout.rounds.drafted)
    assert np.array_equal(back.rounds.accepted, rollout.rounds.accepted)
    assert (back.spans, back.finish, back.stop, back.request_id) == (
        rollout.spans,
        rollout.finish,
        rollout.stop,
        rollout.request_id,
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: "nonsense",
        lambda state: {**state, "refitted": {"version": 1}},
        lambda state: {**state, "rollouts": state["rollouts"][:-1]},
        lambda state: {**state, "rollouts": [{}] * len(state["rollouts"])},
    ],
)
def test_a_damaged_batch_is_refused_in_one_line(damage):
    pipeline = make_pipeline(staleness=1)
    pipeline.step(1)
    state = damage(pipeline.state_dict()["ahead"])
    with pytest.raises(CheckpointError, match=r"cannot resume: .*(expected|cannot be read)"):
        make_pipeline(staleness=1).load_state_dict({"ahead": state})
