"""A scenario as the user writes it: YAML, overrides ``a.b=c``, one line for every mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from leadout.errors import ConfigError
from leadout.sim.sections import (
    Baseline,
    Count,
    Engine,
    Generation,
    NonNegative,
    Pipeline,
    Precision,
    Refit,
    Reward,
    Section,
    Speculation,
    Training,
    Workload,
)


class Scenario(Section):
    """A whole scenario."""

    name: str = "scenario"
    model: str = "Qwen3-8B"
    """Built-in name or a Hugging Face config.json."""
    gpu: str | dict[str, float | str] = "H100"
    """Built-in name; or a mapping with `base` and overridden constants, or with all constants."""
    tables: Literal["shipped", "aic", "none"] = "shipped"
    """Kernel times: of the package, the full ones of the extra, or roofline."""
    profile: Path | None = None
    """A machine measured by `leadout bench --calibrate`, in place of GPU, tables and engine constants."""
    gpus: Count = 8
    precision: Precision = Precision()
    workload: Workload = Workload()
    speculation: Speculation | None = None
    generation: Generation = Generation()
    engine: Engine = Engine()
    training: Training = Training()
    refit: Refit = Refit()
    reward: Reward = Reward()
    data_s: NonNegative = 0.2
    pipeline: Pipeline = Pipeline()
    price_per_gpu_hour: NonNegative | None = None
    ranges: dict[str, tuple[float, float]] = {}
    """Ranges of inputs in place of the stated ones: dotted name to (low, high)."""
    baseline: Baseline | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    draws: Count = 3
    """Independent draws of the lengths that are averaged."""

    @property
    def separate(self) -> bool:
        """Whether generation and training have GPUs of their own."""
        return self.generation.gpus is not None and self.generation.gpus < self.gpus

    @property
    def generation_gpus(self) -> int:
        """GPUs that generate."""
        return self.generation.gpus if self.generation.gpus is not None else self.gpus

    @property
    def training_gpus(self) -> int:
        """GPUs that train."""
        if self.training.gpus is not None:
            return self.training.gpus
        return self.gpus - self.generation_gpus if self.separate else self.gpus

    @field_validator("gpu", mode="before")
    @classmethod
    def _name_or_constants(cls, value: object) -> object:
        if isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, bool) or not isinstance(item, int | float | str):
                    raise ValueError(f"{name} must be a number, got {item!r}")
                if isinstance(item, float) and not math.isfinite(item):
                    raise ValueError(f"{name} must be a finite number, got {item!r}")
        elif not isinstance(value, str):
            raise ValueError(f"expected a name or a mapping of constants, got {value!r}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Scenario:
        if self.generation_gpus > self.gpus:
            raise ValueError(f"generation.gpus must be <= gpus = {self.gpus}, got {self.generation_gpus}")
        if self.training_gpus > self.gpus:
            raise ValueError(f"training.gpus must be <= gpus = {self.gpus}, got {self.training_gpus}")
        if self.separate and self.generation_gpus + self.training_gpus > self.gpus:
            raise ValueError(
                f"generation.gpus + training.gpus must be <= gpus = {self.gpus}, got "
                f"{self.generation_gpus} + {self.training_gpus}"
            )
        if self.pipeline.mode == "async" and not self.separate:
            raise ValueError("pipeline.mode async needs GPUs of its own for generation: set generation.gpus below gpus")
        return self


def parse(data: Mapping[str, object]) -> Scenario:
    """Validate; raises ConfigError with one line naming the field and what it allows."""
    try:
        return Scenario.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "scenario"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field; known here: {', '.join(_known(first['loc']))}"
    if first["type"] == "value_error":  # our own words, which say what came
        return f"{where}: {message}" if first["loc"] else message
    more = f" ({len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return f"{where}: {message}, got {first['input']!r}{more}" if first["loc"] else f"{message}{more}"


def _known(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the section a location points into."""
    section: type[BaseModel] = Scenario
    for part in location[:-1]:
        field = section.model_fields.get(str(part))
        found = [
            kind
            for kind in (getattr(field.annotation, "__args__", (field.annotation,)) if field else ())
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not found:
            break
        section = found[0]
    return list(section.model_fields)


def apply_overrides(data: dict[str, object], overrides: list[str]) -> dict[str, object]:
    """Merge ``a.b=c`` words (values are YAML) into a copy of `data`."""
    merged = _deep_copy(data)
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise ConfigError(f"expected an override a.b=c, got {word!r}")
        node = merged
        *parents, leaf = path.split(".")
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, dict):
                child = {} if child is None else {"base": child} if parent == "gpu" else {}
                node[parent] = child
            node = child
        try:
            node[leaf] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
            raise ConfigError(f"override {path}: expected a YAML value, got {text!r} ({_first_line(error)})") from None
    return merged


def _deep_copy(data: Mapping[str, object]) -> dict[str, object]:
    return {key: _deep_copy(value) if isinstance(value, dict) else value for key, value in data.items()}


def load(path: Path, overrides: list[str] | None = None) -> Scenario:
    """Read a scenario file; raises ConfigError when it is not there or does not validate."""
    if not path.is_file():
        raise ConfigError(f"no scenario file {path}")
    return parse(apply_overrides(read_mapping(path), overrides or []))


def read_mapping(path: Path) -> dict[str, object]:
    """The mapping in a YAML (or JSON) file; raises ConfigError with one line naming the file when it holds none."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a UTF-8 text file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {_first_line(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping, got {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
