"""What the comparison of drafters measures: options, drafters, and cells in the order of measuring.

A cell is one measurement, named by what it is of, such as ``eagle3.arithmetic.raw.k3.sampled`` of stage acceptance.
Nothing here loads a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from leadout.config import Count, Draft, Method, Positive, Section

STAGES = ("train", "policy", "acceptance", "speed", "online")
WORKLOADS = ("arithmetic", "gsm8k")
POLICIES = ("raw", "tuned")
MIDDLE_LENGTH = 3
"""k of everything that is measured at one draft length only."""
COMMAND = "python -m benchmarks.drafters"

Domain = Literal["mixed", "arithmetic", "other"]


class Options(Section):
    """Every option of the command; kept in the output folder, so that a later call need not repeat them."""

    model: str = Field("smollm2-135m", description="the raw policy: alias, folder or hub id")
    gsm8k_train: Path | None = Field(None, description="GSM8K training rows, column `question`")
    gsm8k: Path | None = Field(None, description="GSM8K rows to measure on, column `question`")
    other: str | None = Field(None, description="rows of another domain, for the comparison of initialisations")
    head: tuple[Path, ...] = Field((), description="a pretrained EAGLE-3 head, which gets its own row; may be repeated")
    tuned: Path | None = Field(None, description="a policy tuned to the task; by default one is trained")
    rollouts: Positive = Field(1024, description="rollouts that each drafter is trained on")
    loss_rollouts: Positive = Field(384, description="rollouts of each training in the comparison of losses")
    passes: Positive = Field(2, description="times that every rollout is learnt from")
    completion_length: Positive = Field(64, description="tokens of a rollout, in training and in measuring acceptance")
    vocab_size: Positive = Field(8192, description="draft vocabulary of eagle3 and parallel")
    ttt_steps: Positive = Field(3, description="unrolled steps")
    layers: tuple[Count, ...] = Field((0, 1, 29), description="layers of the policy that the small model starts from")
    losses: tuple[str, ...] = Field(("ce", "tv", "lk", "ce+tv"), description="losses to compare")
    seeds: tuple[Count, ...] = Field((0, 1, 2), description="seeds of the comparison of losses")
    policy_updates: Positive = Field(60, description="updates that make the tuned policy")
    lengths: tuple[Positive, ...] = Field((1, MIDDLE_LENGTH, 5, 7), description="draft lengths of acceptance")
    prompts: Positive = Field(64, description="prompts of every cell of acceptance; repeated where there are fewer")
    rows: Positive = Field(16, description="rows at once while acceptance is measured")
    batches: tuple[Positive, ...] = Field((1, 4, 16), description="rows at once while speed is measured")
    new_tokens: Positive = Field(64, description="tokens of a row while speed is measured")
    pairs: Positive = Field(5, description="counted A B A B turns of speed")
    updates: Positive = Field(40, description="policy updates of frozen against online")
    step_prompts: Positive = Field(4, description="prompts of a training step")
    generations: Positive = Field(8, description="completions of each of them")
    step_tokens: Positive = Field(32, description="tokens of each completion")
    learning_rate: float = Field(2e-5, description="of the policy")
    dtype: Literal["bfloat16", "float32", "float64"] = Field("bfloat16", description="of engine and matrix products")
    threads: Count = Field(0, description="CPU threads; 0 takes what is there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A row of the tables."""

    name: str
    method: Method
    part: Literal["main", "domain", "loss"] = "main"
    """In which comparison it appears; `eagle3` of the main one also stands in that of domains."""
    domain: Domain | None = "mixed"
    """What it is trained on; None where nothing is trained here."""
    trained_as: str = ""
    """The row whose training it drafts with, where it has none of its own."""
    loss: str = Draft().loss_fn
    seed: int = 0
    folder: Path | None = None
    """Of a given head."""

    @property
    def has_model(self) -> bool:
        """Whether its drafts have probabilities."""
        return self.method not in ("ngram", "history")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Something to measure."""

    stage: str
    name: str
    drafter: Drafter | None = None
    workload: str = "arithmetic"
    policy: str = "raw"
    length: int = MIDDLE_LENGTH
    greedy: bool = False
    rows: int = 0
    online: bool = False
    needs: tuple[str, ...] = ()
    """Cells, as STAGE/NAME, that must be there."""
    files: tuple[str, ...] = ()
    """Options that must be given."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self, out: Path, options: Options) -> str:
        """What measures it."""
        given = "".join(f" --{name.replace('_', '-')} FILE" for name in self.files if getattr(options, name) is None)
        return f"{COMMAND} {self.stage} --out {out} --only '{self.name}'{given}"


