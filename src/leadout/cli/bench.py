"""``leadout bench``: tokens per second, acceptance, round cost and memory, beside peers, measured in turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leadout.cli.options import check_target
from leadout.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from leadout.build.bench import BenchOptions, Length

_Method = Literal["none", "ngram", "eagle3", "noisy_policy", "history", "small_model"]
_MOST_ROWS = 1024
_MOST_DRAFTS = 16


def bench(
    model: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder or hub id.")] = "smollm2-135m",
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Rows generated at once.")] = "1,4,8,16,32,64",
    k: Annotated[
        str, typer.Option("--k", metavar="K,K", help="Draft lengths; 0 is plain, auto chooses.")
    ] = "0,1,3,5,auto",
    method: Annotated[_Method, typer.Option(help="Drafter; eagle3 without --draft is an untrained head.")] = "eagle3",
    draft: Annotated[str | None, typer.Option(metavar="DIR", help="A draft head or small model.")] = None,
    set_acceptance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Keep each draft this often, at the drafter's full cost.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each row; end tokens are ignored.")] = 64,
    workload: Annotated[
        Literal["fixed", "longtail"], typer.Option(help="longtail: 64 rows of log-normal length.")
    ] = "fixed",
    against: Annotated[
        str | None, typer.Option(metavar="P,P", help="Peers: hf, vllm; each in its own process.")
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Interpreter with vLLM; in the cache folder if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Counted samples of each contender.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores if not given.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Of our engine.")] = "bfloat16",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write everything here.")] = None,
) -> None:
    """Measure generation: tokens/s, acceptance, round cost and memory at every batch size and draft length.

    Contenders are measured in turn (A B A B) after a warm-up, with the same prompts and the same weights.

    Example: leadout bench --batch-sizes 1,4,16 --k 0,3,auto
    """
    check_target(json, "--json")
    sizes = _counts(batch_sizes, "--batch-sizes", low=1, high=_MOST_ROWS)
    from leadout.build.bench import BenchOptions

    options = BenchOptions(
        model=model,
        batch_sizes=sizes,
        lengths=_lengths(k),
        method=method,
        draft=draft,
        set_acceptance=set_acceptance,
        context=context,
        new_tokens=new_tokens,
        repeats=repeats,
        workload=workload,
        dtype=dtype,
        threads=threads,
        against=() if against is None else tuple(dict.fromkeys(against.split(","))),
        vllm_python=vllm_python,
    )
    _run(options, json)


def _counts(text: str, option: str, *, low: int, high: int) -> tuple[int, ...]:
    """Whole numbers with commas, ascending in no order of ours."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(low <= count <= high for count in counts):
        raise ConfigError(
            f"{option}: expected whole numbers from {low} to {high} with commas, such as 1,4, got {text!r}"
        )
    return counts


def _lengths(text: str) -> tuple[Length, ...]:
    """Draft lengths with commas; `auto` may be among them."""
    parts = [part.strip() for part in text.split(",")]
    fixed = [part for part in parts if part != "auto"]
    if not all(part.isdecimal() and int(part) <= _MOST_DRAFTS for part in fixed):
        raise ConfigError(
            f"--k: expected numbers from 0 to {_MOST_DRAFTS} or auto with commas, such as 0,3,auto, got {text!r}"
        )
    return tuple("auto" if part == "auto" else int(part) for part in parts)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


def _run(options: BenchOptions, json: Path | None) -> None:
    from leadout.bench.render import render_cell
    from leadout.bench.results import Cell
    from leadout.build.bench import bench as run_bench
    from leadout.pipeline.folder import write_json

    console = _console()
    with console.status("loading the model") as status:

        def show(cell: Cell) -> None:
            console.print(render_cell(cell))
            console.print()

        report = run_bench(options, tell=status.update, show=show)
    for name, peer in report.peers.items():
        console.print(
            f"{name} {peer['version']}: stopped for {peer['idle_seconds']:.1f} s, in which it used "
            f"{peer['idle_cpu_seconds']:.2f} s of processor time"
        )
    if json is not None:
        write_json(json, report.to_json())
