"""A whole run or evaluation, built and carried out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console

from leadout.build.data import EVALUATION_SEED, LoadedData, load_data, make_scorer, sampling_params
from leadout.build.drafter import load_head, new_head, spread_prompts
from leadout.build.generator import make_decoder, make_device, make_generator
from leadout.build.learner import load_trainable, make_learner
from leadout.clock import Clock
from leadout.config import Data, Dataset, Grpo, RewardFunction, RolloutSection, RunConfig
from leadout.data.order import ShuffledPrompts
from leadout.draft_length.controller import FixedLength
from leadout.metrics import read_rows
from leadout.models.decoder import FusedDecoder
from leadout.models.eagle3 import Eagle3Head
from leadout.models.eagle3_io import write_eagle3
from leadout.models.loading import iter_weights, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.pipeline.closing import close_run
from leadout.pipeline.closing_table import print_closing
from leadout.pipeline.evaluate import Evaluation
from leadout.pipeline.folder import RunFolder, write_json
from leadout.pipeline.progress import Progress
from leadout.pipeline.requests import DrawCounter
from leadout.pipeline.run import Run
from leadout.pipeline.synchronous import FinishedStep, SynchronousPipeline
from leadout.recipe import dump
from leadout.records import SamplingParams
from leadout.report.page import write_report
from leadout.rollout.engine import NativeGenerator
from leadout.text import TextCodec

logger = logging.getLogger(__name__)

_RANKED_PROMPTS = 64
_CLOSING_DRAFTS = 3


def train(config: RunConfig, *, resume: Path | None = None, console: Console | None = None) -> Path:
    """Carry out a recipe; returns the run folder.

    With `resume` the run in that folder goes on from its newest checkpoint. Raises LeadoutError for anything the user
    can mend, KeyboardInterrupt with a message on Ctrl-C.
    """
    console = console or make_console()
    parts = build_run(config, resume=resume, console=console)
    last = parts.run.train()
    if last is not None:
        finish_run(config, parts, last, console)
    return parts.run.folder.path


def make_console() -> Console:
    """The user's terminal; wide enough for the tables where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of."""

    run: Run
    generator: NativeGenerator


def build_run(config: RunConfig, *, resume: Path | None, console: Console) -> RunParts:
    """Build every object of a run; the folder is created last, so that a bad recipe leaves nothing behind."""
    _prepare_torch(config.threads)
    path = resolve(config.model)
    spec = DecoderSpec.from_config(read_config(path))
    codec = TextCodec.from_pretrained(path if config.tokenizer is None else resolve(config.tokenizer))
    context = config.rollout.max_model_len or spec.max_position_embeddings
    data = load_data(config.data.train, config.data, codec, seed=config.seed, context=context)
    held_out = None
    if config.data.eval is not None and config.eval.every:
        held_out = load_data(config.data.eval, config.data, codec, seed=config.seed + EVALUATION_SEED, context=context)
    _say_dropped(console, data, held_out)
    params = sampling_params(config.rollout, codec, config.seed)
    if params.has_filters or params.has_penalties:
        logger.warning(
            "rollouts are drawn with filters or penalties, but trained on as draws from softmax(logits / temperature): "
            "the gradient is biased; set top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 to avoid it"
        )
    scorer = make_scorer(config.reward, codec, data.task, config.rollout, config.grpo)

    device = make_device(config.device)
    model = load_trainable(path, config.train.dtype, device)
    weights = model.state_dict()
    max_len = _row_length(config, spec, data, held_out)
    decoder = make_decoder(spec, weights, dtype=config.rollout.dtype, max_len=max_len, device=device)
    folder = None if resume is None else RunFolder.open(resume)
    head = _make_head(config, decoder, weights, data, codec, folder)
    generator = make_generator(
        decoder,
        codec,
        config.rollout,
        num_rows=config.rollout.num_prompts * config.rollout.num_generations,
        head=head,
        learns_draft=config.trains_drafter,
    )
    learner = make_learner(config, model, path, params, head)
    if folder is None:
        folder = RunFolder.create(config.output_dir / (config.name or "run"), dump(config))
        if head is not None:
            write_eagle3(head, folder.path / "draft_start")
    progress = Progress(console, config.pipeline.max_steps)
    pipeline = SynchronousPipeline(
        source=ShuffledPrompts(data.prompts.prompts, seed=config.seed, shuffle=config.data.shuffle),
        generator=generator,
        scorer=scorer,
        learner=learner,
        params=params,
        num_prompts=config.rollout.num_prompts,
        num_generations=config.rollout.num_generations,
        clock=Clock(on_enter=progress.enter_stage),
        draws=DrawCounter(),
    )
    run = Run(
        folder=folder,
        pipeline=pipeline,
        progress=progress,
        max_steps=config.pipeline.max_steps,
        checkpoint_every=config.checkpoint.every,
        keep_checkpoints=config.checkpoint.keep,
        evaluation=None if held_out is None else _evaluation(config, held_out, generator, codec, params),
        evaluate_every=config.eval.every or 1,
        save_rollouts=config.log.rollouts,
        log_to=config.log.to,
        stateful={"generator": generator},
    )
    return RunParts(run=run, generator=generator)


