"""Puts fakes together into pipelines and runs."""

from __future__ import annotations

import functools
import io
from pathlib import Path

from rich.console import Console

from leadout.clock import Clock
from leadout.pipeline.asynchronous import AsynchronousPipeline
from leadout.pipeline.evaluate import Evaluation
from leadout.pipeline.folder import RunFolder
from leadout.pipeline.progress import Progress
from leadout.pipeline.requests import DrawCounter
from leadout.pipeline.run import Run
from leadout.pipeline.synchronous import SynchronousPipeline
from tests.fakes import FakeGenerator, FakeLearner, FakeScorer, FakeSource, make_params, make_prompt


def make_pipeline(
    generator=None, learner=None, clock=None, source=None, staleness=None, last_step=7
) -> SynchronousPipeline:
    """Two prompts of two rollouts each per step; asynchronous where a staleness is given."""
    make = SynchronousPipeline
    if staleness is not None:
        make = functools.partial(AsynchronousPipeline, max_staleness=staleness, last_step=last_step)
    return make(
        source=source or FakeSource(),
        generator=generator or FakeGenerator(k=None),
        scorer=FakeScorer(),
        learner=learner or FakeLearner(),
        params=make_params(),
        num_prompts=2,
        num_generations=2,
        clock=clock or Clock(),
        draws=DrawCounter(),
    )


def make_run(path: Path, pipeline=None, max_steps=7, evaluate=True, console=None, **options) -> Run:
    """A run on fakes; goes on where `path` is a run folder already."""
    pipeline = pipeline or make_pipeline()
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, "name: fake\n")
    evaluation = Evaluation(
        prompts=(make_prompt(0), make_prompt(1)),
        generator=pipeline.generator,
        scorer=pipeline.scorer,
        params=make_params(seed=99),
        num_generations=2,
    )
    return Run(
        folder=folder,
        pipeline=pipeline,
        progress=Progress(console or Console(file=io.StringIO(), width=200), max_steps),
        max_steps=max_steps,
        evaluation=evaluation if evaluate else None,
        stateful={"generator": pipeline.generator}
        | ({"pipeline": pipeline} if isinstance(pipeline, AsynchronousPipeline) else {}),
        **{"checkpoint_every": 3, "evaluate_every": 2, **options},
    )
