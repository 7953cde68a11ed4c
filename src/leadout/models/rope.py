"""Rotary position embedding: frequencies of the four static kinds, and their cosine and sine tables.

Used by the policy's decoder and by draft heads. Kinds whose frequencies change with the longest row (dynamic NTK,
longrope) are refused: cached keys would have been rotated by other frequencies, and one row would change another's law.

Axes: P positions, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from leadout.errors import ModelError

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_KEYS = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Everything that fixes the rotation; parameters that a kind does not use stay at their neutral value."""

    rope_type: str
    """"default", "linear", "llama3" or "yarn"."""
    theta: float
    """Base of the frequencies."""
    dim: int
    """Rotated dimensions of a head (all of them)."""
    factor: float = 1.0
    """How much the context is stretched."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / this are fully stretched."""
    high_freq_factor: float = 1.0
    """llama3: wavelengths below original / this are left alone."""
    original_max_position: int = 0
    """llama3, yarn: context length before stretching."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is fully stretched."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> Self:
        """Read a model config, with `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            ModelError: a kind that is not supported, a missing or an unknown parameter.

        """
        given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        rope_type = str(given.pop("rope_type", None) or given.pop("type", None) or "default")
        given.pop("type", None)
        if rope_type not in _KEYS:
            raise ModelError(
                f"expected rope type default, linear, llama3 or yarn, got {rope_type!r}; use the vLLM backend"
            )
        theta = _positive("rope_theta", given.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
        partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ModelError(f"expected partial_rotary_factor 1, got {partial}; use the vLLM backend")
        values = _checked(rope_type, given, config)
        truncate = True if values.get("truncate") is None else values["truncate"]
        if not isinstance(truncate, bool):
            raise ModelError(f"expected true or false in truncate of the rope, got {truncate!r}")
        factor = _positive("factor", values.get("factor"), 1.0)
        original = values.get("original_max_position_embeddings")
        if original is not None:
            original = _positive("original_max_position_embeddings", original)
        return cls(
            rope_type=rope_type,
            theta=theta,
            dim=head_dim,
            factor=factor,
            low_freq_factor=_positive("low_freq_factor", values.get("low_freq_factor"), 1.0),
            high_freq_factor=_positive("high_freq_factor", values.get("high_freq_factor"), 1.0),
            original_max_position=int(original or 0),
            beta_fast=_positive("beta_fast", values.get("beta_fast"), 32.0),
            beta_slow=_positive("beta_slow", values.get("beta_slow"), 1.0),
            truncate=truncate,
            attention_factor=_attention_factor(rope_type, factor, values),
        )

    @property
    def text(self) -> str:
        """Canonical text, equal for equal rotations: ``default theta=10000.0 dim=64``."""
        neutral = {item.name: item.default for item in fields(self)}
        parts = [f"{name}={getattr(self, name)}" for name in neutral if name != "rope_type"]
        kept = [
            part
            for name, part in zip([n for n in neutral if n != "rope_type"], parts, strict=True)
            if getattr(self, name) != neutral[name]
        ]
        return " ".join([self.rope_type, *kept])

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians per position of each pair of dimensions, f32[D/2], computed as transformers does."""
        base = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        plain = 1.0 / base
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(base)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: long wavelengths stretched, short ones kept, a linear blend between."""
        low = self.original_max_position / self.low_freq_factor
        high = self.original_max_position / self.high_freq_factor
        wavelength = 2 * math.pi / plain
        stretched = torch.where(wavelength > low, plain / self.factor, plain)
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blend = (1 - smooth) * stretched / self.factor + smooth * stretched
        between = ~(wavelength < high) & ~(wavelength > low)
        return torch.where(between, blend, stretched)

    def _yarn(self, base: torch.Tensor) -> torch.Tensor:
        """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions between kept and stretched frequencies."""
        low, high = self._ramp_bound(self.beta_fast), self._ramp_bound(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = torch.clamp((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * base) * (1 - kept) + 1.0 / base * kept

    def _ramp_bound(self, rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = self.original_max_position / (rotations * 2 * math.pi)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))

    def tables(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine, each [P, D] in `dtype`, for positions 0..P-1.

        The first half of the sine is negated, so that the rotation is ``x * cos + roll(x, D/2) * sin``. Angles are
        computed in float32 whatever the dtype, as transformers does: that is what the learner's model is built on.
        """
        frequencies = self.inverse_frequencies()
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        cos_PD = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        sin_PD = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)
        return cos_PD, sin_PD


def _positive(name: str, *values: object) -> float:
    """A parameter above 0, the first of these that is given; raises ModelError naming it."""
    value = next((value for value in values if value is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ModelError(f"expected a number above 0 in {name} of the rope, got {value!r}")
    return float(value)


def _checked(rope_type: str, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a kind, complete and without strangers."""
    values = dict(given)
    if rope_type in ("llama3", "yarn"):
        outer = config.get("original_max_position_embeddings")
        values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        if outer is not None:
            values["original_max_position_embeddings"] = outer
    if rope_type == "yarn" and values.get("factor") is None:
        original = _positive("original_max_position_embeddings", values["original_max_position_embeddings"])
        values["factor"] = config["max_position_embeddings"] / original
    required = _KEYS[rope_type]
    missing = [name for name in required if values.get(name) is None]
    if missing:
        raise ModelError(
            f"rope type {rope_type} needs {', '.join(missing)}; got {', '.join(sorted(given)) or 'nothing'}"
        )
    # The default kind ignores every parameter of the others, as transformers does.
    if rope_type != "default":
        known = (*required, *_OPTIONAL_KEYS.get(rope_type, ()), "original_max_position_embeddings")
        strangers = sorted(name for name, value in values.items() if name not in known and value is not None)
        if strangers:
            raise ModelError(
                f"rope type {rope_type} has unknown parameters {', '.join(strangers)}; use the vLLM backend"
            )
        return values
    return {}


def _attention_factor(rope_type: str, factor: float, values: Mapping[str, Any]) -> float:
    """YaRN's temperature on cosine and sine; 1 for every other kind."""
    if rope_type != "yarn":
        return 1.0
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    scale, scale_all = values.get("mscale"), values.get("mscale_all_dim")
    if scale and scale_all:
        return _mscale(factor, float(scale)) / _mscale(factor, float(scale_all))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
