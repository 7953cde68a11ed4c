"""Every knob of a run, with its default, in one place.

A recipe is a small YAML file; `leadout.recipe` merges it with ``a.b=c`` overrides and validates it here. Unknown keys
are refused. Only `leadout.build` reads these objects: everything below it takes plain arguments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
MOST_ROLLOUTS = 1_000_000
"""Completions of one step."""

_LOSS_TERM = r"(\d+(\.\d+)?\*)?(ce|kl|tv|lk)"


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, numbers finite and never true or false."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would read true as 1."""
        types = _plain_types(cls.model_fields[str(info.field_name)].annotation)
        items = value if isinstance(value, list | tuple) else [value]
        if bool not in types and types & {int, float} and any(isinstance(item, bool) for item in items):
            raise PydanticKnownError("int_type" if int in types else "float_type")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: int of ``tuple[int, ...] | None``."""
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*(_plain_types(each) for each in inner))


class Dataset(Section):
    """Where rows come from: exactly one of `task`, `path`, `hub`."""

    task: str | None = None
    """Name of a procedural task: `arithmetic`, or `reasoning_gym:NAME`."""
    task_args: dict[str, int | float | str | bool] = {}
    """Arguments of the task."""
    path: Path | None = None
    """A .jsonl, .json or .parquet file."""
    hub: str | None = None
    """A data set id for the `datasets` library; ``ID:CONFIGURATION`` where it has several (``openai/gsm8k:main``)."""
    split: str = "train"
    """Split of a hub data set."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    answer_key: str | None = "answer"
    """Column with the ground truth; null when there is none."""
    num_rows: Positive | None = None
    """Use only this many rows (for a task: how many are made, 1,000 by default)."""

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        named = [name for name in ("task", "path", "hub") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"expected exactly one of task, path, hub; got {', '.join(named) or 'none'}")
        return self


class Data(Section):
    """Stage data: rows -> prompts."""

    train: Dataset = Dataset(task="arithmetic")
    eval: Dataset | None = None
    apply_chat_template: bool | Literal["auto"] = "auto"
    """`auto`: messages and, if the tokenizer has a template, plain strings too."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    system_prompt: str | None = None
    max_prompt_length: Positive | None = None
    """Tokens; null leaves only the context as bound."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a longer prompt."""
    shuffle: bool = True


class LeadoutSpeculation(Section):
    """Keys of `speculative_config` beyond vLLM's."""

    max_draft_length: Positive = 5
    """Largest k that `auto` may choose."""
    cost_profile: Path | None = None
    """Measured seconds by shape; makes `auto` independent of the clock, and so reproducible."""
    draft_temperature: float = Field(default=1.0, gt=0.0)
    """Temperature of the draft relative to the policy's; any value is lossless."""
    history_tokens: Positive = 2_000_000
    """Tokens of finished rollouts that `history` keeps in all, 4 bytes each; the least used prompts' go first."""
    history_rollouts: Positive = 32
    """Rollouts it keeps of one prompt."""


HeadMethod = Literal["eagle3", "parallel", "mtp"]
"""Draft heads on the policy's states."""

Method = Literal[
    "eagle3",
    "parallel",
    "mtp",
    "ngram",
    "history",
    "small_model",
    "history+eagle3",
    "history+parallel",
    "history+mtp",
    "history+small_model",
]
BenchMethod = Literal["none", "noisy_policy", Method]
"""Drafters that are measured one at a time; `none` decodes plainly, `noisy_policy` is the policy with noise."""


def head_of(method: BenchMethod) -> HeadMethod | None:
    """The kind of draft head of a method, alone or behind a look-up; None where no head drafts."""
    name = method.removeprefix("history+")
    return next((kind for kind in get_args(HeadMethod) if kind == name), None)


