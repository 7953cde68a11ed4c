"""A whole run or evaluation, built and carried out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from leadout.build.data import EVALUATION_SEED, LoadedData, make_scorer, sampling_params
from leadout.build.drafter import load_head, new_head, spread_prompts
from leadout.build.generator import make_decoder, make_device, make_draft_length, make_generator
from leadout.build.inputs import Inputs, load_inputs
from leadout.build.learner import load_trainable, make_auditor, make_learner
from leadout.build.process import prepare_process
from leadout.build.resume import accept_changes
from leadout.clock import Clock
from leadout.config import RunConfig
from leadout.data.order import ShuffledPrompts
from leadout.draft_length.controller import FixedLength
from leadout.errors import LeadoutError
from leadout.interfaces import Scorer, Stateful
from leadout.metrics import read_rows
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.models.head_io import write_head
from leadout.models.mtp_io import has_mtp
from leadout.pipeline.asynchronous import AsynchronousPipeline
from leadout.pipeline.closing import CASES, Case, close_run
from leadout.pipeline.closing_table import print_closing
from leadout.pipeline.evaluate import Evaluation
from leadout.pipeline.folder import RunFolder, write_json
from leadout.pipeline.progress import Progress
from leadout.pipeline.requests import DrawCounter
from leadout.pipeline.run import Run
from leadout.pipeline.synchronous import FinishedStep, SynchronousPipeline
from leadout.recipe import dump
from leadout.report.page import write_report
from leadout.rollout.engine import NativeGenerator
from leadout.train.learner import LocalLearner

logger = logging.getLogger(__name__)

_RANKED_PROMPTS = 64
_CLOSING_DRAFTS = 3
_DRAFT_START = "draft_start"
"""The head a run started from, in its folder: a resume does not make it anew."""


def train(config: RunConfig, *, resume: Path | None = None, console: Console | None = None) -> Path:
    """Carry out a recipe; returns the run folder.

    With `resume` the run in that folder goes on from its newest checkpoint. Raises LeadoutError for anything the user
    can mend, KeyboardInterrupt with a message on Ctrl-C.
    """
    console = console or make_console()
    parts = build_run(config, resume=resume, console=console)
    try:
        last = parts.run.train()
    except LeadoutError:
        parts.run.folder.discard_if_unused()
        raise
    if last is not None or not parts.run.folder.report.exists():
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
    prepare_process(config.threads)
    folder = None if resume is None else RunFolder.open(resume)
    if folder is not None:
        accept_changes(folder, config)
    inputs = load_inputs(config, console)
    scorer = make_scorer(config.reward, inputs.codec, inputs.data.task, config.rollout, config.grpo)
    device = make_device(config.device)
    model = load_trainable(inputs.path, config.train.dtype, device)
    weights = model.state_dict()
    decoder = make_decoder(
        inputs.spec, weights, dtype=config.rollout.dtype, max_len=_row_length(config, inputs), device=device
    )
    head = _make_head(config, decoder, weights, inputs, folder)
    generator = make_generator(
        decoder,
        inputs.codec,
        config.rollout,
        num_rows=config.rollout.num_prompts * config.rollout.num_generations,
        head=head,
        learns_draft=config.trains_drafter,
    )
    auditor = make_auditor(config, inputs.params)
    learner = make_learner(config, model, inputs.path, inputs.params, head, auditor)
    if folder is None:
        folder = RunFolder.create(config.output_dir / (config.name or "run"), dump(config))
        _write_start(head, folder)
    progress = Progress(console, config.pipeline.max_steps)
    pipeline = _make_pipeline(config, inputs, generator, scorer, learner, Clock(on_enter=progress.enter_stage))
    stateful: dict[str, Stateful] = {"generator": generator}
    if isinstance(pipeline, AsynchronousPipeline):
        stateful["pipeline"] = pipeline
    if auditor is not None:
        stateful["auditor"] = auditor
    run = _make_run(config, inputs, folder, pipeline, progress, generator, stateful)
    return RunParts(run=run, generator=generator)


def _make_pipeline(
    config: RunConfig, inputs: Inputs, generator: NativeGenerator, scorer: Scorer, learner: LocalLearner, clock: Clock
) -> SynchronousPipeline:
    make: Callable[..., SynchronousPipeline] = SynchronousPipeline
    if config.pipeline.mode == "async":
        make = functools.partial(
            AsynchronousPipeline, max_staleness=config.pipeline.max_staleness, last_step=config.pipeline.max_steps
        )
    return make(
        source=ShuffledPrompts(inputs.data.prompts.prompts, seed=config.seed, shuffle=config.data.shuffle),
        generator=generator,
        scorer=scorer,
        learner=learner,
        params=inputs.params,
        num_prompts=config.rollout.num_prompts,
        num_generations=config.rollout.num_generations,
        clock=clock,
        draws=DrawCounter(),
        frozen_drafter=_drafts_with_a_model(config) and not config.trains_drafter,
    )


def _write_start(head: DraftHead | None, folder: RunFolder) -> None:
    """Keep the head the run starts from; a folder that cannot hold it is not left behind."""
    if head is None:
        return
    try:
        write_head(head, folder.path / _DRAFT_START)
    except (LeadoutError, OSError):
        folder.discard_if_unused()
        raise


def _make_run(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    pipeline: SynchronousPipeline,
    progress: Progress,
    generator: NativeGenerator,
    stateful: Mapping[str, Stateful],
) -> Run:
    return Run(
        folder=folder,
        pipeline=pipeline,
        progress=progress,
        max_steps=config.pipeline.max_steps,
        checkpoint_every=config.checkpoint.every,
        keep_checkpoints=config.checkpoint.keep,
        evaluation=None if inputs.held_out is None else _evaluation(config, inputs, inputs.held_out, generator),
        evaluate_every=config.eval.every or 1,
        save_rollouts=config.log.rollouts,
        log_to=config.log.to,
        stateful=stateful,
    )


def finish_run(config: RunConfig, parts: RunParts, last: FinishedStep | None, console: Console) -> None:
    """The closing table and the report; without a last step (a run killed at its very end) only stages are shown."""
    folder, generator = parts.run.folder, parts.generator
    variants = {"plain": generator.variant(FixedLength(0), drafts=False)}
    speculation, own = config.rollout.speculative_config, "auto"
    cases: tuple[Case, ...] = CASES
    if config.log.benchmark and speculation is not None and last is not None:
        generator.refit(parts.run.pipeline.learner.publish())
        automatic = speculation.model_copy(update={"num_speculative_tokens": "auto"})
        variants = {
            "plain": generator.variant(FixedLength(0), drafts=False),
            "auto": generator.variant(make_draft_length(automatic)),
            f"k={_CLOSING_DRAFTS}": generator.variant(FixedLength(_CLOSING_DRAFTS)),
        }
        if speculation.num_speculative_tokens == "auto":
            variants["auto"] = generator
        else:
            own = f"k={speculation.num_speculative_tokens}, as trained"
            variants[own] = generator
            cases = (Case(name=f"full batch, {own}", variant=own, rows=None, pairs=3), *CASES)
    closing = close_run(
        variants=variants,
        requests=() if last is None else last.requests,
        rows=read_rows(folder.metrics),
        run_variant=own,
        cases=cases,
    )
    print_closing(console, closing)
    write_json(folder.closing, closing.to_json())
    console.print(f"report: {write_report([folder.path], folder.report)}")


def _make_head(
    config: RunConfig,
    decoder: FusedDecoder,
    weights: Mapping[str, torch.Tensor],
    inputs: Inputs,
    folder: RunFolder | None,
) -> DraftHead | None:
    """The head a run starts from: the recipe's, the one an earlier start made, the policy's own, or a new one."""
    speculation = config.rollout.speculative_config
    if speculation is None or speculation.draft_head is None:
        return None
    method = speculation.draft_head
    if speculation.model is not None:
        head = load_head(speculation.model, weights, method, rope=decoder.spec.rope)
        if config.draft.vocab_size not in (None, head.spec.draft_vocab_size):
            logger.warning(
                "draft.vocab_size: %d is for a new head, the one in %s drafts from %d tokens",
                config.draft.vocab_size,
                speculation.model,
                head.spec.draft_vocab_size,
            )
        asked = config.draft.layer_ids
        if asked is not None and asked != head.spec.layer_ids:
            logger.warning(
                "draft.layer_ids: %s is for a new head, the one in %s reads layers %s",
                *(list(asked), speculation.model, list(head.spec.layer_ids)),
            )
        return head
    if folder is not None and (folder.path / _DRAFT_START / "config.json").is_file():
        return load_head(folder.path / _DRAFT_START, weights, method)
    if method == "mtp" and has_mtp(inputs.path):
        return load_head(inputs.path, weights, method)
    return new_head(
        config.draft,
        decoder,
        weights,
        spread_prompts(inputs.data.prompts.prompts, _RANKED_PROMPTS),
        seed=config.seed,
        temperature=config.rollout.temperature,
        keep=inputs.codec.special_token_ids,
        method=method,
    )


def _evaluation(config: RunConfig, inputs: Inputs, held_out: LoadedData, generator: NativeGenerator) -> Evaluation:
    section = config.rollout.model_copy(update={"temperature": config.eval.temperature})
    return Evaluation(
        prompts=held_out.prompts.prompts[: config.eval.num_prompts],
        generator=generator,
        scorer=make_scorer(config.reward, inputs.codec, held_out.task, config.rollout, config.grpo),
        params=sampling_params(section, inputs.codec, config.seed + EVALUATION_SEED),
        num_generations=config.eval.num_generations,
    )


def _drafts_with_a_model(config: RunConfig) -> bool:
    speculation = config.rollout.speculative_config
    return speculation is not None and speculation.draft_model is not None


def _row_length(config: RunConfig, inputs: Inputs) -> int:
    """Tokens of the longest row: as asked for, or what prompts and completions need, within the model's context."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    return min(inputs.spec.max_position_embeddings, inputs.longest + config.rollout.max_completion_length)
