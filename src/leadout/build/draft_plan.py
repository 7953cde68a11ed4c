"""What an offline training of a draft head is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from leadout.config import Dataset, Draft, HeadMethod, SpeculativeConfig
from leadout.errors import ConfigError
from leadout.train.settings import DraftSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What to train on and how."""

    model: str
    data: Mapping[str, Dataset]
    """Data sets by the name that reports use; prompts are mixed."""
    num_rollouts: int = 2048
    passes: int = 2
    """Times that every rollout is learnt from."""
    num_generations: int = 4
    """Rollouts of each prompt, which share its prefill."""
    batch: int = 64
    """Rollouts generated at once and learnt from before the next."""
    measure_every: int = 4
    """Batches between measurements."""
    held_out: int = 48
    """Most held-out prompts of each data set; every tenth prompt is held out."""
    max_completion_length: int = 96
    temperature: float = 1.0
    """Of the rollouts and of the drafts: the one of the later run."""
    num_drafts: int = 3
    """Drafts of a round that acceptance is measured for."""
    method: HeadMethod | Literal["small_model"] = "eagle3"
    """What is trained; a small model needs `init`."""
    draft: Draft = field(default_factory=Draft)
    init: Path | None = None
    """A drafter to go on from; its shape holds, not that of `draft`."""
    format: Literal["hf", "speculators"] = "hf"
    """Form of the folder that results."""
    lr_decay_from: float = 0.5
    """Share of all updates after which the learning rate falls, linearly."""
    seed: int = 0
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Of engine and matrix products."""

    def __post_init__(self) -> None:
        whole_vocabulary = self.method in ("mtp", "small_model")
        checks = (
            (
                self.batch % self.num_generations == 0,
                f"--num-generations: expected a divisor of the batch of {self.batch}, got {self.num_generations}",
            ),
            (
                self.method != "small_model" or self.init is not None,
                "--method small_model needs --start, the model to train (leadout draft init makes one)",
            ),
            (
                self.format == "hf" or self.method in ("eagle3", "parallel"),
                f"--format {self.format} is for --method eagle3 and parallel, got {self.method}; leave one out",
            ),
            (
                not whole_vocabulary or self.draft.vocab_size is None,
                f"--vocab-size: --method {self.method} drafts from its whole vocabulary; leave one of them out",
            ),
            (
                not whole_vocabulary or self.draft.layer_ids is None,
                f"--layer-ids: --method {self.method} does not read inner layers; leave one of them out",
            ),
            (
                self.init is None or (self.draft.vocab_size is None and self.draft.layer_ids is None),
                f"--start: {self.init} has a vocabulary and layers of its own; leave out --vocab-size and --layer-ids",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)

    @property
    def num_batches(self) -> int:
        """Batches of one pass."""
        return -(-self.num_rollouts // self.batch)

    @property
    def speculation(self) -> SpeculativeConfig:
        """How an engine drafts with what is trained, from where it starts."""
        model = str(self.init) if self.method == "small_model" else None
        return SpeculativeConfig(method=self.method, model=model, num_speculative_tokens=self.num_drafts)

    def fingerprint(self, policy: str) -> dict[str, Any]:
        """What must be the same for an interrupted training to go on; JSON-serialisable."""
        data = {name: each.model_dump(mode="json") for name, each in self.data.items()}
        rest = {k: v for k, v in asdict(self).items() if k not in ("model", "data", "draft", "init")}
        draft, init = self.draft.model_dump(mode="json"), None if self.init is None else str(self.init)
        return {"policy": policy, "data": data, "draft": draft, "init": init, **rest}


def draft_settings(plan: DraftPlan) -> DraftSettings:
    """The trainer's settings: a constant learning rate at first, then linearly down."""
    draft = plan.draft
    # A small model that was cut from the policy knows little; a head to go on from knows what it was taught.
    trained = plan.init is not None and plan.method != "small_model"
    micro_rollouts = draft.rollouts_per_update(trained=trained)
    updates = plan.num_batches * plan.passes * -(-plan.batch // micro_rollouts) * draft.passes
    return DraftSettings(
        loss_fn=draft.loss_fn,
        # What a small model says at a token does not depend on the round: there is nothing to unroll.
        steps=1 if plan.method == "small_model" else draft.ttt_steps,
        decay=draft.ttt_decay,
        learning_rate=draft.rate(trained=trained),
        warmup_steps=draft.warmup_steps,
        decay_from=int(plan.lr_decay_from * updates),
        decay_updates=updates,
        max_grad_norm=draft.max_grad_norm,
        passes=draft.passes,
        micro_rollouts=micro_rollouts,
        token_fraction=draft.token_fraction,
        measure_tokens=0,
        measure_depth=plan.num_drafts,
        autocast=plan.dtype == "bfloat16",
    )
