"""When a few rows draft although the others go on plainly, so that an improving drafter is noticed.

Part of the goodput rule (`leadout.draft_length.controller`). Probes that speak against a drafter become rarer, one that
speaks for it is followed by others soon: a drafter that has changed while it rested shows in a row of good probes, not
in a mean over all that was ever seen. Probes that follow may lose what the good ones saved, no more, so that all
together lose at most 1 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from leadout.draft_length.acceptance import AcceptanceStats
from leadout.draft_length.costs import CostProfile
from leadout.draft_length.goodput import LEAST_GAIN
from leadout.draft_length.load import Load

_PROBE_AFTER, _PROBE_AT_LATEST = 60, 100
"""Rounds from one probe to the next in the tail of a batch, and elsewhere."""
_MOST_PATIENCE = 2
"""A probe that speaks against a drafter already known doubles the wait in the tail, up to the wait elsewhere: if it
grew further, a drafter that has become good would rest for a thousand rounds."""
_NEXT_PROBE_AFTER = 6
"""While little is known of the drafter, or the latest probes speak for it, they follow each other after so many
rounds."""
_KNOWN, _WELL_KNOWN = 8.0, 16.0
"""Row-rounds asked after which acceptance counts as known, and after which the wait may grow."""
_PROBE_DRAFTS, _PROBE_SHARE = 3, 16
"""Most drafts of a probe, and one row in so many makes them."""
_REACHED = 0.05
"""Probability of reaching a draft, as the drafter is known, from which a probe makes it: of a drafter whose first draft
is hardly ever accepted the first one says all there is to learn, at half the cost of three."""
_PROBE_LOSS = 0.01
"""Share of the time since the last probe that one may lose: dear drafts are probed more rarely."""
_FORECAST_EVERY = 32
"""Rounds after which a probe that was too dear is forecast again at the latest: fewer rows may be cheaper."""
_HOPE, _MOST_HOPE = 2, 4
"""Probes that soon follow a good one if none of them is good, and at most so many however many were good before."""
_SURPRISE = 1.0
"""Standard deviations above what is known of the drafter from which the drafts accepted in a probe say that it has
changed. One row in a probe often does better than drafting needs where the drafter is good and its drafts are too dear:
that is luck, and no reason to ask again at once."""
_OLD_ROUNDS = 24.0
"""Row-rounds that all seen before a probe counts for at most: it is long ago, and were it to count for thousands, as
while drafting, the few rows of probes would not outweigh it for as many rounds."""


class Probing:
    """Clock of the probes; counts in rounds and in seconds of plain steps."""

    def __init__(self) -> None:
        self.rounds_off = _PROBE_AFTER
        """Rounds since the last probe or draft."""
        self._too_dear_until = 0
        """Round off after which the loss of a probe is forecast again."""
        self._patience = 1
        self._most_rows = 0
        self._hopes = 0
        """Probes yet to follow soon: a running sum of good ones against others, not below 0."""
        self._saved = 0.0
        """Plain steps that accepted drafts of the latest good probes saved; those that follow may lose them."""

    @staticmethod
    def shape(rows: int, max_length: int, acceptance: AcceptanceStats) -> tuple[int, int]:
        """Drafts of a probe and the rows that make them."""
        most = min(_PROBE_DRAFTS, max_length)
        reached_K = np.cumprod(acceptance.rates()[: most - 1])
        return 1 + int(np.count_nonzero(reached_K >= _REACHED)), -(-rows // _PROBE_SHARE)

    def rest(self) -> None:
        """Drafting has started: the next wait is a short one."""
        self._patience, self._hopes, self._saved = 1, 0, 0.0

    def is_due(
        self, rows: int, max_length: int, acceptance: AcceptanceStats, costs: CostProfile, load: Callable[[], Load]
    ) -> bool:
        """Whether the next round is a probe; asked once for every round without drafts.

        Args:
            rows: Live rows.
            max_length: Most drafts of a row.
            acceptance: What is known of the drafter.
            costs: What rounds cost.
            load: Says what the drafter would have to catch up on.

        """
        self.rounds_off += 1
        self._most_rows = max(self._most_rows, rows)
        if acceptance.num_asked >= _KNOWN:
            in_tail = 2 * rows <= self._most_rows or rows == 1
            wait = min(self._patience * _PROBE_AFTER, _PROBE_AT_LATEST) if in_tail else _PROBE_AT_LATEST
            if self.rounds_off <= max(_NEXT_PROBE_AFTER if self._hopes else wait, self._too_dear_until):
                return False
            shape = self.shape(rows, max_length, acceptance)
            loss = _loss(costs, rows, *shape, load().backlog) - _PROBE_LOSS * self.rounds_off
            if loss > self._saved:
                # A forecast in every round is more than a resting drafter should cost.
                halfway = int(0.5 * (loss - self._saved) / _PROBE_LOSS)
                self._too_dear_until = self.rounds_off + min(halfway, _FORECAST_EVERY)
                return False
            self._saved -= max(loss, 0.0)
        elif self.rounds_off <= _NEXT_PROBE_AFTER:
            return False
        self.rounds_off, self._most_rows, self._too_dear_until = 0, 0, 0
        return True

    def record(
        self,
        rows: int,
        accepted: npt.NDArray[np.int64],
        num_drafts: int,
        costs: CostProfile,
        acceptance: AcceptanceStats,
    ) -> None:
        """Take the drafts accepted in the rows of a probe, some of `rows`, before `acceptance` counts them."""
        if acceptance.num_asked < _KNOWN:
            return
        changed = _surprises(accepted, num_drafts, acceptance)
        acceptance.limit(_OLD_ROUNDS)
        if changed and _might_pay(rows, accepted, num_drafts, costs):
            self._hopes = min(max(self._hopes + 1, _HOPE), _MOST_HOPE)
            self._patience = 1
        elif self._hopes:
            self._hopes -= 1
        elif acceptance.num_asked >= _WELL_KNOWN:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._saved = self._saved + float(accepted.sum()) / rows if self._hopes else 0.0

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {
            "rounds_off": self.rounds_off,
            "too_dear_until": self._too_dear_until,
            "patience": self._patience,
            "most_rows": self._most_rows,
            "hopes": self._hopes,
            "saved": self._saved,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """From one."""
        names = ("rounds_off", "too_dear_until", "patience", "most_rows", "hopes")
        counts = (int(str(state[name])) for name in names)
        self.rounds_off, self._too_dear_until, self._patience, self._most_rows, self._hopes = counts
        self._saved = float(str(state["saved"]))


def _loss(costs: CostProfile, rows: int, num_drafts: int, asked: int, backlog: int) -> float:
    """What a probe costs, its catching up included, in plain steps."""
    catch_up = costs.catch_up_seconds(backlog * asked // rows)
    seconds = costs.round_seconds(asked, num_drafts, rows + num_drafts * asked) + catch_up
    return seconds / costs.forward.at(rows) - 1.0


def _surprises(accepted: npt.NDArray[np.int64], num_drafts: int, acceptance: AcceptanceStats) -> bool:
    """Whether the rows of a probe did better than the drafter as it is known."""
    mean = acceptance.coverage * float(acceptance.accepted_moments()[0][num_drafts])
    variance = float(acceptance.committed_variance()[num_drafts])
    return float(accepted.mean()) > mean + _SURPRISE * math.sqrt(variance / accepted.size)


def _might_pay(rows: int, accepted: npt.NDArray[np.int64], num_drafts: int, costs: CostProfile) -> bool:
    """Whether all rows, did they fare like those of the probe, might be faster with some number of drafts.

    What drafts of all rows cost may never have been measured: then it is taken halfway, in logarithms, from the least
    that they may cost to the forecast, which goes by the few rows of probes and is far too high.
    """
    plain = costs.forward.at(rows)

    def ratio(k: int) -> float:
        return math.sqrt(costs.least_seconds(rows, k, rows * (k + 1)) * costs.round_seconds(rows, k)) / plain

    mean_K = (1.0 + float(np.minimum(accepted, k).mean()) for k in range(1, num_drafts + 1))
    return any(tokens > LEAST_GAIN * ratio(k) for k, tokens in enumerate(mean_K, start=1))
