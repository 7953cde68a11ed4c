"""The same stages at other times: while the learner trains on one batch, the generator already makes the next.

A step refits first, so the batch that it begins is made by weights that have not learnt from the present one: its lag
is 1 when its turn comes, and the loss corrects for it (`grpo.importance_sampling_correction`). Whether a batch may
begin is asked of `leadout.pipeline.lag`; with `max_staleness: 0` none may, and the run is the synchronous one, row by
row. The batch made ahead is part of a checkpoint, since the weights that made it are gone by then. After the last step
there is none, so a run that is made longer begins again with a batch of lag 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from leadout.errors import CheckpointError
from leadout.pipeline.ahead import GeneratedAhead
from leadout.pipeline.generate import generate
from leadout.pipeline.kept_batch import Kept, batch_state, kept_batch
from leadout.pipeline.lag import may_start
from leadout.pipeline.requests import make_requests
from leadout.pipeline.synchronous import Batch, FinishedStep, Learnt, SynchronousPipeline
from leadout.records import RefitReport, Request, Stage


@dataclass(slots=True, kw_only=True)
class AsynchronousPipeline(SynchronousPipeline):
    """Generates one batch ahead; also `leadout.interfaces.Stateful`."""

    max_staleness: int
    """Policy versions that a batch may be old when it is learnt from, 0 or 1."""
    last_step: int
    """After it nothing is generated ahead."""
    _ahead: Batch | None = field(default=None, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    """What generating ahead raised."""
    _source_before: Mapping[str, object] = field(default_factory=dict, init=False)
    """Of the prompts' source before the batch ahead took its own."""

    def step(self, number: int, before_update: Callable[[], None] = lambda: None) -> FinishedStep:
        """Run step `number` (1-based); `before_update` as in a synchronous step."""
        if self._failure is not None:
            raise self._failure
        batch, self._ahead = self._ahead, None
        refitted = self.refit()
        if batch is None:
            batch = self._generate(refitted)
        if number == self.last_step or not may_start(number - 1, 1, refitted.version, self.max_staleness):
            return self.finish(number, batch, self.learn(batch, before_update))
        before, first_draw = self.source.state_dict(), self.draws.next_draw
        requests = self.ask()
        with GeneratedAhead(self.generator, requests, self.clock.now) as ahead:
            learnt = self.learn(batch, before_update)
            with self.clock.stage(Stage.ROLLOUT):
                self._failure = ahead.failure()
        if self._failure is None:
            self._keep(requests, ahead, refitted, learnt, before)
        else:
            # This step is whole; the next one raises, and a resumed run asks for the same rollouts again.
            self.source.load_state_dict(before)
            self.draws.next_draw = first_draw
        return self.finish(number, batch, learnt)

    def _keep(
        self,
        requests: Sequence[Request],
        ahead: GeneratedAhead,
        refitted: RefitReport,
        learnt: Learnt,
        source_before: Mapping[str, object],
    ) -> None:
        """Have the batch ahead ready for the next step."""
        rollouts, seconds = ahead.result()
        self._source_before = source_before
        self._ahead = Batch(
            requests=tuple(requests),
            rollouts=tuple(rollouts),
            refitted=refitted,
            seconds=seconds,
            # The drafter that this step's refit published is the one that the learner held in this step.
            draft_age=learnt.trained.metrics.get("draft/age"),
        )

    def _generate(self, refitted: RefitReport) -> Batch:
        """A batch that nothing hides: the first one, or every one where none may begin ahead."""
        requests = self.ask()
        begin = self.clock.now()
        with self.clock.stage(Stage.ROLLOUT):
            rollouts = generate(self.generator, requests)
        seconds = self.clock.now() - begin if self.max_staleness else None
        return Batch(requests=tuple(requests), rollouts=tuple(rollouts), refitted=refitted, seconds=seconds)

    def state_dict(self) -> dict[str, object]:
        """The batch ahead, JSON-serialisable; its prompts as the state that their source had before them."""
        if self._ahead is None:
            return {"ahead": None}
        return {"ahead": batch_state(self._ahead, self._source_before)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it; leaves the source behind the batch's prompts, where its own state has it.

        Raises:
            CheckpointError: the state is not one of a batch of this run.

        """
        self._ahead = None
        if state["ahead"] is None:
            return
        kept = Kept.read(state["ahead"])
        self.source.load_state_dict(kept.source)
        prompts = self.source.take(self.num_prompts)
        requests = make_requests(prompts, self.params, self.num_generations, first_draw=kept.first_draw)
        if len(requests) != len(kept.rollouts):
            raise CheckpointError(
                f"cannot resume: expected {len(requests)} rollouts made ahead, got {len(kept.rollouts)}; a run keeps "
                "rollout.num_prompts and rollout.num_generations"
            )
        self._source_before = kept.source
        self._ahead = kept_batch(kept, requests)
