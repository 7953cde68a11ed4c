"""Which draft length to try although its forecast is worse: one whose cost is in doubt enough to be the better one.

Part of the goodput rule (`leadout.draft_length.controller`): a forecast that came out dear once would otherwise never
be put to the test again, and a size that was never measured never would be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leadout.draft_length.costs import CostProfile
from leadout.draft_length.goodput import LEAST_GAIN

_EXPLORE_GAIN = 1.1
"""A round whose cost is in doubt is tried where it might gain this much."""
_LOOK_AFTER, _LOOK_YOUNG_AFTER, _LOOK_YOUNG_AFTER_OFF = 128, 16, 64
"""Rounds between second looks at sizes that were measured before; at those measured seldom, while drafting and while
off, where all rows would have to catch up first."""
_LOOK_SHARE, _LOOK_SHARE_OFF = 0.02, 0.004
"""Share of the time since the last look that a second look may lose, going by the forecast; less while off, where
probes cost as much again."""
_LOOK_ROUNDS_OFF = 8
"""Rounds of a second look while off, at a size that was measured in several moments. The first of them pays for
catching up and finds cold caches; were it alone, what one slow moment made dear would hardly be corrected."""
OPTIMISM = 1.0
"""Standard deviations by which acceptance may be better than it looks, where a k is tried."""
_DOUBTS = 2.0
"""How many standard deviations a cost may be below its forecast."""


def worth_exploring(
    costs: CostProfile,
    rows: int,
    current: int,
    since_look: int,
    tokens_K: npt.NDArray[np.float64],
    verified_K: npt.NDArray[np.float64],
    seconds_K: npt.NDArray[np.float64],
    catch_up: float,
) -> tuple[int, int]:
    """The k that might gain most, as far as its cost is in doubt, and for how many rounds to try it.

    It is the present one if none might gain enough.

    A pass larger than any measured costs at least what the largest measured one does. One measured seldom or long ago
    may cost less than the forecast says.

    Args:
        costs: What rounds cost.
        rows: Live rows.
        current: The present k.
        since_look: Rounds since a k was tried for the doubt about its cost.
        tokens_K: Tokens that a row commits for k = 0..K.
        verified_K: Tokens of a row in the pass.
        seconds_K: Forecast seconds of a round.
        catch_up: Seconds that drafting has to catch up on first.

    """
    goodput_K, chosen, rounds = tokens_K / seconds_K, current, 1
    most = _EXPLORE_GAIN * float(goodput_K[current])
    lost_K = seconds_K - tokens_K / goodput_K[current]
    may_lose = (_LOOK_SHARE if current else _LOOK_SHARE_OFF) * since_look * float(seconds_K[current])
    present = rows * float(verified_K[current]) if current else None
    young_after = _LOOK_YOUNG_AFTER if current else _LOOK_YOUNG_AFTER_OFF
    for k in range(1, tokens_K.size):
        size = rows * float(verified_K[k])
        known = costs.reaches(size)
        young = known and costs.is_young(size)
        looks = _LOOK_ROUNDS_OFF if known and not young and not current else 1
        too_soon = since_look < (young_after if young else _LOOK_AFTER)
        if k == current or (known and (too_soon or looks * lost_K[k] + catch_up > may_lose)):
            continue
        if known and costs.has_drafted(rows):
            goodput = float(goodput_K[k]) / costs.hoped_share(rows, k, size, present, _DOUBTS)
        else:
            goodput = float(tokens_K[k]) / (LEAST_GAIN * costs.least_seconds(rows, k, size))
        if goodput > most:
            most, chosen, rounds = goodput, k, looks
    return chosen, rounds
