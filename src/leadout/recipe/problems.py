"""Condenses what pydantic says of a wrong value to one line: the key, what was expected, what came."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

_EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "int_parsing": "an integer",
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "string_type": "text",
        "string_too_short": "text that is not empty",
        "path_type": "a path",
        "model_type": "a section with keys",
        "model_attributes_type": "a section with keys",
        "dict_type": "a section with keys",
        "tuple_type": "a list",
        "list_type": "a list",
        "greater_than_equal": ">= {ge}",
        "greater_than": "> {gt}",
        "less_than_equal": "<= {le}",
        "less_than": "< {lt}",
        "literal_error": "{expected}",
        "missing": "a value",
        "too_short": "at least {min_length} items",
        "too_long": "at most {max_length} items",
    }
)


def first_problem(error: ValidationError) -> str:
    """One line about the first wrong key; all that would have been accepted there is named.

    Example: ``rollout.num_prompts: expected an integer, got 'many'``
    """
    details = error.errors(include_url=False)
    own = [detail for detail in details if detail["type"] == "value_error"]
    detail = own[0] if own else details[0]
    key = _key(detail["loc"])
    if detail["type"] == "value_error":
        message = str(detail["msg"]).removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    same = [each for each in details if _key(each["loc"]) == key and each["type"] != "value_error"]
    expected = " or ".join(dict.fromkeys(_expected(each) for each in same))
    got = "nothing" if detail["type"] == "missing" else f"{detail['input']!r:.80}"
    others = len({_key(each["loc"]) for each in details}) - 1
    more = f" (and {others} more wrong {'key' if others == 1 else 'keys'})" if others else ""
    return f"{key}: expected {expected}, got {got}{more}"


def _expected(detail: Any) -> str:
    text = _EXPECTED.get(detail["type"])
    return str(detail["msg"]) if text is None else text.format(**detail.get("ctx", {}))


def _key(location: tuple[int | str, ...]) -> str:
    """The dotted key; branches of a union that pydantic adds to a location are left out."""
    return ".".join(
        str(part) for part in location if isinstance(part, int) or (part.isidentifier() and not _is_tag(part))
    )


def _is_tag(part: str) -> bool:
    return part in ("bool", "int", "float", "str", "none")
