"""What `make bench` measures and what the project holds itself to: the plan of cells, and checks of their figures.

| what | target |
|---|---|
| plain decoding / vLLM for CPU, every batch size | >= 1.15, from batch 32 on >= 1.5 |
| plain decoding / transformers, batch 32 | >= 3.5 |
| plain step at batch 1, share of the streaming limit | >= 0.75 |
| round cost, EAGLE-3, k = 3, batch 1 | <= 1.35 |
| the same at batch 4 and 16 | <= 1.15 x bound |
| speedup at acceptance length 2.8, k = 3, batch 1 | >= 2 |
| the same at batch 4 | >= 2.8 / bound |
| auto / plain, every cell | >= 0.98, interval reaching 1, its lower end >= 0.95 |
| auto / best fixed k | >= 0.97 |
| auto / plain, long tail | >= 1.1 |
| plain step at context 2048, batch 16 / what bytes and products predict | <= 1.3 |

The bound is what a round must do at least: (forward of four tokens a row + three draft steps) / forward of one token a
row, bare passes timed in turn with the rounds themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from leadout.bench.results import Cell
from leadout.bench.statistics import Ratio

SECTIONS = ("peers", "rounds", "auto", "tail", "context")
TIE, TIE_LOWER_END = 0.98, 0.95
STREAM_SHARE = 0.75
ROUND_COST, OVER_BOUND = 1.35, 1.15
SPEEDUP = 2.0
OF_BEST_FIXED = 0.97
LONG_TAIL = 1.1
OVER_PREDICTED = 1.3


def peer_limit(peer: str, rows: int) -> float | None:
    """Plain decoding / this peer must be at least this; None where nothing is demanded."""
    if peer == "vllm":
        return 1.5 if rows >= 32 else 1.15
    return 3.5 if rows == 32 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """The cells. The defaults take 25 to 35 minutes on two cores."""

    sections: tuple[str, ...] = SECTIONS
    context: int = 64
    peer_batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    peer_tokens: int = 64
    peer_repeats: int = 4
    hf_batches: tuple[int, ...] = (1, 32)
    """transformers is slow; it takes part in these alone."""
    round_batches: tuple[int, ...] = (1, 4, 16)
    round_tokens: int = 128
    round_repeats: int = 9
    num_drafts: int = 3
    acceptance_length: float = 2.8
    """Of the good drafter, set."""
    auto_cells: tuple[tuple[str, int, int, int], ...] = (
        ("good", 1, 48, 31),
        ("good", 4, 48, 31),
        ("good", 8, 32, 31),
        ("good", 16, 32, 31),
        ("good", 32, 24, 25),
        ("good", 64, 24, 25),
        ("bad", 1, 48, 41),
        ("bad", 4, 48, 41),
        ("bad", 16, 32, 41),
        ("bad", 64, 24, 31),
        ("ngram", 1, 48, 41),
        ("ngram", 4, 48, 41),
        ("ngram", 16, 32, 41),
        ("ngram", 64, 24, 31),
    )
    """Drafter, rows, new tokens, pairs: few rows are soon done and scatter most. good: a head accepted as often as set;
    bad: an untrained head.
    """
    auto_fixed: tuple[int, ...] = (1, 3)
    """Fixed k beside plain that auto is held against, with the good drafter."""
    auto_siblings: int = 8
    """Rows of one prompt, as in GRPO: they share its prefill."""
    tail_pairs: int = 11
    contexts: tuple[int, int] = (128, 2048)
    """Prompts whose plain steps are compared."""
    context_rows: int = 16
    context_tokens: int = 16
    context_repeats: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One target beside what was measured."""

    name: str
    measured: float
    low: float | None
    """95 % interval where the figure is a ratio of medians."""
    high: float | None
    of_pairs: float | None
    """Median of the ratios within pairs, beside the ratio of medians that is judged."""
    target: str
    met: bool | None
    """None where there is a figure but no target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """Everything `make bench` measured."""

    machine: dict[str, object]
    peers: dict[str, dict[str, object]]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    """What was left out, and why."""
    section_seconds: dict[str, float]
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def at_least(name: str, ratio: Ratio, limit: float, why: str = "") -> Check:
    """The ratio itself, not its interval, is held against the limit."""
    return _check(name, ratio, f">= {limit:.2f}{why}", ratio.value >= limit)


def at_most(name: str, ratio: Ratio, limit: float, why: str = "") -> Check:
    """As `at_least`, from above."""
    return _check(name, ratio, f"<= {limit:.2f}{why}", ratio.value <= limit)


def tie_or_better(name: str, ratio: Ratio) -> Check:
    """Never slower, within what can be told: the ratio >= 0.98, its interval reaching 1, the lower end >= 0.95."""
    met = ratio.value >= TIE and ratio.upper_end >= 1.0 and ratio.lower_end >= TIE_LOWER_END
    return _check(name, ratio, f">= {TIE:.2f}, interval reaches 1, from {TIE_LOWER_END:.2f}", met)


def only_measured(name: str, ratio: Ratio, beside: str) -> Check:
    """A figure without a target."""
    return _check(name, ratio, beside, None)


def stream_share(weight_bytes: int, bytes_per_second: float, step_seconds: float) -> Check:
    """Least time to read the weights once / time of a plain step at batch 1."""
    share = weight_bytes / bytes_per_second / step_seconds
    return Check(
        name="batch 1: share of the streaming limit",
        measured=share,
        low=None,
        high=None,
        of_pairs=None,
        target=f">= {STREAM_SHARE:.2f} ({bytes_per_second / 1e9:.1f} GB/s)",
        met=share >= STREAM_SHARE,
    )


def _check(name: str, ratio: Ratio, target: str, met: bool | None) -> Check:
    return Check(
        name=name,
        measured=ratio.value,
        low=ratio.low,
        high=ratio.high,
        of_pairs=ratio.of_pairs,
        target=target,
        met=met,
    )