class SpeculativeConfig(Section):
    """How rollouts are drafted; keys as in vLLM."""

    method: Method = "eagle3"
    """`history+…` looks earlier rollouts up first and asks the model where nothing matches, or where it pays."""
    model: str | None = None
    """Draft head folder, or folder, alias or hub id of a small model. null starts an untrained head, or takes the one
    that came with the policy (mtp)."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=16)] | Literal["auto"] = "auto"
    """k: fixed, 0 = off, or chosen every round."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    """`probabilistic` samples the draft and keeps its q."""
    rejection_sample_method: Literal["standard"] = "standard"
    """The exact rule; there is no other."""
    prompt_lookup_min: Positive = 1
    """Shortest suffix that `ngram` and `history` draft from."""
    prompt_lookup_max: Positive = 3
    """Longest suffix that `ngram` tells apart; `history` always takes the longest match."""
    leadout: LeadoutSpeculation = LeadoutSpeculation()

    @model_validator(mode="after")
    def _lookup_order(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be <= prompt_lookup_max, "
                f"got {self.prompt_lookup_min} > {self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _small_model_is_named(self) -> SpeculativeConfig:
        if self.draft_model == "small_model" and self.model is None:
            raise ValueError(f"method {self.method} needs `model`: the folder of a model with the policy's tokenizer")
        return self

    @model_validator(mode="after")
    def _only_a_model_has_a_folder(self) -> SpeculativeConfig:
        if self.draft_model is None and self.model is not None:
            raise ValueError(f"method {self.method} drafts without a model, got model {self.model}; remove `model`")
        return self

    @property
    def draft_head(self) -> HeadMethod | None:
        """The kind of draft head, if one drafts."""
        return head_of(self.method)

    @property
    def draft_model(self) -> HeadMethod | Literal["small_model"] | None:
        """The model that drafts, if one does."""
        return "small_model" if self.method.endswith("small_model") else self.draft_head

    @property
    def looks_back(self) -> bool:
        """Whether finished rollouts are kept and looked up."""
        return self.method.startswith("history")


class RolloutSection(Section):
    """Stage rollout: prompts -> completions."""

    backend: Literal["native"] = "native"
    num_prompts: Positive = 8
    """Prompts per step."""
    num_generations: Positive = 8
    """Completions per prompt."""
    max_completion_length: Positive = 64
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_model_len: Positive | None = None
    """Prompt plus completion tokens; null takes what the run needs, at most the model's own."""
    max_num_seqs: Positive | None = None
    """Rows generated at once; null takes all of a step that fit `kv_cache_memory`."""
    kv_cache_memory: float = Field(default=4.0, gt=0.0)
    """GiB that the key-value cache may take, with what the drafter keeps of each row."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Of the generating engine."""
    speculative_config: SpeculativeConfig | None = SpeculativeConfig()
    """null: plain decoding."""

    @model_validator(mode="after")
    def _a_step_is_of_bounded_size(self) -> RolloutSection:
        count = self.num_prompts * self.num_generations
        if count > MOST_ROLLOUTS:
            raise ValueError(
                f"expected num_prompts * num_generations <= {MOST_ROLLOUTS:,} completions a step, got {count:,}"
            )
        return self