def finish_run(config: RunConfig, parts: RunParts, last: FinishedStep, console: Console) -> None:
    """The closing table and the report."""
    folder, generator = parts.run.folder, parts.generator
    variants = {"plain": generator.variant(FixedLength(0), drafts=False)}
    if config.log.benchmark and config.rollout.speculative_config is not None:
        generator.refit(parts.run.pipeline.learner.publish())
        variants = {
            "plain": generator.variant(FixedLength(0), drafts=False),
            "auto": generator,
            f"k={_CLOSING_DRAFTS}": generator.variant(FixedLength(_CLOSING_DRAFTS)),
        }
    closing = close_run(variants=variants, requests=last.requests, rows=read_rows(folder.metrics), run_variant="auto")
    print_closing(console, closing)
    write_json(folder.closing, closing.to_json())
    console.print(f"report: {write_report([folder.path], folder.report)}")


def _make_head(
    config: RunConfig,
    decoder: FusedDecoder,
    weights: Mapping[str, torch.Tensor],
    data: LoadedData,
    codec: TextCodec,
    folder: RunFolder | None,
) -> Eagle3Head | None:
    """The EAGLE-3 head a run starts from: the recipe's, the one an earlier start made, or a new one."""
    speculation = config.rollout.speculative_config
    if speculation is None or speculation.method != "eagle3":
        return None
    if speculation.model is not None:
        return load_head(speculation.model, weights)
    if folder is not None:
        return load_head(folder.path / "draft_start", weights)
    return new_head(
        config.draft,
        decoder,
        weights,
        spread_prompts(data.prompts.prompts, _RANKED_PROMPTS),
        seed=config.seed,
        temperature=config.rollout.temperature,
        keep=codec.eos_token_ids,
    )


def _evaluation(
    config: RunConfig, held_out: LoadedData, generator: NativeGenerator, codec: TextCodec, params: SamplingParams
) -> Evaluation:
    section = config.rollout.model_copy(update={"temperature": config.eval.temperature})
    return Evaluation(
        prompts=held_out.prompts.prompts[: config.eval.num_prompts],
        generator=generator,
        scorer=make_scorer(config.reward, codec, held_out.task, config.rollout, config.grpo),
        params=sampling_params(section, codec, params.seed + EVALUATION_SEED),
        num_generations=config.eval.num_generations,
    )


def _row_length(config: RunConfig, spec: DecoderSpec, *sets: LoadedData | None) -> int:
    """Tokens of the longest row: as asked for, or what prompts and completions need, within the model's context."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    longest = max(each.longest for each in sets if each is not None)
    return min(spec.max_position_embeddings, longest + config.rollout.max_completion_length)


def _say_dropped(console: Console, *sets: LoadedData | None) -> None:
    dropped = sum(each.prompts.num_dropped for each in sets if each is not None)
    if dropped:
        console.print(f"{dropped} prompts were too long and left out (data.overlong: drop)")


def _prepare_torch(threads: int) -> None:
    """Threads are set once, before anything runs; transformers' own progress bars would break up ours."""
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def evaluate(
    model: str,
    dataset: Dataset,
    *,
    reward: str,
    num_prompts: int,
    num_generations: int,
    temperature: float,
    max_completion_length: int,
    seed: int = 0,
) -> dict[str, float]:
    """pass@1 and mean@k of a model on a data set, generated plainly."""
    path = resolve(model)
    spec = DecoderSpec.from_config(read_config(path))
    codec = TextCodec.from_pretrained(path)
    data = load_data(dataset, Data(), codec, seed=seed, context=spec.max_position_embeddings)
    section = RolloutSection(
        temperature=temperature, max_completion_length=max_completion_length, speculative_config=None
    )
    prompts = data.prompts.prompts[:num_prompts]
    max_len = min(spec.max_position_embeddings, data.longest + max_completion_length)
    decoder = make_decoder(
        spec, dict(iter_weights(path)), dtype=section.dtype, max_len=max_len, device=make_device("auto")
    )
    return Evaluation(
        prompts=prompts,
        generator=make_generator(decoder, codec, section, num_rows=min(64, len(prompts) * num_generations)),
        scorer=make_scorer((RewardFunction(function=reward),), codec, data.task, section, Grpo()),
        params=sampling_params(section, codec, seed),
        num_generations=num_generations,
    ).run()
