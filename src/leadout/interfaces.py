"""The Protocols that stages implement and pipelines call; at most five methods each.

A pipeline knows these and the records, nothing else: whether a generator runs in this process, on Ray or in vLLM
does not show here. `Drafter` lives inside a generator and is the one Protocol that handles tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from leadout.records import (
    Capabilities,
    Group,
    LearnerLogprobs,
    Prompt,
    RefitReport,
    Request,
    Rollout,
    RolloutId,
    Score,
    TrainReport,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

Running = Literal["finish", "keep_kv", "recompute", "cancel"]


class Generator(Protocol):
    """Turns requests into rollouts. Synchronous use: submit all, collect until nothing is left."""

    @property
    def capabilities(self) -> Capabilities:
        """What this generator can do."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; siblings of one prompt that are submitted together share its prefill."""
        ...

    def collect(self, timeout: float | None = None) -> list[Rollout]:
        """Rollouts that finished since the last call, in any order.

        Blocks until at least one is there or `timeout` seconds passed (None: no limit); empty when nothing is running
        or the time is up.
        """
        ...

    def cancel(self, ids: Sequence[RolloutId]) -> list[Rollout]:
        """Stop these and return what they have, finish = cancelled; unknown ids are ignored."""
        ...

    def refit(self, update: WeightUpdate, running: Running = "finish") -> RefitReport:
        """Take new weights; raises RefitError on any missing, extra, misshapen or corrupt tensor."""
        ...

    def set_awake(self, awake: bool) -> None:
        """Release (False) or take back (True) the memory that is only needed while generating."""
        ...


class Learner(Protocol):
    """Owns the policy that learns, and the drafter's training."""

    def logprobs(self, groups: Sequence[Group]) -> LearnerLogprobs | None:
        """The learner's log-probabilities of these rollouts; None when a separate pass would be redundant."""
        ...

    def step(self, groups: Sequence[Group], logprobs: LearnerLogprobs | None) -> TrainReport:
        """One train stage: every update made from these groups. The version rises by one."""
        ...

    def publish(self) -> WeightUpdate:
        """The present weights of policy and drafter."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything needed to go on exactly from here into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...


class Stateful(Protocol):
    """Whatever else must survive a resume: the generator's acceptance statistics, the data position."""

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable state."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore it."""
        ...


class PromptSource(Stateful, Protocol):
    """Hands out prompts in a reproducible order."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, epochs following one another, each freshly shuffled by the seed."""
        ...


class Scorer(Protocol):
    """The reward stage: rollouts of the prompts, grouped and scored."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, same order."""
        ...


class Task(Protocol):
    """A procedural task: makes rows and judges answers."""

    @property
    def name(self) -> str:
        """As named in `data.train: {task: NAME}`."""
        ...

    def rows(self, num_rows: int, seed: int) -> list[dict[str, object]]:
        """Rows with `prompt` and `answer`; the same for the same seed."""
        ...

    def reward(self, completion: str, row: Mapping[str, object]) -> float:
        """Reward of a decoded completion in [0, 1]."""
        ...


class Auditor(Protocol):
    """Watches the first forward pass over a step's rollouts and says whether they were drawn as declared."""

    def select(self, rollout: Rollout) -> bool:
        """Whether this whole rollout is in the audited sample; depends on its id only."""
        ...

    def observe(self, rollout: Rollout, logits_TV: torch.Tensor) -> None:
        """Take the learner's logits (before temperature) at the positions that produced the rollout's tokens."""
        ...

    def finish_step(self) -> Mapping[str, float]:
        """audit/* metrics of the step; raises AuditError when the run must stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProbs:
    """q of sampled drafts, over the draft vocabulary."""

    values_BKV: torch.Tensor
    """The very numbers the drafts were sampled from, rows sum to 1."""
    columns_BK: torch.Tensor
    """Column of each drafted token, i64."""
    token_ids_V: torch.Tensor | None
    """Policy id of each column, i64[V]; None when the draft vocabulary is the policy's."""

    def take(self, index_R: torch.Tensor) -> DraftProbs:
        """Those of some rows, i64[R]."""
        return replace(self, values_BKV=self.values_BKV[index_R], columns_BK=self.columns_BK[index_R])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a drafter proposes for one round. B rows, K = longest draft."""

    tokens_BK: torch.Tensor
    """Policy token ids, i64; columns at and past `counts_B` are padding."""
    counts_B: npt.NDArray[np.int64]
    """Drafts of each row, at most what was asked for."""
    probs: DraftProbs | None
    """None for a point mass."""
    looked_up_B: npt.NDArray[np.bool_] | None = None
    """Rows whose drafts are point masses although `probs` is there for others, bool[B]; their q is not used. A drafter
    that mixes both kinds sets it in every round; None is a drafter of one kind."""

    def take(self, rows_R: npt.NDArray[np.int64]) -> Draft:
        """The drafts of some rows."""
        index_R = self.tokens_BK.new_tensor(rows_R)
        return Draft(
            tokens_BK=self.tokens_BK[index_R],
            counts_B=self.counts_B[rows_R],
            probs=None if self.probs is None else self.probs.take(index_R),
            looked_up_B=None if self.looked_up_B is None else self.looked_up_B[rows_R],
        )


class Noise(Protocol):
    """Uniforms for the drafter's own sampling, keyed by rollout and position, independent of every other purpose."""

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        """f64[B] in [0, 1): the numbers for draft position `depth` (0-based) of this round's rows."""
        ...


class Drafter(Protocol):
    """Proposes tokens inside a generator. Slots are row numbers owned by the engine, stable from admit to release."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Policy layers whose inputs it needs; () for none."""
        ...

    @property
    def runs_context(self) -> bool:
        """Whether a model of its own runs over every committed token before it drafts, so that resting is paid for."""
        ...

    @property
    def point_mass(self) -> bool:
        """Whether drafts come without probabilities (greedy or looked up)."""
        ...

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """New rows that share one prompt; `prompt_taps_PF`: its tapped layer inputs, concatenated; None if no taps."""
        ...

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Draft up to `lengths_B` tokens for each row (0 allowed), following everything observed so far."""
        ...

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Tokens just committed: row b gained `tokens_BN[b, :counts_B[b]]`.

        `taps_BNF[b, i]` are the tapped states at the position *before* token i, the one whose logits it was drawn from.
        None when the drafter has no taps; the very first token of a row comes with None too, since the prompt's taps
        given to `admit` already hold its state.
        """
        ...

    def release(self, slots: Sequence[int]) -> None:
        """These rows are over."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights (names without the ``draft.`` prefix), all or none."""
        ...
