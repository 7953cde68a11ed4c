"""A machine measured by `leadout bench --calibrate`: seconds of a round by drafts, rows and context.

The profile takes the place of kernel tables and engine terms; draining and stages stay the same. JSON on disk, fields
below. Seconds are interpolated linearly in rows and in context, and go on with the last slope beyond the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leadout.errors import ConfigError, DataError
from leadout.sim.kernel_tables import Floats, Served
from leadout.sim.step_model import Part, StepTable

Seconds = Annotated[float, Field(ge=0.0)]


class RoundGrid(BaseModel):
    """Seconds of a round of one drafter at one k."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str
    """none, ngram, small_model, eagle3, …"""
    k: Annotated[int, Field(ge=0)]
    rows: tuple[int, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[Seconds, ...], ...]
    """[rows][contexts]"""

    @model_validator(mode="after")
    def _shape(self) -> RoundGrid:
        ascending = all(a < b for axis in (self.rows, self.contexts) for a, b in pairwise(axis))
        if not ascending or len(self.rows) < 1 or len(self.contexts) < 2:
            raise ValueError("rows and contexts must ascend, with two contexts at least")
        if len(self.seconds) != len(self.rows) or any(len(line) != len(self.contexts) for line in self.seconds):
            raise ValueError("seconds must have one line per entry of rows and one number per entry of contexts")
        return self


class Linear(BaseModel):
    """fixed_s + seconds_per_token x tokens + seconds_per_sample x samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fixed_s: Seconds = 0.0
    seconds_per_token: Seconds = 0.0
    seconds_per_sample: Seconds = 0.0

    def of(self, tokens: float, samples: float) -> float:
        """Seconds."""
        return self.fixed_s + self.seconds_per_token * tokens + self.seconds_per_sample * samples


class PartTime(BaseModel):
    """One part of a round, timed by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    """forward (with the head), sampler (laws and draws), draft (one position of the drafter), host (a plain step less
    its forward and sampler)."""
    rows: Annotated[int, Field(ge=1)]
    tokens_per_row: Annotated[int, Field(ge=1)] = 1
    context: float = 0.0
    seconds: Seconds
    method: str = ""
    """Drafter of a `draft`, whose `tokens_per_row` are the positions drafted at once."""


class DrafterTimes(BaseModel):
    """What one drafter adds to a round."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    draft: dict[int, Seconds]
    """Seconds of one draft position, by rows."""
    verify: dict[int, Seconds]
    """Seconds of a round with drafts, all but the drafting, by tokens in the pass."""
    prompt: Linear = Linear()
    """Reading prompts before a row's first draft; a sample is a prompt."""


class Limits(BaseModel):
    """What the machine can do at most, by the best of several loops."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    read_bytes_per_s: Seconds
    """Streaming reads from memory."""
    product_flops: Seconds
    """Multiplications and additions a second in large bfloat16 products."""


class Profile(BaseModel):
    """A calibrated machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    machine: str
    model: str = ""
    probe_s: Seconds = 0.0
    """Seconds of the reference probe while this profile was measured; scales predictions to the machine's pace."""
    rounds: tuple[RoundGrid, ...]
    prefill: Linear = Linear()
    data: Linear = Linear()
    refit: Linear = Linear()
    reward: Linear = Linear()
    logprob: Linear = Linear()
    train: Linear = Linear()
    parts: tuple[PartTime, ...] = ()
    """Where a round's time goes; not used by projections."""
    limits: Limits | None = None
    forward: dict[int, Seconds] = {}
    """Seconds of a plain round, by rows: with `drafters` what `rollout.speculative_config.leadout.cost_profile` reads,
    so the same file serves the choice of draft lengths."""
    drafters: dict[str, DrafterTimes] = {}
    """By method."""
    draft: dict[int, Seconds] = {}
    """Seconds of one draft position, by rows, in a file without `drafters`; its `forward` is by tokens in the pass,
    rounds with drafts among them."""

    def table(self, method: str, k: int, max_batch: int) -> StepTable:
        """Step table of a drafter at k; k = 0 is the plain one."""
        wanted = "none" if k == 0 else method
        grid = next((g for g in self.rounds if g.method == wanted and g.k == k), None)
        if grid is None:
            known = ", ".join(f"{g.method} k={g.k}" for g in self.rounds)
            raise ConfigError(f"the profile has no rounds of {wanted} at k={k}; it has {known}")
        rows = np.arange(1, max_batch + 1, dtype=float)
        seconds = np.stack(
            [_linear(rows, np.array(grid.rows, float), column) for column in np.array(grid.seconds).T], 1
        )
        contexts = np.broadcast_to(np.array(grid.contexts, float), seconds.shape)
        return StepTable(contexts=contexts, seconds=seconds)

    def prefill_seconds(self, method: str, prompts: float, tokens: float) -> float:
        """Prompts into the cache of the policy and, where it drafts, of the drafter."""
        drafter = self.drafters.get(method)
        own = 0.0 if drafter is None else drafter.prompt.of(tokens, prompts)
        return self.prefill.of(tokens, prompts) + own

    def draft_lengths(self, method: str) -> list[int]:
        """The k that were measured for a drafter, ascending."""
        return sorted({g.k for g in self.rounds if g.method in (method, "none")})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileModel:
    """Rounds of a calibrated machine, in the place of a `StepModel`."""

    profile: Profile
    method: str

    def table(self, k: int, max_batch: int) -> StepTable:
        """Rounds with k drafts a row."""
        return self.profile.table(self.method, k, max_batch)

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Prefill as calibrated."""
        return self.profile.prefill_seconds(self.method, float(prompts), tokens) if tokens > 0 else 0.0

    def breakdown(self, k: int, batch: int, context: float) -> list[Part]:
        """A calibrated round has one part."""
        seconds = float(self.table(k, batch).at(np.array([batch]), np.array([context]))[0])
        return [Part(name="round", seconds=seconds, served=Served.CALIBRATED)]


def _linear(x: Floats, grid: Floats, values: Floats) -> Floats:
    if len(grid) == 1:
        return np.full_like(x, values[0])
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return np.asarray(values[i] + (values[i + 1] - values[i]) / (grid[i + 1] - grid[i]) * (x - grid[i]))


def load_profile(path: Path) -> Profile:
    """Read a profile; raises DataError or ConfigError with one line."""
    if not path.is_file():
        raise DataError(f"no calibration profile {path}; make one with `leadout bench --calibrate {path}`")
    try:
        return Profile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}" if where else f"{path}: {first['msg']}") from None


def measured_choices(profile: Profile, method: str, k: tuple[int, ...]) -> tuple[int, ...]:
    """Those of k that the profile has; raises ConfigError without plain rounds or without any of the drafter."""
    known = {(grid.method, grid.k) for grid in profile.rounds}
    choices = tuple(n for n in k if ((method if n else "none"), n) in known)
    if 0 not in choices or len(choices) < 2:
        missing = f"{method} at k in 1..{max(k)}" if 0 in choices else "none at k=0"
        found = ", ".join(f"{name} k={n}" for name, n in sorted(known))
        raise ConfigError(
            f"speculation.num_speculative_tokens: auto chooses between plain rounds and drafts, the profile has no "
            f"rounds of {missing}; it has {found}"
        )
    return choices
