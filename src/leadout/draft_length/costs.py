"""Seconds of a round by its shape, measured while running or read from a profile.

A plain step is timed by its rows, a pass that verifies drafts by the tokens in it (pending tokens and drafts), a draft
per drafted position by rows. Plain steps of many rows forecast passes with drafts of few that were never tried.
Measurements of about the same count share a point, which is the median of the latest few: one late round moves nothing.
Between points the forecast is linear, beyond them it keeps the mean slope.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from leadout.errors import ConfigError

_KEPT = 9
"""Measurements of a point."""
_EXACT = 8
"""Counts up to this have points of their own; above, eight points double the count."""
_APART = 1.5
"""Points must lie this factor apart for their slope to be believed beyond them."""


def bucket(count: float) -> int:
    """The point that a count belongs to."""
    return round(count) if count <= _EXACT else round(8.0 * math.log2(count / _EXACT)) + _EXACT


class Curve:
    """A non-decreasing, piecewise linear function of a count, from measurements or given points."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}
        self._fit: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None
        for count, seconds in (points or {}).items():
            self.record(count, seconds)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._seen

    def record(self, count: int, seconds: float) -> None:
        """Take one measurement."""
        self._seen.setdefault(bucket(count), deque(maxlen=_KEPT)).append((count, seconds))
        self._fit = None

    def knows(self, count: float) -> bool:
        """Whether about this count was measured."""
        return bucket(count) in self._seen

    @property
    def smallest(self) -> float:
        """The smallest count measured."""
        return float(self._fitted()[0][0])

    def reaches(self, count: float) -> bool:
        """Whether about this count, or a larger one, was measured."""
        return bool(self._seen) and bucket(count) <= max(self._seen)

    def at(self, count: float) -> float:
        """Forecast seconds; needs at least one point. One point alone forecasts proportional growth beyond it."""
        counts, values = self._fitted()
        if count <= counts[-1]:
            return float(np.interp(count, counts, values))
        if counts[-1] < _APART * counts[0]:
            return float(values[-1] * count / counts[-1])
        slope = (values[-1] - values[0]) / (counts[-1] - counts[0])
        return float(values[-1] + slope * (count - counts[-1]))

    def least(self, count: float) -> float:
        """As `at`, but flat beyond the largest count measured: what a larger pass costs at the very least."""
        counts, values = self._fitted()
        return float(np.interp(count, counts, values))

    def points(self) -> dict[int, float]:
        """The measured points: latest count of each, median seconds."""
        return {int(seen[-1][0]): float(np.median([s for _, s in seen])) for _, seen in sorted(self._seen.items())}

    def _fitted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Counts and the nearest non-decreasing seconds."""
        if self._fit is None:
            ordered = [np.array(seen) for _, seen in sorted(self._seen.items())]
            counts = np.array([seen[:, 0].mean() for seen in ordered])
            medians = np.array([float(np.median(seen[:, 1])) for seen in ordered])
            fit = isotonic_regression(medians, weights=[float(len(seen)) for seen in ordered])
            self._fit = counts, np.asarray(fit.x, np.float64)
        return self._fit


class CostProfile:
    """Seconds of a plain step, of a pass with drafts, of one draft position, and of catching up by backlog tokens."""

    def __init__(
        self,
        forward: Curve | None = None,
        draft: Curve | None = None,
        verify: Curve | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.forward = forward or Curve()
        """Plain steps, by rows; where `verify` is empty, all passes by tokens."""
        self.verify = verify or Curve()
        """Passes with drafts, all but the drafting, by tokens."""
        self.draft = draft or Curve()
        self.catch_up = Curve()
        """Running what the drafter has not seen, by tokens."""
        self._frozen = frozen

    @classmethod
    def read(cls, path: Path, method: str) -> CostProfile:
        """A frozen profile from JSON: {"forward": {"1": seconds, ...}, "draft": {"1": seconds, ...}}.

        `forward` is by tokens in the pass, plain steps and passes with drafts alike, unless a third part "verify" holds
        the passes with drafts. A file with "drafters" has `draft` and `verify` of each method there. Raises ConfigError
        when the file is missing or of another form, or does not know the method.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            own = _of_method(raw, method, path)
            curves = [_curve(raw["forward"]), _curve(own["draft"])]
            if own.get("verify"):
                curves.append(_curve(own["verify"]))
        except FileNotFoundError:
            raise ConfigError(f"cost_profile: no file {path}") from None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                'cost_profile: expected {"forward": {tokens: seconds}, "draft": {rows: seconds}} '
                f"in {path}: {error}"
            ) from None
        if any(curve.is_empty for curve in curves):
            raise ConfigError(f"cost_profile: {path} has no points under forward or draft")
        for count, seconds in [point for curve in curves for point in curve.points().items()]:
            if count < 1 or not 0.0 < seconds < math.inf:
                raise ConfigError(
                    f"cost_profile: expected positive counts and positive, finite seconds in {path}, "
                    f"got {count}: {seconds}"
                )
        return cls(*curves, frozen=True)

    @property
    def is_frozen(self) -> bool:
        """Whether measurements are ignored, which makes choices independent of the clock."""
        return self._frozen

    def record(
        self,
        tokens: int,
        num_drafts: int,
        draft_seconds: float,
        verify_seconds: float,
        *,
        asked: int = 0,
        backlog: int = 0,
    ) -> None:
        """Take one round of `tokens` tokens in the pass; of its rows `asked` were asked for `num_drafts` drafts.

        With a backlog the draft's time counts as catching up, less what the drafts alone cost.
        """
        if self._frozen:
            return
        if not num_drafts or not asked:
            self.forward.record(tokens, verify_seconds)
            return
        self.verify.record(tokens, verify_seconds)
        if backlog:
            self.catch_up.record(backlog, max(0.0, draft_seconds - num_drafts * self._per_draft(asked)))
        else:
            self.draft.record(asked, draft_seconds / num_drafts)

    def round_seconds(self, rows: int, num_drafts: int, tokens: float | None = None) -> float:
        """Forecast of a whole round; `tokens` in the pass where not every row drafts `num_drafts`."""
        if not num_drafts:
            return self.forward.at(rows)
        size = rows * (num_drafts + 1) if tokens is None else tokens
        return self._verify_seconds(size) + num_drafts * self._per_draft(rows)

    def _verify_seconds(self, tokens: float) -> float:
        if self.verify.is_empty:
            return self.forward.at(tokens)
        smallest = self.verify.smallest
        if tokens >= smallest:
            return self.verify.at(tokens)
        # Smaller than any pass with drafts so far: as much above a plain step as the smallest one was.
        dearer = self.verify.at(smallest) / self.forward.at(smallest)
        return min(self.verify.at(smallest), dearer * self.forward.at(tokens))

    def least_seconds(self, rows: int, num_drafts: int, tokens: float) -> float:
        """What a round costs at the very least: larger passes than measured count as the largest measured."""
        draft = 0.1 * self.forward.at(rows) if self.draft.is_empty else self.draft.least(rows)
        curve = self.forward if self.verify.is_empty else self.verify
        return curve.least(tokens) + num_drafts * draft

    def reaches(self, tokens: float) -> bool:
        """Whether a pass with drafts of about this size, or a larger one, was measured."""
        return self.verify.reaches(tokens)

    def catch_up_seconds(self, backlog: int) -> float:
        """Forecast of running tokens the drafter has not seen; unmeasured, a tenth of the policy's own pass."""
        if not backlog:
            return 0.0
        return 0.1 * self.forward.at(backlog) if self.catch_up.is_empty else self.catch_up.at(backlog)

    def _per_draft(self, rows: int) -> float:
        """Seconds of one draft position; unmeasured, a tenth of a plain step."""
        return 0.1 * self.forward.at(rows) if self.draft.is_empty else self.draft.at(rows)


def _curve(points: Mapping[str, Any]) -> Curve:
    return Curve({int(count): float(seconds) for count, seconds in points.items()})


def _of_method(raw: Mapping[str, Any], method: str, path: Path) -> Mapping[str, Any]:
    """The part of a cost file with `draft` and `verify`; a look-up before a model costs what the model costs."""
    drafters = raw.get("drafters")
    if not drafters:
        return raw
    known = [name for name in (method, method.removeprefix("history+")) if name in drafters]
    if not known:
        raise ConfigError(
            f"cost_profile: expected a drafter {method} in {path}, it has {', '.join(drafters)}; "
            f"calibrate with --method {method.removeprefix('history+')}"
        )
    part: Mapping[str, Any] = drafters[known[0]]
    return part
