"""How long rollouts are: laws with a tail, correlated inside a group, cut at a cap.

Log-normal: log L = mu + s (sqrt(rho) z_prompt + sqrt(1 - rho) z_rollout), s^2 = log(1 + cv^2), then min(L, cap). The
mean given is the one a log shows, after the cut; mu is solved for it. Draws depend on the seed only, so scenarios that
share a law share their lengths (common random numbers).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from leadout.errors import ConfigError, DataError
from leadout.sim.kernel_tables import Floats

MAX_CV = 10.0
"""Largest coefficient of variation of a law; published ones lie between .5 and 1."""
MOST_TOKENS = 1e9
"""Longest length that is read from a file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthLaw:
    """Completion lengths in tokens."""

    mean: float
    """After the cut at `cap`."""
    cv: float
    """Of the law before the cut; 0 makes every rollout equally long."""
    cap: int
    group_correlation: float = 0.3
    """Share of the variance of log L that rollouts of one prompt have in common."""
    samples: Floats | None = None
    """Measured lengths to draw from instead."""

    def __post_init__(self) -> None:
        if self.cap < 1 or not self.cv >= 0 or not 0 <= self.group_correlation <= 1:
            raise ConfigError(
                "lengths: expected cap >= 1, cv >= 0, group_correlation in [0, 1]; "
                f"got cap {self.cap}, cv {self.cv}, group_correlation {self.group_correlation}"
            )
        if self.samples is None and self.cv > MAX_CV:
            raise ConfigError(f"lengths.cv must be <= {MAX_CV:g} (a share of the mean, not percent), got {self.cv}")
        if not 1 <= self.mean <= self.cap:
            raise ConfigError(f"lengths.mean must lie in [1, cap] = [1, {self.cap}], got {self.mean}")
        if self.samples is None and self.mean == self.cap and self.cv > 0:
            raise ConfigError(
                f"lengths.mean is taken after the cut and must be < cap = {self.cap} where cv > 0, got {self.mean} "
                f"with cv {self.cv}; raise the cap, or set cv to 0 for rollouts of one length"
            )

    @property
    def sigma(self) -> float:
        """Standard deviation of log L before the cut."""
        return float(np.sqrt(np.log1p(self.cv**2)))

    @property
    def mu(self) -> float:
        """Mean of log L before the cut, such that E[min(L, cap)] = mean."""
        if self.sigma == 0.0 or self.mean >= self.cap:
            return float(np.log(self.mean))
        low = np.log(self.mean) - self.sigma**2 / 2 - 3.0  # E[X] is e^-3 of the mean here, and a cut only takes away
        high = np.log(self.cap) + 12.0 * max(self.sigma, 0.1)
        return float(brentq(lambda mu: cut_mean(mu, self.sigma, self.cap) - self.mean, low, high, xtol=1e-12))

    def quantile(self, u: Floats) -> Floats:
        """Lengths at these levels, at least one token."""
        if self.samples is not None:
            return np.asarray(np.clip(np.quantile(self.samples, u, method="hazen"), 1, self.cap))
        return np.asarray(np.clip(np.rint(np.exp(self.mu + self.sigma * ndtri(u))), 1, self.cap))

    def draw(self, prompts: int, generations: int, seed: int) -> Floats:
        """Lengths [prompts, generations], whole tokens."""
        rng = np.random.default_rng(seed)
        shared = rng.standard_normal((prompts, 1))
        own = rng.standard_normal((prompts, generations))
        rho = self.group_correlation
        z = np.sqrt(rho) * shared + np.sqrt(1.0 - rho) * own
        if self.samples is not None:
            return np.asarray(np.rint(self.quantile(ndtr(z))), dtype=float)
        return np.asarray(np.clip(np.rint(np.exp(self.mu + self.sigma * z)), 1, self.cap))


def cut_mean(mu: float, sigma: float, cap: float) -> float:
    """E[min(X, cap)] of a log-normal X."""
    z = (np.log(cap) - mu) / sigma
    return float(np.exp(mu + sigma**2 / 2) * ndtr(z - sigma) + cap * ndtr(-z))


def read_lengths(path: Path) -> Floats:
    """Lengths from JSON lines: numbers, or rows with `length`, `completion_length`, `response_length`, `token_ids`.

    Raises DataError naming the file and the line when one is missing or is not a positive number of tokens.
    """
    if not path.is_file():
        raise DataError(f"lengths.file: no such file {path}")
    found: list[float] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"lengths.file: {path} is not a UTF-8 text file") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: expected one JSON value a line, got {line[:40]!r}") from error
        found.append(_row_length(row, path, number))
    if not found:
        raise DataError(f"lengths.file: {path} holds no lengths")
    return np.array(found)


def _row_length(row: object, path: Path, number: int) -> float:
    found: object = row
    if isinstance(row, dict):
        tokens = row.get("token_ids")
        counted = len(tokens) if isinstance(tokens, list) else None
        names = ("length", "completion_length", "response_length", "num_tokens")
        found = next((row[name] for name in names if isinstance(row.get(name), int | float)), counted)
    if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found <= MOST_TOKENS:
        return float(found)
    raise DataError(
        f"{path}:{number}: expected a positive number or a row with length, completion_length or token_ids, got "
        f"{repr(row)[:60]}"
    )


def expected_max(law: LengthLaw, n: int) -> float:
    """Expected longest of n independent draws: Blom's quantile of the log-normal, cut at the cap."""
    z = ndtri((n - 0.375) / (n + 0.25))
    return float(min(law.cap, np.exp(law.mu + law.sigma * z)))
