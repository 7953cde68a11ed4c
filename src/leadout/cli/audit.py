"""``leadout audit``: is this generator lossless?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leadout.cli.options import check_target
from leadout.config import Method
from leadout.errors import ConfigError, DataError
from leadout.records import SamplingParams

if TYPE_CHECKING:
    from leadout.audit.faults import Fault
    from leadout.build.audit import AuditOptions

_Method = Literal["noisy_policy", Method, "none"]


def audit(
    model: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder or hub id.")] = "smollm2-135m",
    method: Annotated[
        _Method | None, typer.Option(help="Drafter; noisy_policy is accepted often at every position.")
    ] = None,
    draft: Annotated[str | None, typer.Option(metavar="DIR", help="A draft head (then --method is its kind).")] = None,
    backend: Annotated[Literal["native"], typer.Option(help="The generator under test.")] = "native",
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Smallest set reaching this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(max=2**31 - 1, help="The k most probable tokens; 0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="At least this share of the largest probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    k: Annotated[int, typer.Option("--k", min=1, max=16, help="Tokens drafted per round.")] = 3,
    tokens: Annotated[int, typer.Option(min=100, max=10_000_000, help="About how many tokens to draw.")] = 20_000,
    dtype: Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Of the generator.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sample.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line, in place of the built-in ones.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the verdict here.")] = None,
    inject: Annotated[str | None, typer.Option(metavar="NAME", help="Put a known fault into the generator.")] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", metavar="", help="Name the faults and exit.")] = False,
) -> None:
    """Test whether every token was drawn from the policy, whatever the drafter proposed.

    Exit code 0: lossless as far as this sample can tell; 1: not; 3: could not judge (says what is missing).

    Example: leadout audit --tokens 20000
    """
    from leadout.audit.faults import fault_named, faults

    if list_faults:
        for each in faults():
            typer.echo(each.line)
        return
    _check_files(method, draft, json)
    fault = None if inject is None else fault_named(inject)
    params = _params(
        fault,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    from leadout.build.audit import AuditOptions
    from leadout.build.drafter import head_method

    options = AuditOptions(
        model=model,
        method=method or ("noisy_policy" if draft is None else head_method(draft)),
        draft=draft,
        num_drafts=k,
        tokens=tokens,
        params=params,
        dtype=dtype,
        fault=fault,
    )
    raise typer.Exit(_run(_with_prompts(options, prompts), json))


def _check_files(method: str | None, draft: str | None, path: Path | None) -> None:
    """Before the work, not after it."""
    if draft is not None and method in ("noisy_policy", "ngram", "history", "none"):
        raise ConfigError(f"--method {method} drafts without a model, got --draft {draft}; leave one of them out")
    check_target(path, "--json")


def _params(fault: Fault | None, *, seed: int, **given: float | int | None) -> SamplingParams:
    """A fault's setting or the defaults, overridden by the options that were given."""
    named = {name: value for name, value in given.items() if value is not None}
    for name, value in named.items():
        if not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')}: expected a finite number, got {value}")
    setting = SamplingParams() if fault is None else fault.setting
    try:
        params = replace(setting, seed=seed, max_new_tokens=64, **named)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if fault is not None:
        fault.check(params)
    return params


def _with_prompts(options: AuditOptions, path: Path | None) -> AuditOptions:
    if path is None:
        return options
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--prompts: expected a text file with one prompt a line, cannot read {path}: {error}"
        ) from error
    if not lines:
        raise DataError(f"--prompts: expected at least one prompt in {path}, got none")
    return replace(options, prompts=tuple(lines))


def _run(options: AuditOptions, json: Path | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from leadout.audit.render import render
    from leadout.build.audit import audit as run_audit
    from leadout.pipeline.folder import write_text

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    columns = (TextColumn("auditing"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("audit", total=None, tokens=0)
        verdict = run_audit(
            options, progress=lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens)
        )
    # First the file: whoever reads the table may stop in the middle of it.
    if json is not None:
        write_text(json, verdict.to_json() + "\n")
    console.print(render(verdict))
    return verdict.exit_code
