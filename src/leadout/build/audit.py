"""One audit from its options: the generator under test, the learner's model that judges it, prompts, a fault to inject.

The judge is the learner's own packed forward pass (`leadout.logprob`), in fp32 and once more in the generator's
precision, so that what is audited is what training would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from leadout.audit.faults import Fault
from leadout.audit.judge import Demands
from leadout.audit.observe import Scores
from leadout.audit.plan import DEFAULT_PROMPTS, audit_requests
from leadout.audit.runner import Progress, run_audit
from leadout.audit.verdict import Verdict
from leadout.build.drafter import load_head, make_drafter
from leadout.build.generator import DTYPES, make_decoder
from leadout.build.process import prepare_process
from leadout.config import Method, SpeculativeConfig
from leadout.data.prompts import PromptFormat, make_prompt
from leadout.data.rows import Row
from leadout.draft_length.controller import FixedLength
from leadout.drafters.noisy_policy import NoisyPolicyDrafter
from leadout.errors import ConfigError
from leadout.interfaces import Drafter, Generator
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.decoder import FusedDecoder
from leadout.models.kv import KVSlots
from leadout.models.loading import load_policy, read_spec, resolve
from leadout.models.mtp_io import has_mtp
from leadout.records import (
    Group,
    Prompt,
    RefitReport,
    Rollout,
    RolloutId,
    SamplingParams,
    Score,
    WeightUpdate,
)
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts
from leadout.text import TextCodec

AuditMethod = Literal["noisy_policy", Method, "none"]
_SLOTS = 64
_PACK = 16
_ROUNDED_EVERY = 4
"""Every n-th pack is also run in bf16, to measure what rounding alone does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to audit."""

    params: SamplingParams
    model: str = "smollm2-135m"
    method: AuditMethod = "noisy_policy"
    draft: str | None = None
    """Folder of a draft head or small model; None takes the head that came with the policy (mtp)."""
    num_drafts: int = 3
    tokens: int = 20_000
    """About how many tokens to generate."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    fault: Fault | None = None
    """A fault to put into the generator."""


def audit(options: AuditOptions, *, progress: Progress | None = None) -> Verdict:
    """Generate, teacher-force, test."""
    prepare_process(0)
    path = resolve(options.model)
    _check_drafter(options)
    spec = read_spec(path)
    codec = TextCodec.from_pretrained(path)
    params = replace(options.params, stop_token_ids=codec.eos_token_ids)
    requests = audit_requests(_prompts(options.prompts, codec), params, tokens=options.tokens)
    exact = torch.float64 if options.dtype == "float64" else torch.float32
    model = load_policy(path, exact)
    longest = max(len(request.prompt.token_ids) for request in requests)
    if longest >= spec.max_position_embeddings:
        raise ConfigError(
            f"expected prompts shorter than the model's context of {spec.max_position_embeddings} tokens, the longest "
            f"has {longest}; give shorter ones with --prompts"
        )
    max_len = min(spec.max_position_embeddings, longest + params.max_new_tokens)
    decoder = make_decoder(
        spec,
        model.state_dict(),
        dtype=options.dtype,
        max_len=max_len,
        device=torch.device("cpu"),
        # Faulty caches write in their own way, which the native kernels would not notice.
        native=None if options.fault is None else False,
    )
    generator = _generator(options, decoder, codec, model.state_dict(), params)
    name = options.model + ("" if options.fault is None else f" with the fault {options.fault.name}")
    return run_audit(
        generator,
        LearnerScores(model, rounded=options.dtype == "bfloat16"),
        requests,
        name=f"native engine, {name}, drafter {options.method} with k = {options.num_drafts}, seed {params.seed}"
        if options.method != "none"
        else f"native engine, {name}, no drafter, seed {params.seed}",
        precision=options.dtype,
        version=0,
        demands=Demands(drafts=options.method != "none"),
        seed=params.seed,
        rounded_share=1.0 / _ROUNDED_EVERY,
        progress=progress,
    )


def _prompts(texts: Sequence[str], codec: TextCodec) -> list[Prompt]:
    rows = [Row(id=f"audit/{i}", where=f"audit prompt {i + 1}", columns={"prompt": t}) for i, t in enumerate(texts)]
    return [make_prompt(row, codec, PromptFormat(answer_key=None)) for row in rows]


