"""Generation of a fixed set of rollouts on one replica, from finishing event to finishing event.

All live rows advance alike: AL tokens a round. So events are ordered by progress (tokens a row has been given) and do
not depend on what a round costs; seconds follow afterwards, in closed form over each interval. The first token of a
row comes from its prefill, the other L - 1 from rounds. Rows beyond the slots or the cache wait and refill in order;
a cache that overflows sends its youngest row back to the queue, whose context is then prefilled again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leadout.errors import CapacityError
from leadout.sim.kernel_tables import Floats
from leadout.sim.step_model import Ints, StepTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervals:
    """Stretches of generation with a constant set of rows, in order. N intervals."""

    start_N: Floats
    """Progress at the start, in tokens a row."""
    span_N: Floats
    """Progress during the interval."""
    rows_N: Ints
    """Live rows, >= 1."""
    context_N: Floats
    """Cached tokens of all live rows at the start."""
    prefill_tokens_N: Floats
    """Tokens prefilled when the interval starts."""
    prefill_rows_N: Ints
    """Prompts they belong to."""
    recomputed: float = 0.0
    """Tokens prefilled again after preemption (part of the above)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What bounds the rows at work."""

    rows: int
    """max_num_seqs."""
    tokens: float = float("inf")
    """Key-value cache of the replica, in tokens."""


def order_events(
    lengths: Floats, prompt: float, slots: Slots, group: int = 1, *, prefix_cache: bool = True
) -> Intervals:
    """Intervals of draining rollouts of these lengths; `group` consecutive ones share a prompt of `prompt` tokens."""
    longest = float(lengths.max(initial=0.0)) + prompt
    if longest > slots.tokens:
        raise CapacityError(
            f"the key-value cache holds {slots.tokens:.0f} tokens a replica, one rollout needs {longest:.0f}; lower "
            "lengths.cap or raise generation.tensor_parallel or engine.gpu_memory_utilization"
        )
    shared = group if prefix_cache else 1
    if len(lengths) <= slots.rows:
        quick = _all_at_once(lengths, prompt, shared)
        peak = quick.context_N + quick.rows_N * quick.span_N
        if float(peak.max(initial=0.0)) <= slots.tokens:
            return quick
    return _with_queue(lengths, prompt, slots, shared)


def _all_at_once(lengths: Floats, prompt: float, shared: int) -> Intervals:
    work = np.sort(lengths - 1.0)
    levels, counts = np.unique(work, return_counts=True)
    gone = np.concatenate([[0], np.cumsum(counts)[:-1]])
    start = np.concatenate([[0.0], levels[:-1]])
    rows = len(lengths) - gone
    prompts = -(-len(lengths) // shared)
    prefill = np.zeros(len(levels))
    prefill_rows = np.zeros(len(levels), dtype=np.int64)
    if len(levels):
        prefill[0], prefill_rows[0] = prompts * prompt, prompts
    return Intervals(
        start_N=start,
        span_N=levels - start,
        rows_N=rows.astype(np.int64),
        context_N=rows * (prompt + 1.0 + start),
        prefill_tokens_N=prefill,
        prefill_rows_N=prefill_rows,
    )


@dataclass(slots=True, kw_only=True)
class _Live:
    """Rows at work while events are ordered."""

    heap: list[tuple[float, int]]
    """(progress at which the row ends, order of admission)."""
    born: dict[int, float]
    """Context minus progress of each live row."""
    row: dict[int, int]
    context: float = 0.0


def _with_queue(lengths: Floats, prompt: float, slots: Slots, shared: int) -> Intervals:
    done = np.zeros(len(lengths))
    queue: list[int] = list(range(len(lengths)))[::-1]
    prefilled: set[int] = set()
    live = _Live(heap=[], born={}, row={})
    out: list[tuple[float, float, int, float, float, int]] = []
    now, admitted, recomputed = 0.0, 0, 0.0
    while queue or live.heap:
        tokens, prompts = 0.0, 0
        while queue and len(live.heap) < slots.rows:
            i = queue[-1]
            start = prompt + 1.0 + done[i]
            if live.heap and live.context + start + len(live.heap) + 1 > slots.tokens:
                break
            queue.pop()
            if done[i] > 0 or i // shared not in prefilled:
                tokens += start - 1.0 if done[i] > 0 else prompt
                recomputed += start - 1.0 if done[i] > 0 else 0.0
                prompts += 1
                prefilled.add(i // shared)
            heapq.heappush(live.heap, (now + float(lengths[i]) - 1.0 - done[i], admitted))
            live.born[admitted], live.row[admitted] = start - now, i
            live.context += start
            admitted += 1
        end = live.heap[0][0]
        rows = len(live.heap)
        full = now + max((slots.tokens - live.context) / rows, 0.0)
        until = min(end, full) if rows > 1 else end
        out.append((now, until - now, rows, live.context, tokens, prompts))
        live.context += rows * (until - now)
        now = until
        while live.heap and live.heap[0][0] <= now:
            _, ticket = heapq.heappop(live.heap)
            live.context -= live.born.pop(ticket) + now
            live.row.pop(ticket)
        if until < end:
            _preempt(live, queue, done, now, prompt)
    return _pack(out, recomputed)


def _preempt(live: _Live, queue: list[int], done: Floats, now: float, prompt: float) -> None:
    """Send the youngest row back to the head of the queue with what it has made."""
    ticket = max(live.row)
    i = live.row.pop(ticket)
    context = live.born.pop(ticket) + now
    live.context -= context
    done[i] = context - prompt - 1.0
    live.heap[:] = [entry for entry in live.heap if entry[1] != ticket]
    heapq.heapify(live.heap)
    queue.append(i)


def _pack(out: Sequence[tuple[float, float, int, float, float, int]], recomputed: float) -> Intervals:
    start, span, rows, context, tokens, prompts = (np.array(column) for column in zip(*out, strict=True))
    return Intervals(
        start_N=start,
        span_N=span,
        rows_N=rows.astype(np.int64),
        context_N=context,
        prefill_tokens_N=tokens,
        prefill_rows_N=prompts.astype(np.int64),
        recomputed=recomputed,
    )


def merge_lockstep(ranks: Sequence[Intervals]) -> Intervals:
    """One set of intervals for ranks that step together: at every point the fullest rank's rows and context.

    Rows are the most any rank holds (ranks pad to the largest), the context that of the rank with most cached tokens.
    """
    if len(ranks) == 1:
        return ranks[0]
    cuts = np.unique(np.concatenate([np.concatenate([r.start_N, r.start_N + r.span_N]) for r in ranks]))
    start, end = cuts[:-1], cuts[1:]
    rows, context = np.zeros(len(start), dtype=np.int64), np.zeros(len(start))
    tokens, prompts = np.zeros(len(start)), np.zeros(len(start), dtype=np.int64)
    for rank in ranks:
        finish = float(rank.start_N[-1] + rank.span_N[-1])
        i = np.clip(np.searchsorted(rank.start_N, start, side="right") - 1, 0, len(rank.start_N) - 1)
        alive = start < finish
        rows = np.maximum(rows, np.where(alive, rank.rows_N[i], 0))
        here = rank.context_N[i] + rank.rows_N[i] * (start - rank.start_N[i])
        context = np.maximum(context, np.where(alive, here, 0.0))
        fresh = np.isin(start, rank.start_N)
        tokens = np.maximum(tokens, np.where(fresh & alive, rank.prefill_tokens_N[i], 0.0))
        prompts = np.maximum(prompts, np.where(fresh & alive, rank.prefill_rows_N[i], 0))
    return Intervals(
        start_N=start,
        span_N=end - start,
        rows_N=np.maximum(rows, 1),
        context_N=context,
        prefill_tokens_N=tokens,
        prefill_rows_N=prompts,
        recomputed=max(rank.recomputed for rank in ranks),
    )


def decode_seconds(intervals: Intervals, table: StepTable, acceptance_length: float) -> Floats:
    """Seconds of each interval's rounds."""
    batch = np.minimum(intervals.rows_N, table.max_batch)
    mean = intervals.context_N / intervals.rows_N
    return table.integrate(batch, mean, acceptance_length, intervals.span_N / acceptance_length)
