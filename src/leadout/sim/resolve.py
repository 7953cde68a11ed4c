"""GPUs and kernel tables by what a scenario calls them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leadout.errors import ConfigError
from leadout.sim.hardware import CONSTANTS, GPUS, Gpu, find_gpu, override
from leadout.sim.kernel_tables import KernelTables, shipped_tables
from leadout.sim.scenario import read_mapping


def resolve_gpu(value: str | Mapping[str, float | str]) -> Gpu:
    """A GPU by name, by name with overrides, whole, or from a YAML file of either; raises ConfigError with one line."""
    given: Mapping[str, object]
    if isinstance(value, str):
        path = Path(value)
        if path.suffix not in (".yaml", ".yml", ".json"):
            return find_gpu(value)
        if not path.is_file():
            raise ConfigError(f"gpu: no file {path}; name one of {', '.join(GPUS)} or a YAML file of constants")
        given = read_mapping(path)
    else:
        given = dict(value)
    constants = {key: _number(key, item) for key, item in given.items() if key not in ("base", "name")}
    if "base" in given:
        return override(find_gpu(str(given["base"])), constants)
    missing = [name for name in CONSTANTS if name not in constants and name != "kernel_floor_s"]
    if missing:
        raise ConfigError(f"gpu: name a `base` ({', '.join(GPUS)}) or give all of: {', '.join(missing)}")
    blank = override(find_gpu("H100"), constants)
    return Gpu(name=str(given.get("name", "custom")), table=None, **{name: getattr(blank, name) for name in CONSTANTS})


def _number(name: str, value: object) -> float:
    """A constant as a number; YAML reads 1e11 as text, so text that is a number will do."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(f"gpu.{name} must be a number, got {value!r}")


def resolve_tables(name: str) -> KernelTables | None:
    """Kernel tables by name."""
    if name == "none":
        return None
    if name == "aic":
        from leadout.sim.aic import full_tables  # here, since only this choice needs the optional package

        return full_tables()
    return shipped_tables()