class Draft(Section):
    """How the drafter learns; what it is stands in `rollout.speculative_config`."""

    enabled: bool | Literal["auto"] = "auto"
    """`auto`: on for draft heads; a small model learns (is distilled) with `true` only."""
    loss_fn: str = "lk"
    """`ce`, `kl`, `tv`, `lk`, or a weighted sum such as `ce+tv` or `0.3*ce+0.7*tv`."""
    ttt_steps: Annotated[int, Field(ge=1, le=8)] = 3
    """Unrolled steps of test-time training."""
    ttt_decay: Share = 0.8
    """Weight of unrolled step i is decay**i."""
    learning_rate: float | None = Field(default=None, gt=0.0)
    """null: 1e-3 for a drafter that starts untrained, 1e-4 for one that was trained before."""
    warmup_steps: Count = 20
    """Updates, not steps of the run."""
    lr_scheduler_type: Literal["constant", "linear"] = "constant"
    """`linear` falls to 5 % of the learning rate by the end of the run."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    passes: Positive = 1
    """Optimizer passes over each step's rollouts."""
    micro_rollouts: Positive | None = None
    """Rollouts per drafter update; null: 4 for a drafter that starts untrained, 8 for one that was trained before."""
    replay_rollouts: Count = 0
    """Recent rollouts kept and trained on again, as many per step as fresh ones; 0 is off."""
    token_fraction: Share = 1.0
    """Share of the rollouts trained on, and of those measured."""
    every: Positive = 1
    """Train on every n-th step."""
    init: Literal["policy", "random"] = "policy"
    """Start of an untrained drafter: head rows and embeddings from the policy, or random."""
    vocab_size: Positive | None = None
    """Draft vocabulary of an untrained drafter; null is the policy's."""
    layer_ids: tuple[int, int, int] | None = None
    """Tapped layers (the state entering them) in rising order; null is (2, L/2, L-3)."""
    measure_tokens: Positive = 512
    """At most this many response tokens a step measure the expected acceptance length."""

    def rate(self, *, trained: bool) -> float:
        """The learning rate. Steps that teach an untrained drafter cost a trained one what it knows (measured)."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if trained else 1e-3

    def rollouts_per_update(self, *, trained: bool) -> int:
        """Larger updates cost an untrained drafter some of its first words, and a trained one nothing (measured)."""
        if self.micro_rollouts is not None:
            return self.micro_rollouts
        return 8 if trained else 4

    @field_validator("layer_ids")
    @classmethod
    def _rising_layers(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise ValueError(f"expected layers in rising order, each once (vLLM joins them so), got {list(value)}")
        return value

    @field_validator("loss_fn")
    @classmethod
    def _known_losses(cls, value: str) -> str:
        if not re.fullmatch(rf"{_LOSS_TERM}(\+{_LOSS_TERM})*", value):
            raise ValueError(f"expected ce, kl, tv, lk or a sum such as ce+tv or 0.3*ce+0.7*tv, got {value!r}")
        return value


class Grpo(Section):
    """The loss; names as in TRL."""

    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo"] = "dapo"
    epsilon: float = Field(default=0.2, gt=0.0)
    epsilon_high: float | None = Field(default=0.28, gt=0.0)
    """null: same as epsilon."""
    delta: float | None = Field(default=None, gt=1.0)
    """Upper bound of the ratio for negative advantages; null is off."""
    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the frozen reference; 0 keeps no reference."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: Positive = 1
    """Passes over a step's rollouts."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    mask_truncated_completions: bool = False
    importance_sampling_correction: bool = False
    """Weight tokens by min(learner / engine probability, clip_max) (truncated importance sampling)."""
    importance_sampling_clip_max: float = Field(default=2.0, gt=0.0)


