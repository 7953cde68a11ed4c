"""YAML as recipes need it: ``1e-5`` is a number (YAML 1.1 reads text), and a key given twice is an error.

`load_yaml` refuses what YAML allows and no recipe needs: keys that are lists, values that hold themselves, nesting
without end, numbers of thousands of digits, halves of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_MOST_VALUES = 100_000


class RecipeLoader(yaml.SafeLoader):
    """The safe loader with the two changes."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Bring merged keys (``<<: *base``) in; raises on a repeated key, and on one that is no plain value."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _wrong(f"expected plain text as a key, got a {key_node.id}", key_node)
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _wrong(f"key {key!r} is given twice", key_node)
            seen.add(key)


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_yaml(text: str) -> Any:
    """Plain values of a YAML text.

    Raises:
        ValueError: not YAML, or more than a recipe may hold; one line.

    """
    try:
        tree = yaml.load(text, RecipeLoader)
        _check(tree)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("values are nested too deeply; a recipe needs few levels") from error
    return tree


def _check(tree: Any) -> None:
    """Refuse halves of characters, values that hold themselves, and anchors that multiply beyond all memory."""
    for count, value in enumerate(_leaves(tree, ())):
        if count >= _MOST_VALUES:
            raise ValueError(f"expected at most {_MOST_VALUES:,} values, got more; anchors may repeat each other")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"text holds half of a character (a lone surrogate): {value!a:.80}")


def _leaves(value: Any, way: tuple[int, ...]) -> Iterator[Any]:
    """Keys and plain values, each as often as it would be written out without anchors."""
    if not isinstance(value, dict | list):
        yield value
        return
    if id(value) in way:
        raise ValueError("an anchor (&name) holds itself (*name); write the values out")
    for item in [*value, *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(item, (*way, id(value)))


def _wrong(message: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)
