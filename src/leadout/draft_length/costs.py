"""Seconds of a round by its shape, measured while running or read from a profile.

A plain step is timed by its rows, a pass that verifies drafts by the tokens in it (pending tokens and drafts), a draft
per drafted position by rows. Plain steps of many rows forecast passes with drafts of few that were never tried.
Seconds are those of one pace of the machine (`leadout.draft_length.pace`), so that a plain step and a round with drafts
compare though they were measured at different times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leadout.draft_length.curves import Curve, MeasuredCurve
from leadout.draft_length.pace import Levels
from leadout.errors import ConfigError

_DRAFT_NOISE = 3.0
"""Drafts take so little time that their measurements scatter more, by this factor."""
_LEAST_CATCH_UP = 0.05
"""Share of a draft with a backlog that counts as catching up at least."""


class CostProfile:
    """Seconds of a plain step, of a pass with drafts, of one draft position, and of catching up by backlog tokens."""

    def __init__(
        self,
        forward: Mapping[int, float] | None = None,
        draft: Mapping[int, float] | None = None,
        verify: Mapping[int, float] | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        """`forward`, `draft`, `verify`: seconds by count that are known from the start."""
        self._levels = Levels()
        self._frozen = frozen
        self.forward = self._curve("forward", forward)
        """Plain steps, by rows; where `verify` is empty, all passes by tokens."""
        self.verify = self._curve("verify", verify)
        """Passes with drafts, all but the drafting, by tokens."""
        self.draft = self._curve("draft", draft, _DRAFT_NOISE)
        self.catch_up = self._curve("catch_up", None, _DRAFT_NOISE)
        """Running what the drafter has not seen, by tokens."""

    def _curve(self, kind: str, points: Mapping[int, float] | None, noise: float = 1.0) -> Curve:
        if self._frozen:
            return Curve(points or {})
        return MeasuredCurve(self._levels, kind, points, noise)

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
            parts = [_points(raw["forward"]), _points(own["draft"])]
            if own.get("verify"):
                parts.append(_points(own["verify"]))
        except FileNotFoundError:
            raise ConfigError(f"cost_profile: no file {path}") from None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                'cost_profile: expected {"forward": {tokens: seconds}, "draft": {rows: seconds}} '
                f"in {path}: {error}"
            ) from None
        if not all(parts):
            raise ConfigError(f"cost_profile: {path} has no points under forward or draft")
        for count, seconds in [point for part in parts for point in part.items()]:
            if count < 1 or not 0.0 < seconds < math.inf:
                raise ConfigError(
                    f"cost_profile: expected positive counts and positive, finite seconds in {path}, "
                    f"got {count}: {seconds}"
                )
        return cls(*parts, frozen=True)

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
        self._levels.next_round()
        if not num_drafts or not asked:
            self.forward.record(tokens, verify_seconds)
            return
        self.verify.record(tokens, verify_seconds)
        if backlog:
            drafting = num_drafts * self._per_draft(asked) * self._levels.pace
            self.catch_up.record(backlog, max(_LEAST_CATCH_UP * draft_seconds, draft_seconds - drafting))
        else:
            self.draft.record(asked, draft_seconds / num_drafts)

    def round_seconds(self, rows: int, num_drafts: int, tokens: float | None = None) -> float:
        """Forecast of a whole round; `tokens` in the pass where not every row drafts `num_drafts`."""
        if not num_drafts:
            return self.forward.at(rows)
        size = rows * (num_drafts + 1) if tokens is None else tokens
        # However quick the moment was in which it was measured, the pass does all that a plain step does.
        verify = max(self._verify_seconds(size), self.forward.at(rows))
        return verify + num_drafts * self._per_draft(rows)

    def rounds_seconds(self, rows: int, tokens_K: Sequence[float]) -> list[float]:
        """The same for k = 0..K, with as many tokens in the pass as each is given."""
        plain = self.forward.at(rows)
        draft = self._per_draft(rows) if len(tokens_K) > 1 else 0.0
        drafted = [max(self._verify_seconds(tokens), plain) + k * draft for k, tokens in enumerate(tokens_K) if k]
        return [plain, *drafted]

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

    def fixed_share(self, rows: int) -> float:
        """Share of a plain step's seconds that does not depend on its rows; half where few rows were never measured."""
        smaller = [curve for curve in (self.forward, self.verify) if not curve.is_empty and 2 * curve.smallest <= rows]
        if not smaller:
            return 0.5
        curve = min(smaller, key=lambda one: one.smallest)
        seconds = self.forward.at(rows)
        of_each = (seconds - curve.at(curve.smallest)) / (rows - curve.smallest)
        return min(max(1.0 - rows * of_each / seconds, 0.0), 1.0)

    def hoped_share(self, rows: int, num_drafts: int, tokens: float, present: float | None, doubts: float) -> float:
        """What share of its forecast a round with drafts might cost, as far as the cost of its pass is in doubt.

        A pass costs no less than smaller ones do, and none of those is believed to be dear for a few measurements of
        one moment. Doubt is of the ratio to the `present` pass, given by its tokens, or to a plain step where that is
        None. Nothing is in doubt where the profile is frozen.
        """
        curve, count = (self.forward, float(rows)) if present is None else (self.verify, present)
        if not isinstance(curve, MeasuredCurve) or not isinstance(self.verify, MeasuredCurve):
            return 1.0
        least = self._levels.least(self.verify.up_to(tokens), curve.nearest(count), doubts)
        forecast, drafting = self._verify_seconds(tokens), num_drafts * self._per_draft(rows)
        return (min(least, forecast) + drafting) / (forecast + drafting)

    def skip(self) -> None:
        """A round goes by unmeasured."""
        if not self._frozen:
            self._levels.next_round()

    def knows_plain(self, rows: int) -> bool:
        """Whether plain steps of about so many rows were measured more than a few times."""
        curve = self.forward
        return (
            curve.knows(rows) and isinstance(curve, MeasuredCurve) and not self._levels.is_young(curve.at_point(rows))
        )

    def is_young(self, tokens: float) -> bool:
        """Whether the pass with drafts nearest to this size was measured only a few times."""
        return isinstance(self.verify, MeasuredCurve) and self._levels.is_young(self.verify.nearest(tokens))

    def reaches(self, tokens: float) -> bool:
        """Whether a pass with drafts of about this size, or a larger one, was measured."""
        return self.verify.reaches(tokens)

    def has_drafted(self, rows: int) -> bool:
        """Whether drafts of about so many rows, or more, were measured."""
        return self.draft.reaches(rows)

    def catch_up_seconds(self, backlog: int) -> float:
        """Forecast of running tokens the drafter has not seen; unmeasured, a tenth of the policy's own pass."""
        if not backlog:
            return 0.0
        return 0.1 * self.forward.at(backlog) if self.catch_up.is_empty else self.catch_up.at(backlog)

    def _per_draft(self, rows: int) -> float:
        """Seconds of one draft position; unmeasured, a tenth of a plain step."""
        return 0.1 * self.forward.at(rows) if self.draft.is_empty else self.draft.at(rows)


def _points(points: Mapping[str, Any]) -> dict[int, float]:
    return {int(count): float(seconds) for count, seconds in points.items()}


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