class Optim(Section):
    """AdamW of the policy."""

    learning_rate: float = Field(default=1e-6, ge=0.0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_steps: Count = 0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"


class Train(Section):
    """Stage train."""

    micro_batch_size: Positive = 8
    """Completions per forward and backward pass."""
    mini_batch_size: Positive | None = None
    """Completions per optimizer update; null is the whole step."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    recompute: Literal["auto", "always"] = "auto"
    """`auto` leaves the logprob pass out where the first update makes it redundant."""
    gradient_checkpointing: bool = False
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Of matrix products; weights are fp32 (fp64 with float64)."""
    logprob_chunk_size: Positive = 1024
    """Token positions whose full-vocabulary logits exist at once."""


class Pipeline(Section):
    """When stages run."""

    mode: Literal["sync", "async"] = "sync"
    """`async` generates the next batch while the learner trains on the present one."""
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Policy versions that rollouts may be old when they are learnt from; 1 in mode async unless it says 0."""
    max_steps: Positive = 20

    @model_validator(mode="before")
    @classmethod
    def _async_is_one_batch_ahead(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("mode") == "async" and values.get("max_staleness") is None:
            return {**values, "max_staleness": 1}
        return values

    @model_validator(mode="after")
    def _only_async_makes_stale_rollouts(self) -> Pipeline:
        if self.mode == "sync" and self.max_staleness:
            raise ValueError(f"max_staleness {self.max_staleness} needs mode: async, got mode: sync")
        return self


class RewardFunction(Section):
    """One term of the reward."""

    function: str
    """`task`, `exact`, `number`, `math`, `length`, or `package.module:function` with TRL's or verl's signature."""
    weight: float = 1.0


class Checkpoint(Section):
    """When the state is written."""

    every: Positive = 10
    keep: Positive = 2


class Audit(Section):
    """The run's own check that its rollouts are the policy's; stops the run at an e-value of 10,000."""

    every: Count = 0
    """Audit every n-th step; 0 is off."""
    tokens: Positive = 500
    """About how many tokens of such a step are looked at, whole rollouts picked by their id."""


class Eval(Section):
    """When the policy is evaluated."""

    every: Count = 0
    """Steps between evaluations; 0 is off."""
    num_prompts: Positive = 64
    num_generations: Positive = 1
    temperature: float = Field(default=0.0, ge=0.0)


class Log(Section):
    """Where metrics go beside metrics.jsonl."""

    to: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)
    rollouts: bool = True
    """Write rollouts.jsonl."""
    benchmark: bool = True
    """Close the run with plain against speculative generation on the last step's prompts."""


class RunConfig(Section):
    """A whole recipe."""

    name: str | None = None
    """Folder under `output_dir`; null makes one from recipe and time."""
    output_dir: Path = Path("runs")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: str = "smollm2-135m"
    """Alias, folder or hub id."""
    tokenizer: str | None = None
    """Folder or hub id; null takes the model's."""
    data: Data = Data()
    rollout: RolloutSection = RolloutSection()
    draft: Draft = Draft()
    reward: tuple[RewardFunction, ...] = (RewardFunction(function="task"),)
    grpo: Grpo = Grpo()
    optim: Optim = Optim()
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    checkpoint: Checkpoint = Checkpoint()
    audit: Audit = Audit()
    eval: Eval = Eval()
    log: Log = Log()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads; 0 takes all cores."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or not value.isprintable() or re.search(r"[/\\]", value)):
            raise ValueError(f"expected the name of a folder under output_dir, without / or .., got {value!r:.80}")
        return value

    @model_validator(mode="after")
    def _stale_rollouts_are_corrected(self) -> RunConfig:
        if not self.pipeline.max_staleness:
            return self
        if not self.grpo.importance_sampling_correction:
            raise ValueError(
                "pipeline.mode: async learns from rollouts of older weights; expected "
                "grpo.importance_sampling_correction: true, got false (or set pipeline.max_staleness: 0)"
            )
        if self.audit.every:
            raise ValueError(
                "audit.every compares rollouts with the weights that learn from them, and pipeline.mode: async has "
                f"those of older ones; expected 0, got {self.audit.every} (or set pipeline.max_staleness: 0)"
            )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        speculation = self.rollout.speculative_config
        trainable = speculation is not None and speculation.draft_model is not None
        if self.draft.enabled is True and not trainable:
            method = "none" if speculation is None else speculation.method
            raise ValueError(
                "draft.enabled: true needs a method that can be trained (eagle3, parallel, mtp, small_model, alone or "
                f"with history+), got {method}"
            )
        if speculation is not None and speculation.draft_head == "mtp":
            for name in ("vocab_size", "layer_ids"):
                if getattr(self.draft, name) is not None:
                    raise ValueError(
                        f"draft.{name} is not for method {speculation.method}, which drafts from the policy's last "
                        f"state and its whole vocabulary; got {getattr(self.draft, name)}, remove it"
                    )
        if self.eval.every and self.data.eval is None:
            raise ValueError(f"eval.every: {self.eval.every} needs data.eval, the rows to evaluate on; got none")
        if self.rollout.temperature == 0.0:
            raise ValueError("rollout.temperature must be > 0 for training (greedy rollouts carry no signal), got 0")
        if self.rollout.num_generations < 2 and self.grpo.scale_rewards != "none":
            raise ValueError(
                "rollout.num_generations must be >= 2 (advantages compare siblings), got 1; "
                "for a single generation set grpo.scale_rewards: none"
            )
        return self

    @property
    def trains_drafter(self) -> bool:
        """Whether the drafter learns during the run."""
        speculation = self.rollout.speculative_config
        if speculation is None or speculation.draft_model is None:
            return False
        return self.draft.enabled is True or (self.draft.enabled == "auto" and speculation.draft_head is not None)
