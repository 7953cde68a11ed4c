"""Sections of a scenario: every knob with its default, unknown keys refused.

Units stand in the names: `_s` seconds, `_bytes`, lengths in tokens. Engine names are vLLM's; where a
default is not, its docstring says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leadout.config import MOST_ROLLOUTS
from leadout.sim.lengths import MAX_CV

Positive = Annotated[int, Field(ge=1, le=1_000_000_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""Of what takes memory or time by the piece."""
NonNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Dtype = Literal["bfloat16", "fp8"]


class Section(BaseModel):
    """Immutable, unknown keys refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Precision(Section):
    """Number formats."""

    weights: Dtype = "bfloat16"
    """Of generation; `fp8` stands for block-FP8 checkpoints too (their own rows time the host, not the kernel)."""
    kv_cache: Dtype = "bfloat16"
    train: Dtype = "bfloat16"


class Lengths(Section):
    """Completion lengths: a log-normal law, or measured ones."""

    mean: float = Field(default=4000.0, ge=1.0)
    """As a log shows it, after the cut at `cap`."""
    cv: Annotated[float, Field(ge=0.0, le=MAX_CV)] = 0.55
    """Of the law before the cut: about .55 for reasoning models, 1.0 for base models."""
    cap: Positive = 8192
    group_correlation: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    file: Path | None = None
    """JSON lines with lengths, such as a run's rollouts.jsonl; takes the place of mean and cv."""


class Workload(Section):
    """What a step generates."""

    num_prompts: Count = 64
    num_generations: Count = 16
    prompt_length: NonNegative = 250.0
    prefix_cache: bool = True
    """A group shares the prefill of its prompt."""
    lengths: Lengths = Lengths()
    share_without_signal: Annotated[float, Field(ge=0.0, lt=0.99)] = 0.0
    """Dynamic sampling: share of groups with equal rewards, drawn again; costs 1 / (1 - share) as many groups."""

    @model_validator(mode="after")
    def _countable(self) -> Workload:
        rollouts = self.num_prompts * self.num_generations / (1.0 - self.share_without_signal)
        if rollouts > MOST_ROLLOUTS:
            raise ValueError(
                "num_prompts x num_generations / (1 - share_without_signal) must be <= "
                f"{MOST_ROLLOUTS:,} rollouts a step, got {rollouts:,.0f}"
            )
        return self


