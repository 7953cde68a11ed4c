"""All drafters measured by one command, and the tables of docs/drafters.md from what is measured.

python -m benchmarks.drafters STAGE --out DIR [--only PATTERN] [options]

Stages: `train` (drafters), `policy` (one tuned to the task), `acceptance`, `speed`, `online` (frozen against online
training), `tables` (Markdown), `all` (one after the other). Every cell is a file in DIR, so a stage that was stopped
goes on where it was; options are kept in DIR too and need not be repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import typing
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import drafter_tables
from benchmarks.drafter_cells import STAGES, Cell, Options, cells
from benchmarks.drafter_store import Store, read_options, write_options
from leadout.errors import ConfigError, LeadoutError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where something could not be measured, 2 for bad input."""
    parsed = vars(_parser().parse_args(arguments))
    stage, out, only = parsed.pop("stage"), parsed.pop("out"), parsed.pop("only")
    console = Console(stderr=True, width=140)
    try:
        options = read_options(out, parsed)
        store, planned = Store(out), cells(options)
        for cell in planned:
            store.check(cell)
        write_options(out, options)
        stages = STAGES if stage == "all" else [name for name in STAGES if name == stage]
        wanted = {name: [c for c in planned if c.stage == name and fnmatchcase(c.name, only)] for name in stages}
        if stages and not any(wanted.values()):
            raise ConfigError(f"--only: expected a name such as {_example(planned, stages)}, got {only}")
        complete = [run_stage(name, each, options, store, console) for name, each in wanted.items()]
        if stage in ("tables", "all"):
            print(drafter_tables.render(options, store))
    except LeadoutError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 130
    return 0 if all(complete) else 1


def _example(planned: Sequence[Cell], stages: Sequence[str]) -> str:
    return next(cell.name for cell in planned if cell.stage in stages)


def run_stage(stage: str, wanted: Sequence[Cell], options: Options, store: Store, console: Console) -> bool:
    """Measure what is left of a stage; whether all that was asked for is there now."""
    from benchmarks.drafter_bench import Bench
    from benchmarks.drafter_measure import measure_acceptance, measure_speed, measure_training
    from benchmarks.drafter_runs import measure_online, measure_policy

    left = [cell for cell in wanted if not store.path(cell).is_file()]
    console.print(f"{stage}: {len(left)} of {len(wanted)} cells left")
    measures: dict[str, Any] = {
        "train": measure_training,
        "policy": measure_policy,
        "acceptance": measure_acceptance,
        "speed": measure_speed,
        "online": measure_online,
    }
    bench = Bench(options, store, console)
    out_of_reach = 0
    spent: list[float] = []
    for number, cell in enumerate(left, 1):
        lack = lacking(cell, options, store)
        if lack is not None:
            console.print(f"{stage} {cell.name}: left out, {lack}", markup=False, soft_wrap=True)
            out_of_reach += 1
            continue
        console.print(f"{stage} {number} of {len(left)}: {cell.name}", markup=False)
        began = time.monotonic()
        store.write(cell, measures[stage](bench, cell))
        spent.append(time.monotonic() - began)
        rest = statistics.fmean(spent) * (len(left) - number) / 60
        console.print(f"{stage} {cell.name}: {spent[-1]:.0f} s; about {rest:.0f} min left of {stage}", markup=False)
    return not out_of_reach


def lacking(cell: Cell, options: Options, store: Store) -> str | None:
    """Why it cannot be measured yet, if so."""
    files = [f"--{name.replace('_', '-')}" for name in cell.files if getattr(options, name) is None]
    needs = [name for name in cell.needs if not store.has(name)]
    if files:
        return f"{' and '.join(files)} must be given"
    return f"{' and '.join(needs)} is not measured" if needs else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("stage", choices=(*STAGES, "tables", "all"))
    parser.add_argument("--out", type=Path, default=Path("runs/drafters"), help="output folder (runs/drafters)")
    parser.add_argument("--only", default="*", help="names of cells, * and ? stand for anything")
    for name, option in Options.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            help=f"{option.description}{_default(option.default)}",
            **_reading(name, many=typing.get_origin(option.annotation) is tuple),
        )
    return parser


def _reading(name: str, *, many: bool) -> dict[str, Any]:
    if name == "head":
        return {"action": "append", "type": _folder, "metavar": "DIR"}
    if many:
        return {"type": lambda text: text.split(","), "metavar": "A,B,…"}
    if name in ("gsm8k", "gsm8k_train", "tuned"):
        return {"type": _folder, "metavar": "PATH"}
    if name == "other":
        return {"type": _rows, "metavar": "FILE@KEY"}
    return {"metavar": "VALUE"}


def _folder(text: str) -> str:
    """Absolute, since the next call may come from elsewhere."""
    path = Path(text).absolute()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"expected a file or folder, got {path}, which is not there")
    return str(path)


def _rows(text: str) -> str:
    path, sign, key = text.rpartition("@")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"expected FILE@KEY, such as {text}@problem, got {text}")
    return f"{_folder(path)}@{key}"


def _default(value: object) -> str:
    if value in (None, ()):
        return ""
    return f" ({','.join(map(str, value)) if isinstance(value, tuple) else value})"


if __name__ == "__main__":
    sys.exit(main())