def _generator(
    options: AuditOptions,
    decoder: FusedDecoder,
    codec: TextCodec,
    weights: dict[str, torch.Tensor],
    params: SamplingParams,
) -> Generator:
    def new_kv() -> KVSlots:
        return decoder.new_kv(_SLOTS)

    parts = EngineParts(
        decoder=decoder,
        kv=new_kv(),
        vocab_size=decoder.spec.vocab_size,
        max_len=decoder.max_len,
        device=decoder.device,
        dtype=DTYPES[options.dtype],
        drafter=_drafter(options, decoder, codec, weights, new_kv),
        draft_length=FixedLength(0 if options.method == "none" else options.num_drafts),
        stop_watch=codec.stop_watch,
    )
    if options.fault is not None:
        parts = options.fault.install(parts, params)
    generator: Generator = NativeGenerator(parts, num_slots=_SLOTS, apply_update=_refuse_update)
    return generator if options.fault is None else options.fault.wrap(generator)


def _drafter(
    options: AuditOptions,
    decoder: FusedDecoder,
    codec: TextCodec,
    weights: dict[str, torch.Tensor],
    new_kv: Callable[[], KVSlots],
) -> Drafter | None:
    if options.method == "none":
        return None
    if options.method == "noisy_policy":
        return NoisyPolicyDrafter(
            decoder, new_kv(), vocab_size=decoder.spec.vocab_size, hidden_size=decoder.spec.hidden_size
        )
    speculation = SpeculativeConfig(
        method=options.method, model=options.draft, num_speculative_tokens=options.num_drafts
    )
    head = None
    if speculation.draft_head is not None:
        folder = options.draft or resolve(options.model)
        head = load_head(folder, weights, speculation.draft_head, rope=decoder.spec.rope, option="--draft")
    return make_drafter(speculation, decoder, head, codec, num_slots=_SLOTS)


def _check_drafter(options: AuditOptions) -> None:
    """Before anything is loaded."""
    drafts_itself = options.method in ("none", "noisy_policy", "ngram", "history")
    brings_head = options.method.endswith("mtp") and has_mtp(resolve(options.model))
    if options.draft is None and not drafts_itself and not brings_head:
        raise ConfigError(
            f"--method {options.method} needs --draft, the folder of a draft head or small model; "
            "runs leave a head in RUN/draft_start"
        )


def _refuse_update(update: WeightUpdate) -> RefitReport:
    raise ConfigError("an audited generator keeps its weights")


class LearnerScores:
    """Teacher-forces rollouts with the learner's model, siblings sharing their prompt."""

    def __init__(self, model: Any, *, rounded: bool) -> None:
        """`rounded`: also make a pass with bf16 matrix products, which measures what rounding alone does."""
        settings = ForwardSettings(temperature=1.0, max_completions=_PACK, autocast=False)
        self._exact = PackedForward(model, settings)
        self._packs = 0
        self._rounded = PackedForward(model, replace(settings, autocast=True)) if rounded else None

    def __call__(self, rollouts: Sequence[Rollout]) -> Iterator[Scores]:
        """Scores in the order of the rollouts, a pack at a time."""
        for start in range(0, len(rollouts), _PACK):
            part = rollouts[start : start + _PACK]
            exact = self._logits(self._exact, part)
            rounded: Sequence[torch.Tensor | None] = [None] * len(part)
            if self._rounded is not None and self._packs % _ROUNDED_EVERY == 0:
                rounded = self._logits(self._rounded, part)
            self._packs += 1
            for exact_TV, rounded_TV in zip(exact, rounded, strict=True):
                yield Scores(exact_TV=exact_TV, rounded_TV=rounded_TV)

    @staticmethod
    @torch.inference_mode()
    def _logits(forward: PackedForward, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        nothing = Score(reward=0.0, parts={}, text="", masked=True)
        groups = []
        for _, run in groupby(rollouts, key=lambda rollout: rollout.prompt.id):
            siblings = tuple(run)
            groups.append(Group(prompt=siblings[0].prompt, rollouts=siblings, scores=(nothing,) * len(siblings)))
        keeper = _Keeper()
        for batch in forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups]):
            forward.run(batch, auditor=keeper)
        return [keeper.logits[rollout.request_id] for rollout in rollouts]


class _Keeper:
    """An `Auditor` that keeps the logits it is shown."""

    def __init__(self) -> None:
        self.logits: dict[RolloutId, torch.Tensor] = {}

    def select(self, rollout: Rollout) -> bool:
        return True

    def observe(self, rollout: Rollout, logits_TV: torch.Tensor) -> None:
        self.logits[rollout.request_id] = logits_TV

    def finish_step(self) -> Mapping[str, float]:
        return {}
