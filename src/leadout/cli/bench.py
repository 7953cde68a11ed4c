"""``leadout bench``: tokens per second, acceptance, round cost and memory, beside peers, measured in turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from leadout.cli.options import check_target
from leadout.config import BenchMethod
from leadout.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from leadout.build.bench import BenchOptions, Length

_MOST_ROWS = 1024
_MOST_DRAFTS = 16


_Model = Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder or hub id.")]
_Sizes = Annotated[str, typer.Option(metavar="N,N", help="Rows generated at once.")]
_Drafts = Annotated[str, typer.Option("--k", metavar="K,K", help="Draft lengths; 0 is plain, auto chooses.")]
_Drafter = Annotated[
    str,
    typer.Option(
        metavar="METHOD",
        help=f"{', '.join(get_args(BenchMethod))}; a head without --draft is untrained. Several with --calibrate: M,M.",
    ),
]
_Draft = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A draft head or small model; of several drafters: METHOD=DIR,METHOD=DIR."),
]
_Set = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Keep each draft this often, at the drafter's full cost.")
]
_Context = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
_New = Annotated[int, typer.Option(min=2, help="New tokens of each row; end tokens are ignored.")]
_Load = Annotated[
    Literal["fixed", "longtail"], typer.Option(help="longtail: 64 rows, 8 of each prompt, of log-normal length.")
]
_Peers = Annotated[str | None, typer.Option(metavar="P,P", help="Peers: hf, vllm; each in its own process.")]
_Python = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Interpreter with vLLM; in the cache folder if not given.")
]
_Repeats = Annotated[int, typer.Option(min=1, max=1000, help="Counted samples of each contender.")]
_Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores if not given.")]
_Dtype = Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Of our engine.")]
_Calibrate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Instead, write this machine's profile for `leadout simulate --profile`."),
]
_Targets = Annotated[
    bool, typer.Option("--targets", metavar="", help="Instead, measure the project's targets (25 to 35 minutes).")
]
_Sections = Annotated[
    str | None,
    typer.Option(metavar="S,S", help="With --targets: some of peers, rounds, auto, tail, context; all if not given."),
]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write everything here.")]


_OF_TARGETS = ("targets", "model", "draft", "threads", "dtype", "vllm_python", "sections", "json")
_OF_CALIBRATE = ("calibrate", "model", "batch_sizes", "method", "draft", "context", "threads", "dtype")


def bench(
    context_of_call: typer.Context,
    model: _Model = "smollm2-135m",
    batch_sizes: _Sizes = "1,4,8,16,32,64",
    k: _Drafts = "0,1,3,5,auto",
    method: _Drafter = "eagle3",
    draft: _Draft = None,
    set_acceptance: _Set = None,
    context: _Context = 64,
    new_tokens: _New = 64,
    workload: _Load = "fixed",
    against: _Peers = None,
    vllm_python: _Python = None,
    repeats: _Repeats = 5,
    threads: _Threads = None,
    dtype: _Dtype = "bfloat16",
    calibrate: _Calibrate = None,
    targets: _Targets = False,
    sections: _Sections = None,
    json: _Json = None,
) -> None:
    """Measure generation: tokens/s, acceptance, round cost and memory at every batch size and draft length.

    Contenders are measured in turn (A B A B) after a warm-up, with the same prompts and the same weights.

    Example: leadout bench --batch-sizes 1,4,16 --k 0,3,auto
    """
    check_target(json, "--json")
    check_target(calibrate, "--calibrate")
    _check_mode(context_of_call, sections)
    sizes = _counts(batch_sizes, "--batch-sizes", low=1, high=_MOST_ROWS)
    drafters = _drafters(method, draft)
    if len(drafters) > 1 and calibrate is None:
        raise ConfigError(f"--method: several drafters go with --calibrate only, got {method!r}; name one of them")
    from leadout.build.bench import BenchOptions

    options = BenchOptions(
        model=model,
        batch_sizes=sizes,
        lengths=_lengths(k),
        method=next(iter(drafters)),
        draft=next(iter(drafters.values())),
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
    if calibrate is not None:
        _calibrate(options, drafters, calibrate)
    elif targets:
        _targets_table(options, _section_names(sections), json)
    else:
        _run(options, json)


def _check_mode(context: typer.Context, sections: str | None) -> None:
    """Two measurements at once, and options that the one asked for does not look at, are a misunderstanding."""
    targets, calibrate = context.params["targets"], context.params["calibrate"] is not None
    if targets and calibrate:
        raise ConfigError("--targets and --calibrate are two measurements; leave one of them out")
    if sections is not None and not targets:
        raise ConfigError("--sections goes with --targets only; give both or neither")
    if not targets and not calibrate:
        return
    mode, used = ("--targets", _OF_TARGETS) if targets else ("--calibrate", _OF_CALIBRATE)
    takes = ", ".join(f"--{each.replace('_', '-')}" for each in used)
    for name in context.params:
        given = context.get_parameter_source(name)
        if name not in used and given is not None and given.name == "COMMANDLINE":
            raise ConfigError(f"{mode} does not take --{name.replace('_', '-')}; leave it out (it takes {takes})")


def _section_names(text: str | None) -> tuple[str, ...]:
    from leadout.bench.targets import SECTIONS

    names = SECTIONS if text is None else tuple(dict.fromkeys(text.split(",")))
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        raise ConfigError(f"--sections: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    return names


def _drafters(methods: str, drafts: str | None) -> dict[BenchMethod, str | None]:
    """Methods with their folders; a folder without a method belongs to the only one."""
    found: dict[BenchMethod, str | None] = {}
    for name in methods.split(","):
        kind = next((known for known in get_args(BenchMethod) if known == name), None)
        if kind is None:
            raise ConfigError(f"--method: expected one of {', '.join(get_args(BenchMethod))}, got {name!r}")
        found[kind] = None
    if drafts is None:
        return found
    if len(found) == 1:
        (kind,) = found
        return {kind: drafts.removeprefix(f"{kind}=")}
    for part in drafts.split(","):
        name, _, folder = part.partition("=")
        kind = next((known for known in found if known == name), None)
        if kind is None or not folder:
            raise ConfigError(
                f"--draft: expected METHOD=DIR with a method of {', '.join(found)}, separated by commas, got {part!r}"
            )
        found[kind] = folder
    return found


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


def _calibrate(options: BenchOptions, drafters: dict[BenchMethod, str | None], path: Path) -> None:
    from leadout.build.bench_calibrate import calibrate as measure
    from leadout.pipeline.folder import write_text

    console = _console()
    with console.status("loading the model") as status:
        tell = status.update if console.is_terminal else console.print
        profile = measure(options, tell=tell, drafters=drafters)
    write_text(path, profile.model_dump_json(indent=1) + "\n")
    limits = profile.limits
    assert limits is not None
    console.print(
        f"wrote {path}: {', '.join(profile.drafters) or 'plain rounds only'}; {len(profile.rounds)} grids of rounds, "
        f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {limits.product_flops / 1e9:.0f} GFLOP/s; use it with "
        f"leadout simulate --run RUN --profile {path}, or as rollout.speculative_config.leadout.cost_profile"
    )


def _targets_table(options: BenchOptions, sections: tuple[str, ...], json: Path | None) -> None:
    from leadout.bench.render import render_cell, render_checks
    from leadout.bench.results import Cell
    from leadout.bench.targets import TargetPlan
    from leadout.build.bench_targets import measure_targets
    from leadout.pipeline.folder import write_json

    console = _console()
    with console.status("loading the model") as status:

        def show(cell: Cell) -> None:
            console.print(render_cell(cell))
            console.print()

        report = measure_targets(options, TargetPlan(sections=sections), tell=status.update, show=show)
    for note in report.notes:
        console.print(note)
    console.print(render_checks(report.checks))
    if json is not None:
        write_json(json, report.to_json())
