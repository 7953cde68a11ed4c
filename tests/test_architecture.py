"""Holds the shape of the source tree: who may import whom, sizes, docstrings. Nothing here imports the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "leadout"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in FILES]

STAGES = {"data", "rollout", "reward", "logprob", "train", "refit"}
BASE = {"records", "interfaces", "errors", "clock"}
LOWER = BASE | {"storage", "text", "models", "drafters", "draft_length", "batch"}

MAY_IMPORT = {
    "__init__": set(),
    "records": set(),
    "errors": set(),
    "storage": {"errors"},
    "config": set(),
    "interfaces": {"records"},
    "clock": {"records"},
    "metrics": BASE,
    "text": BASE,
    "batch": BASE,
    "recipe": {"config", "errors"},
    "draft_length": BASE,
    "models": BASE | {"storage", "text", "draft_length"},
    "drafters": BASE | {"text", "draft_length", "models"},
    **dict.fromkeys(STAGES, LOWER),
    "pipeline": BASE | {"metrics", "draft_length"},
    "report": BASE | {"metrics", "pipeline"},
    "audit": LOWER | {"rollout"},
    "bench": LOWER | {"rollout", "pipeline", "sim"},
    "sim": {"records", "errors", "config", "clock", "draft_length", "pipeline"},
    "backends": LOWER | STAGES | {"config", "metrics", "pipeline"},
    "build": LOWER
    | STAGES
    | {"config", "recipe", "metrics", "pipeline", "report", "audit", "bench", "sim", "backends"},
    "cli": LOWER | {"config", "recipe", "metrics", "pipeline", "report", "audit", "bench", "sim", "build"},
}
"""Which packages (or top-level modules) may import which. A new one needs a row."""

WITHOUT_TORCH = {
    "records",
    "interfaces",
    "errors",
    "clock",
    "metrics",
    "config",
    "recipe",
    "draft_length",
    "pipeline",
    "report",
    "sim",
}

LONGER_THAN_300_LINES = {"records.py", "config.py"}
"""One page of declarations each, a docstring under every field; splitting them would hide what they are for."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(node: ast.AST, *, type_checking: bool = True) -> Iterator[str]:
    """Dotted names of everything imported below a node; without `type_checking`, only what is imported at run time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and not type_checking and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imports(child, type_checking=type_checking)


def own_imports(path: Path) -> set[str]:
    """Packages of ours that a file imports, its own left out."""
    ours = {name.split(".")[1] for name in imports(tree(path)) if name.startswith("leadout.")}
    return {name for name in ours if name != package_of(path) and name in MAY_IMPORT}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_packages_import_only_what_they_may(path: Path) -> None:
    package = package_of(path)
    assert package in MAY_IMPORT, f"{package} is new: say in MAY_IMPORT what it may import"
    forbidden = own_imports(path) - MAY_IMPORT[package]
    assert not forbidden, f"{package} must not import {', '.join(sorted(forbidden))}"


def test_stages_never_import_each_other() -> None:
    found = {
        (package_of(path), other)
        for path in FILES
        for other in own_imports(path)
        if package_of(path) in STAGES and other in STAGES
    }
    assert found == set()


def test_nobody_imports_the_command_line() -> None:
    importers = {package_of(path) for path in FILES if "cli" in own_imports(path)}
    assert importers == set()


def test_packages_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(package_of(path), set()).update(own_imports(path))
    finished: list[str] = []

    def visit(package: str, way: tuple[str, ...]) -> None:
        assert package not in way, f"cycle: {' -> '.join((*way, package))}"
        if package not in finished:
            for other in sorted(graph.get(package, ())):
                visit(other, (*way, package))
            finished.append(package)

    for package in sorted(graph):
        visit(package, ())


def test_the_simulator_takes_only_the_admission_rule_of_the_pipeline() -> None:
    taken = {
        name
        for path in FILES
        if package_of(path) == "sim"
        for name in imports(tree(path))
        if name.startswith("leadout.pipeline")
    }
    assert {name for name in taken if not name.startswith("leadout.pipeline.lag")} == set()


PEER_SERVER = "bench/peers/server.py"
"""A program for another process and another environment; nothing of ours imports it, and it imports nothing of ours."""


@pytest.mark.parametrize("engine", ["ray", "vllm"])
def test_engines_are_imported_in_backends_and_by_the_peer_server_only(engine: str) -> None:
    importers = {
        name for name, path in zip(NAMES, FILES) if any(n.split(".")[0] == engine for n in imports(tree(path)))
    }
    assert {name for name in importers if not name.startswith("backends/")} <= {PEER_SERVER}


def test_the_peer_server_stands_alone() -> None:
    assert not any(name.startswith("leadout") for name in imports(tree(SOURCE / PEER_SERVER)))
    assert not any("leadout.bench.peers.server" in set(imports(tree(path))) for path in FILES)


def test_packages_that_run_without_torch_do_not_import_it() -> None:
    importers = {
        package_of(path)
        for path in FILES
        if any(name.split(".")[0] == "torch" for name in imports(tree(path), type_checking=False))
    }
    assert importers & WITHOUT_TORCH == set()


def test_simulator_and_pipeline_load_without_torch() -> None:
    modules = [
        ".".join(("leadout", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in FILES
        if package_of(path) in WITHOUT_TORCH
    ]
    code = (
        f"import sys, {', '.join(modules)}\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if str(path.relative_to(SOURCE)) not in LONGER_THAN_300_LINES:
        assert lines <= 300, f"{lines} lines"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 60
    }
    assert long == {}


@pytest.mark.parametrize("path", [path for path in FILES if path.stat().st_size], ids=str)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(tree(path))
    assert docstring is not None
    assert len(docstring) >= 30


def test_no_package_is_a_drawer_of_odds_and_ends() -> None:
    assert [
        name for name in NAMES if {"utils", "helpers", "common", "misc"} & set(Path(name).with_suffix("").parts)
    ] == []


def test_protocols_have_at_most_five_methods() -> None:
    counts = {
        node.name: sum(isinstance(item, ast.FunctionDef) and not item.decorator_list for item in node.body)
        for node in ast.walk(tree(SOURCE / "interfaces.py"))
        if isinstance(node, ast.ClassDef) and "Protocol" in [ast.unparse(base) for base in node.bases]
    }
    assert len(counts) >= 6
    assert {name: count for name, count in counts.items() if count > 5} == {}


def test_native_calls_get_no_address_of_something_that_nobody_holds() -> None:
    """`x.contiguous().data_ptr()` is the address of memory that is free again before the call reads it."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "ctypes")):
                continue
            if isinstance(node.value, ast.Call):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found
