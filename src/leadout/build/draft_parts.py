"""What an offline training of a drafter works with: policy, engine, prompts, and the drafter as it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from leadout.build.data import load_data, sampling_params
from leadout.build.draft_plan import DraftPlan
from leadout.build.drafter import load_head, new_head, spread_prompts
from leadout.build.generator import make_decoder, make_device, make_generator
from leadout.build.learner import load_trainable, small_student
from leadout.build.round_cost import RoundCost, measure_round_costs
from leadout.config import Data, RolloutSection
from leadout.drafters.recorder import StateRecorder
from leadout.errors import ConfigError
from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.models.loading import read_spec
from leadout.models.mtp_io import has_mtp
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt, SamplingParams
from leadout.rollout.engine import NativeGenerator
from leadout.text import TextCodec
from leadout.train.students import DraftStudent, HeadStudent

_HELD_OUT_EVERY = 10
_RANKED_PROMPTS = 64
_PACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """What a training is made of."""

    prompts: list[Prompt]
    held_out: dict[str, list[Prompt]]
    generator: NativeGenerator
    recorder: StateRecorder
    """In the generator; has the states of what that made."""
    params: SamplingParams
    forward: PackedForward
    student: DraftStudent
    costs: list[RoundCost]


def build_parts(plan: DraftPlan, path: Path, last: Path | None) -> TrainingParts:
    """Policy, engine, prompts and drafter; that comes from `last`, from the plan's `init`, the policy, or is new."""
    spec = read_spec(path)
    codec = TextCodec.from_pretrained(path)
    prompts, held_out = _prompts(plan, spec, codec)
    section = RolloutSection(
        temperature=plan.temperature,
        max_completion_length=plan.max_completion_length,
        dtype=plan.dtype,
        speculative_config=None,
    )
    longest = max(len(p.token_ids) for p in [*prompts, *(p for each in held_out.values() for p in each)])
    max_len = min(spec.max_position_embeddings, longest + plan.max_completion_length)
    device = make_device("auto")
    model = load_trainable(path, plan.dtype, device).requires_grad_(False)
    weights = model.state_dict()
    decoder = make_decoder(spec, weights, dtype=plan.dtype, max_len=max_len, device=device)
    forward = ForwardSettings(
        temperature=plan.temperature, max_completions=_PACK, autocast=plan.dtype == "bfloat16", chunk_size=1024
    )
    head = None if plan.method == "small_model" else _start_head(plan, path, last, decoder, weights, prompts, codec)
    student: DraftStudent
    if head is None:
        assert plan.init is not None, "the command line checks it"
        student = small_student(plan.init, model, plan.dtype, forward)
        if last is not None:
            student.load(last)
    else:
        student = HeadStudent(head.to(device))
    recorder = StateRecorder((*student.taps, spec.num_layers))
    return TrainingParts(
        prompts=prompts,
        held_out=held_out,
        generator=make_generator(decoder, codec, section, num_rows=plan.batch, recorder=recorder),
        recorder=recorder,
        params=sampling_params(section, codec, plan.seed),
        forward=PackedForward(model, forward),
        student=student,
        costs=measure_round_costs(decoder, codec, section, head, prompts[0], speculation=plan.speculation),
    )


def _start_head(
    plan: DraftPlan,
    path: Path,
    last: Path | None,
    decoder: FusedDecoder,
    weights: Mapping[str, torch.Tensor],
    prompts: Sequence[Prompt],
    codec: TextCodec,
) -> DraftHead:
    assert plan.method != "small_model", "a model is no head"
    own = path if plan.method == "mtp" and has_mtp(path) else None
    folder = last or plan.init or own
    if folder is not None:
        option = "--out" if last else "--start" if plan.init else "--model"
        return load_head(folder, weights, plan.method, rope=decoder.spec.rope, option=option)
    return new_head(
        plan.draft,
        decoder,
        weights,
        spread_prompts(prompts, _RANKED_PROMPTS),
        seed=plan.seed,
        temperature=plan.temperature,
        keep=codec.special_token_ids,
        method=plan.method,
    )


def _prompts(plan: DraftPlan, spec: DecoderSpec, codec: TextCodec) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Training prompts of all data sets, mixed, and the held-out ones of each."""
    train: list[Prompt] = []
    held_out: dict[str, list[Prompt]] = {}
    context = spec.max_position_embeddings - plan.max_completion_length
    for name, dataset in plan.data.items():
        section = Data(overlong="drop", max_prompt_length=context)
        prompts = load_data(dataset, section, codec, seed=plan.seed, context=context + 1).prompts.prompts
        distinct = {prompt.token_ids.tobytes(): prompt for prompt in prompts}
        if len(distinct) < 2:
            raise ConfigError(
                f"data set {name}: expected at least 2 different prompts (one is held out), got {len(distinct)}"
            )
        # A small procedural task asks the same question many times; none of these may be learnt from.
        apart = dict(list(distinct.items())[::_HELD_OUT_EVERY])
        held_out[name] = list(apart.values())[: plan.held_out]
        train += [prompt for prompt in prompts if prompt.token_ids.tobytes() not in apart]
    order = np.random.default_rng(plan.seed).permutation(len(train))
    return [train[i] for i in order], held_out
