"""Seconds of a round by its shape, measured while running or read from a profile.

A forward pass is timed by the tokens in it (rows x positions), so plain steps of many rows forecast speculative rounds
of few; a draft is timed per drafted position by rows. Between measured points the forecast is linear, beyond them it
keeps the last slope.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from leadout.errors import ConfigError

_SMOOTHING = 0.2


class Curve:
    """A smoothed, non-decreasing, piecewise linear function of a count."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self._points: dict[int, float] = dict(points or {})

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._points

    def record(self, count: int, seconds: float) -> None:
        """Blend one measurement into its point."""
        before = self._points.get(count, seconds)
        self._points[count] = before + _SMOOTHING * (seconds - before)

    def at(self, count: int) -> float:
        """Forecast seconds; needs at least one point. One point alone forecasts proportional growth beyond it."""
        counts = sorted(self._points)
        values = np.maximum.accumulate([self._points[c] for c in counts])
        if count <= counts[0]:
            return float(values[0])
        if count <= counts[-1]:
            return float(np.interp(count, counts, values))
        if len(counts) == 1:
            return float(values[0] * count / counts[0])
        slope = max(0.0, (values[-1] - values[0]) / (counts[-1] - counts[0]))
        return float(values[-1] + slope * (count - counts[-1]))

    def points(self) -> dict[int, float]:
        """The measured points."""
        return dict(self._points)


class CostProfile:
    """Seconds of a forward pass by tokens, of one draft position by rows, and of catching up by backlog tokens."""

    def __init__(self, forward: Curve | None = None, draft: Curve | None = None, *, frozen: bool = False) -> None:
        self.forward = forward or Curve()
        self.draft = draft or Curve()
        self._catch_up_per_token: float | None = None
        self._frozen = frozen

    @classmethod
    def read(cls, path: Path) -> CostProfile:
        """A frozen profile from JSON: {"forward": {"1": seconds, ...}, "draft": {"1": seconds, ...}}.

        Raises ConfigError when the file is missing or of another form.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            curves = [Curve({int(k): float(v) for k, v in raw[name].items()}) for name in ("forward", "draft")]
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

    def record(self, rows: int, num_drafts: int, draft_seconds: float, verify_seconds: float, backlog: int = 0) -> None:
        """Take one round; with a backlog the draft's time counts as catching up, less what the drafts alone cost."""
        if self._frozen:
            return
        self.forward.record(rows * (num_drafts + 1), verify_seconds)
        if not num_drafts:
            return
        if backlog:
            extra = max(0.0, draft_seconds - num_drafts * self._per_draft(rows)) / backlog
            before = extra if self._catch_up_per_token is None else self._catch_up_per_token
            self._catch_up_per_token = before + _SMOOTHING * (extra - before)
        else:
            self.draft.record(rows, draft_seconds / num_drafts)

    def round_seconds(self, rows: int, num_drafts: int) -> float:
        """Forecast of a whole round."""
        forward = self.forward.at(rows * (num_drafts + 1))
        return forward + num_drafts * self._per_draft(rows) if num_drafts else forward

    def catch_up_seconds(self, backlog: int) -> float:
        """Forecast of running tokens the drafter has not seen; unmeasured, a tenth of the policy's own pass."""
        if not backlog:
            return 0.0
        if self._catch_up_per_token is None:
            return 0.1 * self.forward.at(backlog)
        return self._catch_up_per_token * backlog

    def _per_draft(self, rows: int) -> float:
        """Seconds of one draft position; unmeasured, a tenth of a plain step."""
        return 0.1 * self.forward.at(rows) if self.draft.is_empty else self.draft.at(rows)
