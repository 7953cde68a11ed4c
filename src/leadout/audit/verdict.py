"""What an audit says: frozen records, ready for JSON and for the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from leadout.audit.findings import Effect, Family


class Outcome(StrEnum):
    """Of one test, or of the whole audit."""

    PASS = "pass"
    FAIL = "fail"
    COULD_NOT_JUDGE = "could not judge"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 could not judge (2 is bad input)."""
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.COULD_NOT_JUDGE: 3}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """One test on one class."""

    __test__ = False

    test: str
    """"T0" to "T7"."""
    name: str
    """What is claimed of a correct generator."""
    class_name: str
    """Class of the tokens, or "all"."""
    tokens: int
    """Tokens (or drafts, corrections, pairs) used."""
    information: float
    """Sample size in the test's own unit."""
    family: Family
    """"ks", "tail" (a p-value), "tilt" (the pooled temperature e-value) or "bound" (a fixed limit)."""
    statistic: float
    """KS distance, z score, log e-value, count or error."""
    threshold: float
    """What the statistic (KS, bounds) or log(1/p) (the rest) was held against."""
    p_value: float
    """Bound of the chance under a correct generator; for KS with the rounding allowance taken off; 1 for bounds."""
    log_e: float | None
    """log e-value where the test is one."""
    effect: Effect
    """Size of the deviation with a 99.9 % interval."""
    floor: float
    """What rounding alone does, measured from the learner."""
    outcome: Outcome
    """Judged together with all other tests."""

    @property
    def load(self) -> float:
        """How much of its allowance the test used; 1 is the limit."""
        if self.family in ("tail", "tilt"):
            return max(0.0, -math.log(max(self.p_value, 1e-300))) / self.threshold
        if self.threshold > 0.0:
            return self.statistic / self.threshold
        return 0.0 if self.statistic == 0.0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectable:
    """The smallest bias of one kind that this sample finds with 95 % chance."""

    kind: str
    """The fault, in words."""
    smallest: float
    """Its size."""
    unit: str
    """Of what."""
    test: str
    """Which test finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A class with too few tokens."""

    class_name: str
    """The class, or "all"."""
    tokens: int
    """What there is."""
    needed: int
    """What is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one audit."""

    outcome: Outcome
    """Of the whole audit."""
    reason: str
    """One line a reader understands."""
    generator: str
    """What was audited."""
    settings: Mapping[str, str | float | int]
    """Sampling parameters and precision."""
    rollouts: int
    """Rollouts in the sample."""
    tokens: int
    """Tokens in the sample."""
    information: float
    """Sum of 1 - sum p^2."""
    ambiguous_share: float
    """Share of tokens whose membership of the support rounding could change; not used by T1 to T3 and T7."""
    class_tokens: Mapping[str, int]
    """Used tokens of each class."""
    floors: Mapping[str, float]
    """Rounding floors by name."""
    results: tuple[TestResult, ...]
    """Every test."""
    detectable: tuple[Detectable, ...]
    """Smallest detectable bias of each kind."""
    unseen: tuple[str, ...]
    """What this sample could not show."""
    shortages: tuple[Shortage, ...]
    """Classes that need more tokens."""

    @property
    def failures(self) -> tuple[TestResult, ...]:
        """Tests that failed."""
        return tuple(result for result in self.results if result.outcome is Outcome.FAIL)

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return self.outcome.exit_code

    def to_json(self) -> str:
        """The whole verdict as a JSON object."""
        return json.dumps(asdict(self), indent=1)
