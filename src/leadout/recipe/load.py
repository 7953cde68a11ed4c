"""Recipes: a YAML file plus ``a.b=c`` overrides -> `RunConfig`, and back.

Whatever is wrong with a recipe ends in one line: an unknown key names the nearest one, a key of another framework
names ours, a wrong value says what was expected and what came. Nothing is translated silently.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from leadout.config import RunConfig, Section
from leadout.errors import ConfigError
from leadout.recipe.keys import ACCEPTED, foreign_key, nearest_key
from leadout.recipe.loader import load_yaml
from leadout.recipe.problems import first_problem

Tree = dict[str, Any]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply ``a.b=c`` overrides in order (values are YAML), and check everything.

    Example: ``load_recipe(Path("recipes/demo.yaml"), ["pipeline.max_steps=5"])``

    Raises:
        ConfigError: no such file, not YAML, an unknown or foreign key, a wrong value.

    """
    tree = _read(path)
    for override in overrides:
        _override(tree, override)
    return parse(tree)


def parse(tree: Mapping[str, Any]) -> RunConfig:
    """Check a recipe that is already a tree of plain values.

    Raises:
        ConfigError: an unknown or foreign key, a wrong value.

    """
    renamed = _rename(dict(tree), RunConfig, "")
    for key, is_leaf in _unknown(renamed, RunConfig, ""):
        raise ConfigError(_unknown_message(key, is_leaf))
    try:
        return RunConfig.model_validate(renamed)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from None


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_recipe` of it gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError(f"no recipe {path}; expected a YAML file such as recipes/demo.yaml")
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(tree).__name__}")
    return tree


def _override(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"expected an override like pipeline.max_steps=5, got {override!r}")
    try:
        value = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"override {override!r:.80}: the value is not YAML: {error}") from error
    section = tree
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parts[:depth])} is a value, not a section")
    section[parts[-1]] = value


def _rename(tree: Tree, section: type[Section], prefix: str) -> Tree:
    """Replace the few accepted aliases by our own names."""
    renamed: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        own = ACCEPTED.get(path, path).rpartition(".")[2]
        if own in renamed or (own != key and own in tree):
            raise ConfigError(f"{path} and {ACCEPTED[path]} are the same setting; give one of them")
        inner = section_of(section, own)
        renamed[own] = _rename(value, inner, f"{path}.") if inner and isinstance(value, dict) else value
    return renamed


def _unknown(tree: Mapping[Any, Any], section: type[Section], prefix: str) -> Iterator[tuple[str, bool]]:
    """Dotted keys that no section has, and whether they hold a value (rather than a section of their own)."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in section.model_fields:
            inner = list(_leaves(value, f"{path}.")) if isinstance(value, dict) and value else []
            yield from inner or [(path, True)]
            continue
        nested = section_of(section, key)
        values = value if isinstance(value, list) else [value]
        for each in values:
            if nested and isinstance(each, dict):
                yield from _unknown(each, nested, f"{path}.")


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, bool]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", False


def _unknown_message(path: str, is_leaf: bool) -> str:
    ours = foreign_key(path)
    if ours is not None:
        return f"{path} is another framework's name; use {ours}"
    known = list(known_keys(RunConfig))
    name = path if is_leaf else _first_unknown(path, known)
    near = nearest_key(name, known)
    hint = f"; nearest: {near}" if near else f"; known here: {', '.join(_siblings(name, known))}"
    return f"unknown key {name}{hint}"


def _first_unknown(path: str, known: Sequence[str]) -> str:
    """The shortest leading part of a dotted key that is not known."""
    parts = path.split(".")
    cuts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((cut for cut in cuts if cut not in known), path)


def _siblings(path: str, known: Sequence[str]) -> list[str]:
    prefix, dot, _ = path.rpartition(".")
    return [key.removeprefix(prefix + dot) for key in known if key.rpartition(".")[0] == prefix]


def known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included."""
    for key in section.model_fields:
        yield f"{prefix}{key}"
        nested = section_of(section, key)
        if nested:
            yield from known_keys(nested, f"{prefix}{key}.")


def section_of(section: type[Section], key: str) -> type[Section] | None:
    """The section under a key (also inside ``| None`` and of the items of a list); None for plain values."""
    field = section.model_fields.get(key)
    return None if field is None else _section_in(field.annotation)


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        return next((found for each in get_args(annotation) if (found := _section_in(each))), None)
    return None
