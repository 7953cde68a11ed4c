"""Reward functions from outside: ``package.module:function`` with TRL's or verl's signature.

TRL: ``f(prompts, completions, completion_ids, trainer_state, **columns) -> list[float | None]``, called by keyword.
verl: ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict``, once per completion.
Which of the two is told by the parameter names; both may be ``async``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadout.errors import ConfigError, DataError, LeadoutError
from leadout.reward.completion import Completion, RewardFunction

_TRL = ("prompts", "completions", "completion_ids", "trainer_state")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's trainer state that is known when rewards are computed."""

    global_step: int
    """Finished train stages."""


def load_user_function(name: str) -> RewardFunction:
    """The function behind ``package.module:function``; modules of the working directory are found too.

    Raises:
        ConfigError: no such module or function, a module that cannot be imported, or a signature of neither kind.

    """
    function = _find(name)
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters:
        _require_known(name, parameters, _VERL)
        return _VerlReward(name, function, _wanted(parameters))
    if "completions" in parameters:
        return _TrlReward(name, function, _wanted(parameters))
    raise ConfigError(
        f"reward function {name}: expected parameters like (prompts, completions, **columns) or "
        f"(data_source, solution_str, ground_truth, extra_info), got ({', '.join(parameters)})"
    )


@dataclass(frozen=True, slots=True)
class _TrlReward:
    name: str
    function: Callable[..., Any]
    wanted: frozenset[str] | None
    """Parameter names it takes; None if it takes any."""

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        offered: dict[str, Any] = _columns(completions)
        offered["prompts"] = [_trl_prompt(each) for each in completions]
        offered["completions"] = [_trl_completion(each) for each in completions]
        offered["completion_ids"] = [each.token_ids.tolist() for each in completions]
        offered["trainer_state"] = TrainerState(max(each.version for each in completions))
        arguments = offered if self.wanted is None else {key: offered[key] for key in offered if key in self.wanted}
        self._require_columns(arguments)
        rewards = _call(self.name, self.function, arguments, f"a list of {len(completions)} numbers or None")
        is_list = isinstance(rewards, Sequence) and not isinstance(rewards, str | bytes)
        if not is_list or len(rewards) != len(completions):
            got = f"{len(rewards)}" if is_list else type(rewards).__name__
            raise DataError(
                f"reward function {self.name}: expected a list of {len(completions)} rewards, got {got}; "
                "return one number (or None) for every completion"
            )
        return [_checked(self.name, reward) for reward in rewards]

    def _require_columns(self, arguments: dict[str, Any]) -> None:
        for parameter in inspect.signature(self.function).parameters.values():
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if needed and parameter.name not in arguments:
                present = ", ".join(arguments)
                raise DataError(
                    f"reward function {self.name}: no column {parameter.name!r} in the data, got {present}; "
                    "give the parameter a default or rename the column"
                )


@dataclass(frozen=True, slots=True)
class _VerlReward:
    name: str
    function: Callable[..., Any]
    wanted: frozenset[str] | None

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [self._score(each) for each in completions]

    def _score(self, completion: Completion) -> float | None:
        columns = completion.prompt.columns
        offered = {
            "data_source": columns.get("data_source", completion.prompt.id.rpartition("/")[0]),
            "solution_str": completion.text,
            "ground_truth": completion.prompt.answer,
            "extra_info": columns.get("extra_info"),
        }
        arguments = offered if self.wanted is None else {key: offered[key] for key in offered if key in self.wanted}
        result = _call(self.name, self.function, arguments, "a number, or a dict with a number under 'score'")
        if isinstance(result, dict):
            if "score" not in result:
                raise DataError(
                    f"reward function {self.name}: expected a key 'score', got {', '.join(map(str, result))}"
                )
            result = result["score"]
        return _checked(self.name, result)


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(
            f"reward function {name!r}: expected task, exact, number, math, length or package.module:function"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        with _guarded(f"reward function {name}: importing {module_name}", ConfigError, "mend the module"):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"reward function {name}: its module needs {error.name}, which is not installed"
            ) from error
        raise ConfigError(f"reward function {name}: no module {error.name} here or among the installed ones") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"reward function {name}: {module_name} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def _wanted(parameters: Any) -> frozenset[str] | None:
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else frozenset(parameters)


def _require_known(name: str, parameters: Any, known: Sequence[str]) -> None:
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name in known:
            continue
        if parameter.default is parameter.empty:
            raise ConfigError(f"reward function {name}: {parameter.name} is not offered; known are {', '.join(known)}")


def _columns(completions: Sequence[Completion]) -> dict[str, list[object]]:
    """The rows' columns as lists, under their own names; those that every row has."""
    first = completions[0].prompt.columns
    shared = [key for key in first if key not in _TRL and all(key in each.prompt.columns for each in completions)]
    return {key: [each.prompt.columns[key] for each in completions] for key in shared}


def _trl_prompt(completion: Completion) -> str | list[dict[str, str]]:
    messages = completion.prompt.messages
    return completion.prompt.text if messages is None else [dict(message) for message in messages]


def _trl_completion(completion: Completion) -> str | list[dict[str, str]]:
    if completion.prompt.messages is None:
        return completion.text
    return [{"role": "assistant", "content": completion.text}]


def _call(name: str, function: Callable[..., Any], arguments: dict[str, Any], expected: str) -> Any:
    with _guarded(f"reward function {name}", DataError, f"expected {expected}"):
        return _resolve(function(**arguments))


@contextmanager
def _guarded(what: str, kind: type[LeadoutError], remedy: str) -> Iterator[None]:
    """Run somebody else's code: whatever it raises, even SystemExit, is told with the line that raised it.

    A broad catch is right only here, since a foreign function may raise anything. A missing module passes through.
    """
    try:
        yield
    except (ModuleNotFoundError, LeadoutError):
        raise
    except (Exception, SystemExit) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        if isinstance(error, SyntaxError):
            where = f"{error.filename} line {error.lineno}"
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename} line {last.lineno}"
        raise kind(f"{what} raised {type(error).__name__}: {reason:.200} ({where}); {remedy}") from error


def _resolve(result: Any) -> Any:
    return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(result: Any) -> Any:
    return await result


def _checked(name: str, reward: object) -> float | None:
    if reward is None:
        return None
    shown = " ".join(f"{reward!r:.60}".split())
    if isinstance(reward, str | bytes):
        raise DataError(f"reward function {name}: expected numbers or None, got {shown}; return a number")
    try:
        value = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"reward function {name}: expected numbers or None, got {shown}; return a number") from None
    if not math.isfinite(value):
        raise DataError(f"reward function {name}: expected finite numbers, got {value}; return None to pass")
    return value