def drafters(options: Options) -> list[Drafter]:
    """All rows of all tables."""
    rows = [
        Drafter(name="eagle3", method="eagle3"),
        Drafter(name="parallel", method="parallel"),
        Drafter(name="mtp", method="mtp"),
        Drafter(name="small_model", method="small_model"),
    ]
    rows += [Drafter(name=f"head-{path.name}", method="eagle3", domain=None, folder=path) for path in options.head]
    rows += [
        Drafter(name="ngram", method="ngram", domain=None),
        Drafter(name="history", method="history", domain=None),
        Drafter(name="history+eagle3", method="history+eagle3", domain=None, trained_as="eagle3"),
        Drafter(name="eagle3-arithmetic", method="eagle3", part="domain", domain="arithmetic"),
        Drafter(name="eagle3-other", method="eagle3", part="domain", domain="other"),
    ]
    rows += [
        Drafter(name=f"eagle3-{loss}-{seed}", method="eagle3", part="loss", loss=loss, seed=seed)
        for loss in options.losses
        for seed in options.seeds
    ]
    return rows


def cells(options: Options) -> list[Cell]:
    """Everything there is to measure, in the order that it is measured in."""
    rows = drafters(options)
    return [
        *_training_cells(options, rows),
        Cell(stage="policy", name="tuned", settings=_policy_settings(options)),
        *(each for policy in POLICIES for each in _acceptance_cells(options, rows, policy)),
        *_speed_cells(options, rows),
        *_online_cells(options, rows),
    ]


def _pick(options: Options, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _training_cells(options: Options, rows: list[Drafter]) -> Iterator[Cell]:
    files = {"mixed": ("gsm8k_train",), "arithmetic": (), "other": ("other",)}
    for drafter in rows:
        if drafter.domain is None:
            continue
        names = ["model", "passes", "completion_length", "ttt_steps", "dtype", *files[drafter.domain]]
        names += ["vocab_size"] if drafter.method in ("eagle3", "parallel") else []
        names += ["layers"] if drafter.method == "small_model" else []
        count = options.loss_rollouts if drafter.part == "loss" else options.rollouts
        settings = {**_pick(options, *names), "rollouts": count}
        yield Cell(stage="train", name=drafter.name, drafter=drafter, files=files[drafter.domain], settings=settings)


def _policy_settings(options: Options) -> dict[str, Any]:
    if options.tuned is not None:
        return _pick(options, "model", "tuned")
    return _pick(options, "model", "policy_updates", *_STEP)


_STEP = ("step_prompts", "generations", "step_tokens", "learning_rate", "dtype")


def _acceptance_cells(options: Options, rows: list[Drafter], policy: str) -> Iterator[Cell]:
    for drafter in rows:
        if drafter.part == "loss" and policy != "raw":
            continue
        ways = [(k, False) for k in (options.lengths if drafter.part == "main" else (MIDDLE_LENGTH,))]
        ways += [(MIDDLE_LENGTH, True)] if drafter.part == "main" and drafter.has_model else []
        for workload in WORKLOADS:
            files = ("gsm8k",) if workload == "gsm8k" else ()
            settings = _pick(options, "model", "prompts", "rows", "completion_length", "dtype", *files)
            for length, greedy in ways:
                yield Cell(
                    stage="acceptance",
                    name=acceptance_name(drafter.name, workload, policy, length, greedy=greedy),
                    drafter=drafter,
                    workload=workload,
                    policy=policy,
                    length=length,
                    greedy=greedy,
                    needs=(*_trained(drafter), *(("policy/tuned",) if policy == "tuned" else ())),
                    files=files,
                    settings={**settings, "folder": drafter.folder},
                )


def acceptance_name(drafter: str, workload: str, policy: str, length: int, *, greedy: bool = False) -> str:
    """Of a cell of stage acceptance."""
    return f"{drafter}.{workload}.{policy}.k{length}.{'greedy' if greedy else 'sampled'}"


def _speed_cells(options: Options, rows: list[Drafter]) -> Iterator[Cell]:
    for drafter in rows:
        for count in options.batches if drafter.part == "main" else ():
            yield Cell(
                stage="speed",
                name=f"{drafter.name}.batch{count}",
                drafter=drafter,
                rows=count,
                needs=_trained(drafter),
                settings={**_pick(options, "model", "new_tokens", "pairs", "dtype"), "folder": drafter.folder},
            )


def _online_cells(options: Options, rows: list[Drafter]) -> Iterator[Cell]:
    for drafter in rows:
        if drafter.name in ("eagle3", "eagle3-other") or drafter.folder is not None:
            for online in (False, True):
                yield Cell(
                    stage="online",
                    name=f"{drafter.name}.{'online' if online else 'frozen'}",
                    drafter=drafter,
                    online=online,
                    needs=_trained(drafter),
                    settings={**_pick(options, "model", "updates", *_STEP), "folder": drafter.folder},
                )


def _trained(drafter: Drafter) -> tuple[str, ...]:
    trained = drafter.trained_as or ("" if drafter.domain is None else drafter.name)
    return (f"train/{trained}",) if trained else ()
