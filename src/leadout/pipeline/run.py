"""A whole run: steps until the last one, with everything that must survive a crash written down on the way.

Consumes objects that are already built; knows the Protocols only. After each step: evaluation if it is due, a row in
metrics.jsonl, the rollouts in rollouts.jsonl, a checkpoint if it is due. A run that is killed at any moment and
started again on its folder gives the same files as one that was not, apart from measured times and memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from leadout.errors import CheckpointError
from leadout.interfaces import Learner, Stateful
from leadout.metrics import JsonLines, JsonSink, MetricLog, make_sinks, read_rows
from leadout.pipeline.checkpoint import Checkpoints, RunState
from leadout.pipeline.draft_health import DraftHealth
from leadout.pipeline.evaluate import Evaluation
from leadout.pipeline.folder import RunFolder
from leadout.pipeline.interrupts import Interrupts
from leadout.pipeline.progress import Progress
from leadout.pipeline.rollout_lines import rollout_lines
from leadout.pipeline.synchronous import FinishedStep, SynchronousPipeline
from leadout.records import StepReport

_OPTIONAL = {"auditor"}
"""Parts that a resumed run may gain or lose."""


class Run:
    """Runs a pipeline in a run folder, from its newest checkpoint or from the beginning.

    Args:
        folder: the run folder; where it holds checkpoints, the run goes on from the newest.
        pipeline: does the steps.
        progress: shows them.
        max_steps: the last step.
        checkpoint_every: steps between checkpoints; the last step always gets one.
        keep_checkpoints: how many of the newest are kept.
        evaluation: asked every `evaluate_every` steps and after the last; None: never.
        evaluate_every: steps between evaluations.
        save_rollouts: whether to write rollouts.jsonl.
        log_to: further places for metrics: `tensorboard`, `wandb`; `console` is the progress itself.
        stateful: what else must survive a resume, by name (the generator's statistics, …); the source is included.

    """

    def __init__(
        self,
        *,
        folder: RunFolder,
        pipeline: SynchronousPipeline,
        progress: Progress,
        max_steps: int,
        checkpoint_every: int = 10,
        keep_checkpoints: int = 2,
        evaluation: Evaluation | None = None,
        evaluate_every: int = 1,
        save_rollouts: bool = True,
        log_to: Sequence[str] = (),
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.folder = folder
        self.pipeline = pipeline
        self.progress = progress
        self.max_steps = max_steps
        self._checkpoint_every = checkpoint_every
        self._checkpoints = Checkpoints(folder.checkpoints, keep_checkpoints)
        self._evaluation = evaluation
        self._evaluate_every = evaluate_every
        self._save_rollouts = save_rollouts
        self._log_to = tuple(log_to)
        self._stateful = {"source": pipeline.source, **(stateful or {})}
        self._saved_step = 0

    @property
    def _learner(self) -> Learner:
        return self.pipeline.learner

    def train(self) -> FinishedStep | None:
        """Run all steps that are left; returns the last one, None when the run was finished before.

        Raises:
            KeyboardInterrupt: Ctrl-C, with the state saved; its text says how to go on.
            CapacityError: the disk is full.
            CheckpointError: the folder's checkpoint cannot be continued.

        """
        state = self._restore()
        if state is not None and state.step >= self.max_steps:
            self.progress.message(
                f"{self.folder.path} is finished: {state.step} of {self.max_steps} steps are done; "
                f"raise pipeline.max_steps to go on"
            )
            return None
        first = 1 if state is None else state.step + 1
        with (
            closing(JsonLines(self.folder.metrics)) as metrics,
            closing(JsonLines(self.folder.rollouts)) as rollouts,
            closing(MetricLog((JsonSink(metrics), *make_sinks(self._log_to, self.folder.path, first)))) as log,
        ):
            self.progress.start(first)
            try:
                return self._steps(first, state, log, metrics, rollouts)
            finally:
                self.progress.stop()

    def _steps(
        self, first: int, state: RunState | None, log: MetricLog, metrics: JsonLines, rollouts: JsonLines
    ) -> FinishedStep | None:
        """The loop over steps. `state` is always that of the last finished step: what Ctrl-C saves."""
        finished: FinishedStep | None = None
        health = DraftHealth(read_rows(self.folder.metrics))
        with Interrupts(self._explain_hold) as interrupts:
            try:
                for number in range(first, self.max_steps + 1):
                    finished = self.pipeline.step(number, before_update=interrupts.hold)
                    report = health.watched(self._evaluated(finished.report))
                    if self._save_rollouts:
                        rollouts.append(rollout_lines(number, finished.groups))
                    log.write(report)
                    state = self._state(number, metrics, rollouts)
                    self.progress.finish_step(report)
                    if number % self._checkpoint_every == 0 or number == self.max_steps:
                        self._save(state)
                    interrupts.release()
            except KeyboardInterrupt as interrupt:
                whole = not interrupts.holding
                if whole and state is not None and state.step != self._saved_step:
                    interrupts.hold()
                    self._save(state)
                raise KeyboardInterrupt(self._explain_stop()) from interrupt
        return finished

    def _evaluated(self, report: StepReport) -> StepReport:
        """The report with `eval/*` added where evaluation is due, of the weights after the step."""
        due = report.step % self._evaluate_every == 0 or report.step == self.max_steps
        if self._evaluation is None or not due:
            return report
        begin = self.pipeline.clock.now()
        self._evaluation.generator.refit(self._learner.publish())
        metrics = {**report.metrics, **self._evaluation.run()}
        metrics["seconds/eval"] = self.pipeline.clock.now() - begin
        return dataclasses.replace(report, metrics=metrics)

    def _state(self, step: int, metrics: JsonLines, rollouts: JsonLines) -> RunState:
        """A copy of everything but the learner, cut loose from the objects that will go on changing."""
        parts = {name: json.loads(json.dumps(part.state_dict())) for name, part in self._stateful.items()}
        return RunState(
            step=step,
            next_draw=self.pipeline.draws.next_draw,
            seed=self.pipeline.params.seed,
            metrics_bytes=metrics.size,
            rollouts_bytes=rollouts.size,
            parts=parts,
        )

    def _save(self, state: RunState) -> None:
        self._checkpoints.save(state, self._learner)
        self._saved_step = state.step

    def _restore(self) -> RunState | None:
        """Bring everything back to the newest checkpoint, or to the beginning; cut the logs back to it."""
        self._checkpoints.remove_partial()
        state = self._checkpoints.newest()
        if state is not None:
            if state.seed != self.pipeline.params.seed:
                raise CheckpointError(
                    f"{self.folder.path}: expected the seed of its checkpoint, {state.seed}, got "
                    f"{self.pipeline.params.seed}; a run keeps its seed"
                )
            if state.parts.keys() - _OPTIONAL != self._stateful.keys() - _OPTIONAL:
                raise CheckpointError(
                    f"{self.folder.path}: expected a checkpoint with the state of {sorted(self._stateful)}, got "
                    f"{sorted(state.parts)}; resume with the recipe the run was started with"
                )
        _cut(self.folder.metrics, state.metrics_bytes if state else 0)
        _cut(self.folder.rollouts, state.rollouts_bytes if state else 0)
        if state is not None and state.step < self.max_steps:
            self._checkpoints.load_learner(state, self._learner)
            self.pipeline.draws.next_draw = state.next_draw
            for name in self._stateful.keys() & state.parts.keys():
                self._stateful[name].load_state_dict(state.parts[name])
            self.progress.message(f"resuming {self.folder.path} after step {state.step}")
        self._saved_step = 0 if state is None else state.step
        return state

    @staticmethod
    def _explain_hold() -> None:
        """Called in the signal handler, perhaps in the midst of printing: written past the console's own state."""
        os.write(2, b"\nfinishing this step first; Ctrl-C again stops now and loses what came after the checkpoint\n")

    def _explain_stop(self) -> str:
        after = f"after step {self._saved_step}, state saved" if self._saved_step else "before any state was saved"
        return f"stopped {after}; go on with: {self.folder.resume_command}"


def _cut(path: Path, size: int) -> None:
    """Cut a log back to its first `size` bytes.

    Raises:
        CheckpointError: it is shorter than that, so rows of finished steps are missing.

    """
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise CheckpointError(
            f"{path}: expected at least the {size} bytes it had at the checkpoint, got {found}; "
            f"put the file back, or start a new run"
        )
    if found > size:
        os.truncate(path, size)
