"""Time of one operator as a function of tokens, with the path that served it.

Inside the grid: linear in log-log. Below the grid: the first row. Beyond it: the last row times the ratio of
rooflines, at most a factor `MAX_STRETCH`, then refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.errors import CapacityError
from leadout.sim.kernel_tables import Floats, Served

MAX_STRETCH = 4.0
ROOFLINE_GRID = np.unique(np.rint(2 ** np.arange(0.0, 20.01, 0.25))).astype(float)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Seconds by tokens; grid ascending."""

    name: str
    tokens: Floats
    seconds: Floats
    served: Served
    measured: bool = False
    """Whether the grid points are table rows of this very shape."""

    def at(self, tokens: Floats) -> Floats:
        """Seconds at these token counts (floats allowed); raises CapacityError too far beyond the grid."""
        top = self.tokens[-1]
        largest = float(np.max(tokens, initial=0.0))
        if largest > MAX_STRETCH * top:
            raise CapacityError(
                f"{self.name}: {largest:.0f} tokens in one call is over {MAX_STRETCH:.0f} times the last measured row "
                f"({top:.0f}); lower the batch or max_num_batched_tokens"
            )
        clipped = np.clip(tokens, self.tokens[0], top)
        inside = np.exp(np.interp(np.log(clipped), np.log(self.tokens), np.log(self.seconds)))
        return np.where(tokens > top, inside * tokens / top, inside)

    def path(self, tokens: float) -> Served:
        """Which path serves this token count."""
        if tokens > self.tokens[-1] and self.served is not Served.ROOFLINE:
            return Served.EXTRAPOLATED
        if self.served is Served.INTERPOLATED and self.measured and bool(np.any(self.tokens == tokens)):
            return Served.MEASURED
        return self.served


def grid_of(seconds: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Drop missing rows."""
    present = np.isfinite(seconds)
    return tokens[present], seconds[present]
