"""T7, second half: rollouts of one prompt are drawn independently of each other, all along and across draws.

Two rollouts that agree so far agree on the next token with chance sum p^2, their common law's. A pair is followed until
it first differs; hits beyond what the chances add up to are noise that the two share: siblings that share it from the
second token on, or a prompt drawn again that repeats its rollouts. Pairs are disjoint, so that their terms are centred
and independent given the past.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from leadout.audit.findings import Effect, Finding
from leadout.audit.tails import Z_999, Floats, bernstein_p_value

Ints = npt.NDArray[np.int32]
SLACK = 0.05
"""Rounding may move the chance of agreement by this much; shared noise moves it to one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """A rollout's tokens and, for each, sum p^2 of the law it was drawn from."""

    draw: int
    sibling: int
    token_T: Ints
    power2_T: Floats


@dataclass(slots=True)
class PairSums:
    """Rollouts by the prompt that they continue."""

    by_prompt: dict[bytes, list[Path]] = field(default_factory=lambda: defaultdict(list))

    def add(self, prompt: bytes, path: Path) -> None:
        """A whole rollout."""
        self.by_prompt[prompt].append(path)

    def siblings(self) -> list[tuple[Path, Path]]:
        """Neighbours within each draw."""
        return [
            pair
            for paths in self.by_prompt.values()
            for members in _grouped(paths, lambda path: path.draw)
            for pair in _disjoint(sorted(members, key=lambda path: path.sibling))
        ]

    def draws(self) -> list[tuple[Path, Path]]:
        """The same sibling of neighbouring draws of a prompt."""
        return [
            pair
            for paths in self.by_prompt.values()
            for members in _grouped(paths, lambda path: path.sibling)
            for pair in _disjoint(sorted(members, key=lambda path: path.draw))
        ]


def _grouped(paths: Iterable[Path], key: Callable[[Path], int]) -> list[list[Path]]:
    groups: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        groups[key(path)].append(path)
    return list(groups.values())


def _disjoint(paths: list[Path]) -> list[tuple[Path, Path]]:
    return list(zip(paths[::2], paths[1::2], strict=False))


def pair_finding(pairs: list[tuple[Path, Path]], name: str) -> Finding | None:
    """Agreements beyond chance; None without pairs."""
    if not pairs:
        return None
    steps, hits, expected, variance = 0, 0, 0.0, 0.0
    for one, other in pairs:
        length = min(one.token_T.size, other.token_T.size)
        differs = np.flatnonzero(one.token_T[:length] != other.token_T[:length])
        walked = int(differs[0]) + 1 if differs.size else length
        chance_T = one.power2_T[:walked]
        steps, hits = steps + walked, hits + walked - (1 if differs.size else 0)
        expected, variance = expected + float(chance_T.sum()), variance + float((chance_T * (1.0 - chance_T)).sum())
    value, half = (hits - expected) / max(steps, 1), Z_999 * variance**0.5 / max(steps, 1)
    return Finding(
        test="T7",
        name=name,
        class_name="all",
        tokens=steps,
        information=variance,
        family="tail",
        statistic=(hits - expected) / max(variance, 1e-12) ** 0.5,
        p_value=bernstein_p_value(hits - expected - SLACK * steps, variance, 1.0),
        effect=Effect(value=value, low=value - half, high=value + half, unit="share of equal tokens - expected"),
        enough=variance > 0.0,
    )


def findings(sums: PairSums) -> list[Finding]:
    """Siblings, and draws of one prompt."""
    found = (
        pair_finding(sums.siblings(), "siblings stay independent while they agree"),
        pair_finding(sums.draws(), "draws of one prompt are independent"),
    )
    return [finding for finding in found if finding is not None]
