"""Everything one audit has seen so far, as sums and the uniforms of its tests.

Rollouts are added one by one and forgotten; a token leaves about forty bytes behind.

Axes: N tokens added together, D traced drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leadout.audit.classes import FIRST, NUM_CLASSES
from leadout.audit.floor import Floor
from leadout.audit.measure import DraftColumns, TokenColumns
from leadout.audit.sums import CountSums, TiltSums, Uniforms, pool
from leadout.audit.t7_dependence import LagSums, SiblingSums
from leadout.audit.t7_pairs import PairSums
from leadout.audit.tails import Floats
from leadout.audit.tolerances import Tolerances
from leadout.records import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """Where the tokens of one `add` come from."""

    class_N: Ints
    """Class codes of `leadout.audit.classes`."""
    rollout_N: Ints
    """Equal for tokens of the same rollout, which must be neighbours in order."""
    draw_N: Ints
    """Prompt draw; siblings share it."""


class AuditSample:
    """Accumulates an audit; `leadout.audit.judge` turns it into a verdict."""

    def __init__(self, params: SamplingParams, tolerances: Tolerances, has_floor: bool) -> None:
        self.params = params
        self.tolerances = tolerances
        self.has_floor = has_floor
        """Whether the learner gives a second pass in the generator's precision."""
        self.floor = Floor()
        self.lag = LagSums()
        self.rejections = LagSums()
        self.siblings = SiblingSums()
        self.pairs = PairSums()
        self.ends = CountSums()
        """Stop tokens against their chances."""
        self.rollouts = 0
        self.tokens = 0
        self.used = 0
        """Tokens surely inside the support."""
        self.outside = 0
        self.skipped = 0
        """Tokens whose prefix is not wholly of the learner's version, or that the caller gave."""
        self.unfinished = 0
        """Rollouts that ended by an error, were cancelled or brought no token."""
        self.versions: set[int] = set()
        """Weight versions of the rollouts; more than one where the caller did not say which the learner holds."""
        self.corrections = 0
        self.impossible = 0
        self.verified = 0
        """Drafts that rounds verified, traced or not."""
        self.traced = 0
        self.bookkeeping: list[str] = []
        self._class_tokens = np.zeros(NUM_CLASSES, np.int64)
        self._class_information = np.zeros(NUM_CLASSES)
        self._pit = Uniforms()
        self._ratio = Uniforms()
        self._accepted = Uniforms()
        self._corrected = Uniforms()
        self._correction_ratio = Uniforms()
        self._drafts = Uniforms()
        self._tilts: dict[int, TiltSums] = {}
        self._accepts: dict[int, CountSums] = {}
        self._point_hits: dict[int, CountSums] = {}
        self._policy_errors: list[Floats] = []
        self._law_errors: list[Floats] = []

    def add_tokens(self, columns: TokenColumns, labels: Labels) -> None:
        """Tokens of whole rollouts, in order."""
        used_N = columns.inside_N
        self.tokens += used_N.shape[0]
        self.used += int(np.count_nonzero(used_N))
        self.outside += int(np.count_nonzero(columns.outside_N))
        class_N = labels.class_N[used_N]
        self._class_tokens += np.bincount(class_N, minlength=NUM_CLASSES)
        self._class_information += np.bincount(class_N, 1.0 - columns.power2_N[used_N], NUM_CLASSES)
        self._pit.add(labels.class_N, columns.uniform_N)
        self.lag.add(columns.uniform_N, labels.rollout_N)
        for code in np.unique(class_N):
            rows_N = used_N & (labels.class_N == code)
            self._tilts.setdefault(int(code), TiltSums()).add(
                TiltSums(
                    n=int(np.count_nonzero(rows_N)),
                    tilts=columns.tilts_NL[rows_N].sum(0),
                    excess=float(columns.excess_N[rows_N].sum()),
                    variance=float(columns.variance_N[rows_N].sum()),
                )
            )
        for row in (used_N & (labels.class_N == FIRST)).nonzero()[0]:
            powers = float(columns.power2_N[row]), float(columns.power3_N[row])
            self.siblings.add(int(labels.draw_N[row]), int(columns.token_N[row]), *powers)

    def add_logprobs(self, policy_error_N: Floats, law_error_N: Floats) -> None:
        """Returned minus teacher-forced log-probabilities; nan where there is none to compare."""
        self._policy_errors.append(policy_error_N[~np.isnan(policy_error_N)])
        self._law_errors.append(law_error_N[~np.isnan(law_error_N)])

    def add_drafts(self, columns: DraftColumns, class_D: Ints) -> None:
        """Traced drafts, with the class of the token emitted at each position."""
        self.traced += class_D.shape[0]
        self.corrections += int(np.count_nonzero(~columns.accepted_D & ~np.isnan(columns.origin_uniform_D)))
        self.impossible += int(np.count_nonzero(columns.impossible_D))
        self._ratio.add(class_D, columns.ratio_uniform_D)
        self._drafts.add(class_D, columns.draft_uniform_D)
        accepted_D = columns.accepted_D
        sampled_D = accepted_D & ~columns.point_D
        self._accepted.add(class_D[sampled_D], columns.origin_uniform_D[sampled_D])
        self._correction_ratio.add(class_D, columns.correction_ratio_D)
        self.rejections.add_pairs(columns.rejected_draft_D, columns.origin_uniform_D)
        self._corrected.add(class_D[~accepted_D], columns.origin_uniform_D[~accepted_D])
        counts = (
            (self._accepts, accepted_D, columns.accept_low_D, columns.accept_high_D),
            (self._point_hits, columns.hit_D, columns.hit_chance_D, columns.hit_chance_D),
        )
        for sums, hit_D, low_D, high_D in counts:
            known_D = ~np.isnan(low_D)
            for code in np.unique(class_D[known_D]):
                rows_D = known_D & (class_D == code)
                sums.setdefault(int(code), CountSums()).add(CountSums.of(hit_D[rows_D], low_D[rows_D], high_D[rows_D]))

    @property
    def information(self) -> float:
        """Sum of 1 - sum p^2 over used tokens."""
        return float(self._class_information.sum())

    @property
    def ambiguous_share(self) -> float:
        """Share of tokens whose membership of the support rounding could change."""
        return 1.0 - self.used / self.tokens if self.tokens else 0.0

    @property
    def count_rho(self) -> float:
        """Allowance of the count tests: how far rounding may move a mean chance."""
        if not self.has_floor:
            return 0.0
        return min(max(4.0 * self.floor.accept_shift, self.tolerances.rho_min), self.tolerances.rho_max)

    @property
    def tilt_drift(self) -> float:
        """Allowance of T3, nats per token."""
        return 4.0 * self.floor.entropy_shift

    def class_tokens(self) -> dict[int, int]:
        """Used tokens of each class that has any."""
        return {int(code): int(self._class_tokens[code]) for code in self._class_tokens.nonzero()[0]}

    def class_information(self, code: int) -> float:
        """Sum of 1 - sum p^2 over a class."""
        return float(self._class_information[code])

    def uniforms_by_class(self) -> list[tuple[int, Floats]]:
        """T1's U."""
        return self._pit.by_class()

    def pooled_uniforms(self) -> Floats:
        """T1's U of all classes."""
        return self._pit.pooled()

    def ratio_uniforms_by_class(self) -> list[tuple[int, Floats]]:
        """T2's U of sampled proposals."""
        return self._ratio.by_class()

    def pooled_ratio_uniforms(self) -> Floats:
        """T2's U of all classes."""
        return self._ratio.pooled()

    def tilts_by_class(self) -> Iterator[tuple[int, TiltSums]]:
        """T3's sums."""
        return ((code, self._tilts[code]) for code in sorted(self._tilts))

    def pooled_tilts(self) -> TiltSums:
        """T3's sums of all classes."""
        total = TiltSums()
        for sums in self._tilts.values():
            total.add(sums)
        return total

    def accepts_by_class(self) -> list[tuple[int, CountSums]]:
        """T4's acceptances of sampled drafts."""
        return sorted(self._accepts.items(), key=lambda item: item[0])

    def pooled_accepts(self) -> CountSums:
        """T4's acceptances of all classes."""
        return pool(self._accepts)

    def point_hits_by_class(self) -> list[tuple[int, CountSums]]:
        """T2's counts of point-mass drafts."""
        return sorted(self._point_hits.items(), key=lambda item: item[0])

    def pooled_point_hits(self) -> CountSums:
        """T2's counts of all classes."""
        return pool(self._point_hits)

    def accepted_uniforms(self) -> Floats:
        """T4's U of accepted tokens."""
        return self._accepted.pooled()

    def correction_uniforms(self) -> Floats:
        """T4's U of corrections."""
        return self._corrected.pooled()

    def correction_ratios(self) -> Floats:
        """T4's U of corrections ordered by p/q."""
        return self._correction_ratio.pooled()

    def draft_uniforms(self) -> Floats:
        """T4's U of the drafts."""
        return self._drafts.pooled()

    def policy_errors(self) -> Floats:
        """T6's errors of the policy's log-probabilities."""
        return np.concatenate(self._policy_errors) if self._policy_errors else np.zeros(0)

    def law_errors(self) -> Floats:
        """T6's errors of the sampled law's log-probabilities."""
        return np.concatenate(self._law_errors) if self._law_errors else np.zeros(0)
