"""Checks of option values that typer does not make."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which pass every bound that typer checks."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value