class Acceptance(Section):
    """Acceptance of drafts, in one of the forms in which it is logged."""

    conditional: tuple[float, ...] | None = None
    """a_j given that 1..j-1 were accepted."""
    cumulative: tuple[float, ...] | None = None
    """Share of rounds that accepted at least j (vLLM's per-position rates)."""
    mean_length: float | None = None
    """vLLM's mean acceptance length at `at_k`, bonus counted."""
    at_k: Annotated[int, Field(ge=1, le=64)] = 3
    rate: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """One number: a_1."""
    decay: Share = 1.0
    """a_j = a_1 decay^(j-1), with `rate` and past the end of `conditional`."""
    drift_per_version: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Relative loss of every rate per policy version since the drafter last learnt."""

    @model_validator(mode="after")
    def _one_form(self) -> Acceptance:
        given = [n for n in ("conditional", "cumulative", "mean_length", "rate") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one of conditional, cumulative, mean_length, rate; got {', '.join(given)}")
        return self


class Speculation(Section):
    """Drafter and draft length."""

    method: Literal["eagle3", "mtp", "small_model", "ngram"] = "eagle3"
    model: str | None = None
    """Of `small_model`: a built-in name or a config.json; of the others a draft folder whose shape is taken."""
    draft_vocab: Positive | None = None
    """Rows of the drafter's output layer; null is 32,000 for EAGLE-3, the policy's for MTP."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=16)] | Literal["auto"] = "auto"
    max_draft_length: Annotated[int, Field(ge=1, le=16)] = 7
    """Largest k of `auto`."""
    acceptance: Acceptance = Acceptance()
    """Without any form: a published law of the method."""
    acceptance_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor on every acceptance rate."""
    drafter_age: NonNegative = 0.0
    """Versions between the policy that generates and the one the drafter last learnt from. The lag of the pipeline adds
    none: both reach the generators in one update."""


class Generation(Section):
    """Layout of the generators."""

    gpus: Positive | None = None
    """GPUs that generate; null: all of them, shared with training."""
    tensor_parallel: Positive = 1
    data_parallel: Positive = 1
    """Ranks with their own attention that step in lockstep and share experts; of a dense model, take more replicas."""
    expert_parallel: Positive = 1
    moe_routing: Literal["power_law_1.2", "balanced"] = "power_law_1.2"
    moe_kernel: Literal["default", "triton"] = "default"


class Engine(Section):
    """vLLM's engine arguments, and constants of the host."""

    max_num_seqs: Positive = 256
    """Rows a rank runs at once. Conservative: vLLM's own default on an A100 and on smaller GPUs; its `LLM` class takes
    1,024 on other GPUs of 70 GiB and more."""
    max_num_batched_tokens: Positive = 8192
    """Largest chunk of a prefill. Conservative in the same way; there `LLM` takes 16,384."""
    gpu_memory_utilization: Share = 0.9
    cudagraph_capture_sizes: tuple[Positive, ...] | None = None
    enforce_eager: bool = False
    host_s: NonNegative = 1.3e-4
    host_per_layer_s: NonNegative = 2.4e-5
    host_per_row_s: NonNegative = 1.0e-5
    draft_host_s: NonNegative = 4.0e-4
    ngram_host_per_row_s: NonNegative = 2.0e-5
    launch_per_layer_s: NonNegative = 6.0e-4
    launch_s: NonNegative | None = None
    sampler_passes: NonNegative = 8.0
    kernel_scale: Annotated[float, Field(gt=0.0)] = 1.0
    attention_per_draft: NonNegative = 0.14
    attention_fallback_above: Annotated[int, Field(ge=0)] = 0
    """Largest k + 1 the decode kernel takes; 0: any."""
    attention_fallback_factor: Annotated[float, Field(ge=1.0)] = 4.0


class Training(Section):
    """The learner."""

    gpus: Positive | None = None
    """With a separate placement; null: the GPUs that do not generate."""
    mfu: Share | None = None
    """Model FLOP utilisation; null: a default by GPU, halved for experts."""
    logprob_mfu: Share | None = None
    """null: as `mfu`."""
    packed: bool = True
    """False: every sequence is padded to prompt_length + cap."""
    recompute_activations: bool = True
    reference: bool = True
    """The logprob stage also runs a frozen reference."""
    logprob_stage: bool = True
    num_iterations: Positive = 1
    offload: bool = True
    """The learner's state leaves the GPUs while they generate (colocated)."""
    draft_passes: Annotated[int, Field(ge=0)] = 0
    """Passes of drafter training over a step's tokens, unrolled steps counted; 0: frozen drafter."""
    extra_s: NonNegative = 0.0
    """Fixed seconds of a train stage (optimizer, launch, logging)."""


class Refit(Section):
    """New weights into the generators."""

    method: Literal["copy", "broadcast", "in_flight"] | None = None
    """null: copy when colocated, broadcast when separate. `in_flight`: rows go on after the transfer."""
    fixed_s: NonNegative | None = None
    bandwidth_fraction: Share = 0.4
    """Of a network link, which one stream of tensors reaches."""
    links: Positive = 1
    """Streams side by side."""
    recompute_kv: bool = False
    """In flight: live contexts are prefilled again after every update."""


class Reward(Section):
    """Scoring."""

    seconds_per_sample: NonNegative = 0.0
    workers: Positive = 64
    overlapped: bool = True
    """Rollouts are scored as they finish; only the last ones are exposed."""


class Pipeline(Section):
    """When stages run."""

    mode: Literal["sync", "async"] = "sync"
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0

    @model_validator(mode="after")
    def _agree(self) -> Pipeline:
        if self.mode == "sync" and self.max_staleness:
            raise ValueError(f"max_staleness must be 0 with mode sync, got {self.max_staleness}")
        return self


class Baseline(Section):
    """Measured seconds of a plain run, to fit host time, MFU and refit to."""

    seconds: dict[Literal["data", "refit", "rollout", "reward", "logprob", "train"], NonNegative] = {}
    mean_length: float | None = None
    max_length: float | None = None
    clip_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
