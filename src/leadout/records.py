"""The frozen records that flow between the stages of a step.

``data`` makes `Prompt`, ``rollout`` turns it into `Rollout`, ``reward`` scores rollouts into a `Group`,
``logprob`` and ``train`` consume groups, ``refit`` carries a `WeightUpdate` back to the generator. Records may
cross processes, so they hold numpy arrays and plain values only; nothing here imports torch.

Axes in names: T tokens of one rollout, R rounds of one rollout, P tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int32]
ShortArray = npt.NDArray[np.int16]
FloatArray = npt.NDArray[np.floating]
"""f32, or f64 where the engine computes in float64."""


class Stage(StrEnum):
    """The stages of a step in the reference paper's order; timers, logs and the simulator use these names only."""

    DATA = "data"
    REFIT = "refit"
    ROLLOUT = "rollout"
    REWARD = "reward"
    LOGPROB = "logprob"
    TRAIN = "train"


class Finish(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    ERROR = "error"


class Source(StrEnum):
    """Who made the tokens of a span: the policy, or the caller (tool output, a given prefix)."""

    POLICY = "policy"
    GIVEN = "given"


class RolloutId(NamedTuple):
    """Names one draw of the run; never reused across epochs, retries or versions. Example: ``RolloutId(17, 3)``."""

    draw: int
    """Global count of prompt draws; the same data row drawn twice has two numbers."""
    sibling: int
    """Index within the group, 0 <= sibling < num_generations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One data row, ready to be generated from.

    Example: ``Prompt(id="arithmetic/12", token_ids=np.array([1, 5], np.int32), text="What is 2 + 3?", answer="5")``
    """

    id: str
    """Names the data row and is stable over epochs; history drafters key on it."""
    token_ids: IntArray
    """The rendered prompt, i32[P], special tokens included."""
    text: str
    """The rendered prompt as text (after the chat template)."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat messages the text was rendered from; None for plain strings."""
    answer: str | None = None
    """Ground truth for the reward, if the row has one."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The row's other columns, handed to reward functions under their own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The law a rollout is drawn from. Filters act in transformers' order: penalties, temperature, top-k, top-p, min-p.

    Example: ``SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64, seed=1)``
    """

    temperature: float = 1.0
    """0 is greedy: the argmax, lowest id on ties."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """Keep the k most probable tokens, ties at the k-th kept; 0 or -1 is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability; 0 is off."""
    repetition_penalty: float = 1.0
    """Over prompt and output, drafts of the round included; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output; 0 is off."""
    max_new_tokens: int = 64
    """Exact upper bound of the tokens generated."""
    stop: tuple[str, ...] = ()
    """Strings that end a rollout; the token that completes one is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids; the token itself is kept."""
    seed: int = 0
    """The run's seed; each rollout draws its own numbers from (seed, rollout id, position, purpose)."""
    trace: bool = False
    """Ask for the drafts and their probabilities (audit only); refused by generators that cannot."""

    def __post_init__(self) -> None:
        checks = (
            (
                self.temperature == 0.0 or self.temperature >= 1e-5,
                f"temperature must be 0 (greedy) or at least 1e-5, got {self.temperature}",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.top_k >= -1, f"top_k must be >= -1 (0 or -1 is off), got {self.top_k}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}"),
            (
                0.01 <= self.repetition_penalty <= 100.0,
                f"repetition_penalty must be between 0.01 and 100, got {self.repetition_penalty}",
            ),
            (self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}"),
            (all(self.stop), "stop strings must not be empty"),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p cut the support."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the law depends on which tokens came before, beyond the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_policy_law(self) -> bool:
        """Whether tokens are drawn from softmax(logits / temperature) itself, nothing else applied."""
        return not (self.is_greedy or self.has_filters or self.has_penalties)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Asks a generator for one rollout."""

    rollout_id: RolloutId
    """Names the rollout; also what its random numbers are keyed by."""
    prompt: Prompt
    """What to continue."""
    params: SamplingParams
    """The law to draw from and when to stop."""
    given: Rollout | None = None
    """Tokens already made (a partial rollout, an earlier turn), kept as they are and continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens of one origin. The spans of a rollout are its version stamp and its loss mask."""

    length: int
    """Tokens in the span, > 0."""
    source: Source
    """Only `Source.POLICY` spans are trained on."""
    version: int
    """Version of the weights that produced the logits of these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """What happened in each round of one rollout; a plain step is a round with nothing drafted.

    The first generated token comes from the prefill and belongs to no round. A round commits its accepted drafts and
    one more token (correction or bonus), except that the last round may be cut by the end of the rollout.
    """

    drafted: ShortArray
    """Drafts verified, i16[R]; 0 for a plain step."""
    accepted: ShortArray
    """Drafts accepted and committed, i16[R]; never counts tokens after the end of the rollout."""
    looked_up: npt.NDArray[np.bool_] | None = None
    """Rounds whose drafts were looked up where a model drafts in others, bool[R]; None: no such round."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The drafts of one rollout, position by position; kept only while a rollout is audited.

    Rows are verified positions in order of rounds, rejected ones included; positions after the first rejection of a
    round and after the end of the rollout are left out. D = such rows, Vd = draft vocabulary.
    """

    round_D: IntArray
    """Index into `Rounds` of the round this draft belongs to."""
    position_D: IntArray
    """Index into `Rollout.token_ids` of the token that was emitted at this position."""
    draft_D: IntArray
    """The drafted token id."""
    accepted_D: npt.NDArray[np.bool_]
    """Whether the draft was accepted."""
    draft_prob_D: FloatArray
    """q(draft); 1 for a point mass."""
    probs_DV: FloatArray | None
    """q over the draft vocabulary, f32[D, Vd]; None for point-mass drafters."""
    token_ids_V: IntArray | None
    """Policy ids of the draft vocabulary, i32[Vd]; None when it is the whole vocabulary."""

    def take(self, kept_D: npt.NDArray[np.bool_]) -> Trace:
        """Some of the rows, bool[D]."""
        return replace(
            self,
            round_D=self.round_D[kept_D],
            position_D=self.position_D[kept_D],
            draft_D=self.draft_D[kept_D],
            accepted_D=self.accepted_D[kept_D],
            draft_prob_D=self.draft_prob_D[kept_D],
            probs_DV=None if self.probs_DV is None else self.probs_DV[kept_D],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished (or cancelled) generation.

    Example: token_ids [7, 9, 2] with eos id 2, spans (3 policy tokens of version 4), rounds drafted [3], accepted [1]:
    7 came from the prefill, 9 was drafted and accepted, 2 was drawn as correction and ended the row.
    """

    request_id: RolloutId
    """The request answered."""
    prompt: Prompt
    """The prompt continued."""
    token_ids: IntArray
    """Generated tokens, i32[T]; keeps the EOS and the token that completes a stop string."""
    logprobs: FloatArray
    """log of the law each token was drawn from, f32[T]: after penalties, temperature and filters; 0 when greedy."""
    policy_logprobs: FloatArray
    """log softmax(logits / temperature) over the full vocabulary, no filters or penalties, f32[T]; T=0 counts as 1."""
    spans: tuple[Span, ...]
    """Lengths add up to T."""
    rounds: Rounds
    """Drafts and acceptances."""
    finish: Finish
    """Why it ended."""
    stop: int | str | None = None
    """The end-of-sequence id or stop string that ended it, if one did."""
    trace: Trace | None = None
    """The drafts, when `SamplingParams.trace` asked for them."""

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return int(self.token_ids.shape[0])

    @property
    def is_truncated(self) -> bool:
        """Whether it ended by running out of tokens rather than by its own decision."""
        return self.finish in (Finish.LENGTH, Finish.CONTEXT)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True where the policy made the token, bool[T]."""
        parts = [np.full(span.length, span.source is Source.POLICY) for span in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    @property
    def versions(self) -> IntArray:
        """Weight version of each token, i32[T]."""
        parts = [np.full(span.length, span.version, np.int32) for span in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the reward stage says of one rollout."""

    reward: float
    """Weighted sum of the parts that could be scored."""
    parts: Mapping[str, float]
    """Reward of each function by name; functions that returned None are left out."""
    text: str
    """The decoded completion, cut before a stop string."""
    masked: bool = False
    """True when the rollout must not be trained on (a truncated one under `mask_truncated_completions`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one prompt draw with their scores, in sibling order."""

    prompt: Prompt
    """What all of them continued."""
    rollouts: tuple[Rollout, ...]
    """num_generations rollouts."""
    scores: tuple[Score, ...]
    """One per rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor of a weight update must be."""

    shape: tuple[int, ...]
    """Sizes of its axes."""
    dtype: str
    """As in safetensors: "BF16", "F32", "F64", "I64", "BOOL"."""
    crc32: int
    """zlib.crc32 of the bytes sent, row-major, before any packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """What is fixed for a drafter's life; a generator refuses weights that come with another spec."""

    method: str
    """"eagle3", "mtp", …"""
    layer_ids: tuple[int, ...]
    """Tapped policy layers: tap i is the residual stream entering layer i."""
    vocab_size: int
    """Draft vocabulary."""
    vocab_map_crc32: int
    """crc32 of the int64 policy ids of the draft vocabulary; 0 for the identity."""
    rope: str
    """Canonical text of the rope parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """New weights on their way to a generator: Hugging Face names, tied tensors once, drafter under ``draft.``."""

    version: int
    """Policy version: number of finished train stages."""
    draft_version: int
    """Drafter version: number of train stages in which the drafter learnt; 0 when there is none."""
    manifest: Mapping[str, TensorSpec]
    """Every tensor that will come, by name."""
    chunks: Iterator[tuple[str, torch.Tensor]]
    """The tensors, once, in any order."""
    draft_spec: DraftSpec | None = None
    """The drafter's fixed part; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """What a generator says after taking a weight update."""

    version: int
    """Policy version now serving."""
    draft_version: int
    """Drafter version now serving."""
    checksum: str
    """crc32 over the received policy tensors' crc32s in name order, 8 hex digits."""
    draft_checksum: str | None
    """The same for the drafter; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnerLogprobs:
    """The learner's own log-probabilities of a list of groups, before any update on them."""

    values: tuple[FloatArray, ...]
    """Per rollout, groups in order and siblings in order: log softmax(logits / temperature) of each token, f32[T]."""
    version: int
    """Learner version they were computed at."""
    metrics: Mapping[str, float]
    """What was measured on the way: entropy, mismatch, drafter acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What one train stage did."""

    version: int
    """Version after the stage."""
    draft_version: int
    """Drafter version after the stage."""
    metrics: Mapping[str, float]
    """loss, grad_norm, clip_ratio/…, entropy, draft/…"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step, as a row of metrics.jsonl."""

    step: int
    """1-based."""
    version: int
    """Policy version that made the rollouts."""
    seconds: Mapping[Stage, float]
    """Seconds of each stage."""
    metrics: Mapping[str, float | str]
    """Everything else, by metric name."""
    exposed: Mapping[Stage, float] | None = None
    """Those of them that no other stage hid, which add up to the step; None: all."""

    @property
    def wall(self) -> Mapping[Stage, float]:
        """Seconds by which each stage made the step longer."""
        return self.seconds if self.exposed is None else self.exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a generator can do; callers ask before they rely on it."""

    trace: bool
    """Can return `Trace`."""
    exact_seeds: bool
    """Random numbers follow (seed, rollout id, position, purpose) as defined by the project."""
    policy_logprobs: bool
    """Returns the unfiltered log-probabilities even under filters."""
    in_flight_refit: frozenset[str]
    """Modes of `refit(running=...)` supported."""
    methods: frozenset[str]
    """Drafting methods supported."""
    max_context: int
    """Prompt plus completion tokens of one row."""
