"""Time of one decoding round on one replica, as a function of live rows and mean context.

t(B, L) = max(products + attention, launch out of the graph) + draft + sampler + host, with B live rows, L mean cached
tokens a row, k drafts a row, T = B (k + 1) tokens verified. For fixed B it is piecewise linear in L, so that its sum
over rounds with growing context is a closed form (`StepTable.integrate`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leadout.sim.engine import EngineTerms
from leadout.sim.forward import Forward, Layout, Operator, build_forward
from leadout.sim.gemm import GemmModel
from leadout.sim.kernel_tables import Floats, Served, worst
from leadout.sim.shapes import DraftShape, ModelShape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Seconds of a round at fixed k: for B = 1..rows, a piecewise linear function of the mean context."""

    contexts: Floats
    """[B, knots], ascending in each row."""
    seconds: Floats
    """[B, knots]"""

    @property
    def max_batch(self) -> int:
        """Largest B."""
        return int(self.contexts.shape[0])

    def at(self, batch: Ints, context: Floats) -> Floats:
        """Seconds of one round."""
        x, y = self.contexts[batch - 1], self.seconds[batch - 1]
        i = np.clip((x <= context[:, None]).sum(axis=1) - 1, 0, x.shape[1] - 2)
        row = np.arange(len(batch))
        slope = (y[row, i + 1] - y[row, i]) / (x[row, i + 1] - x[row, i])
        return np.asarray(y[row, i] + slope * (context - x[row, i]))

    def integrate(self, batch: Ints, context: Floats, growth: Floats | float, rounds: Floats) -> Floats:
        """Sum of the seconds of `rounds` rounds whose mean context starts at `context` and grows by `growth` a round.

        Exact for whole rounds; for fractions of a round the same polynomial goes on.
        """
        x, y = self.contexts[batch - 1], self.seconds[batch - 1]
        growth_N = np.broadcast_to(np.asarray(growth, dtype=float), context.shape)
        edges = np.ceil((x[:, 1:-1] - context[:, None]) / growth_N[:, None])
        edges = np.clip(edges, 0.0, rounds[:, None])
        first = np.concatenate([np.zeros((len(batch), 1)), edges], axis=1)
        last = np.concatenate([edges, rounds[:, None]], axis=1)
        count = np.maximum(last - first, 0.0)
        middle = context[:, None] + growth_N[:, None] * (first + (count - 1.0) / 2.0)
        slope = np.diff(y, axis=1) / np.diff(x, axis=1)
        return np.asarray((count * (y[:, :-1] + slope * (middle - x[:, :-1]))).sum(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A line of the breakdown of one round."""

    name: str
    seconds: float
    served: Served


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepModel:
    """Rounds of one policy and drafter on one layout and engine."""

    policy: Forward
    engine: EngineTerms
    drafter: DraftShape | None
    draft: Forward | None
    """The drafter's own pass; None without one or for n-gram."""
    fusion: Operator | None
    """The drafter's fusing layer."""

    def table(self, k: int, max_batch: int) -> StepTable:
        """Rounds with k drafts a row for 1..max_batch rows."""
        batch = np.arange(1, max_batch + 1, dtype=float)
        base, other, out = self._flat(batch, k)
        knots = self.policy.attention.kv_lens
        verify = self._attention(batch) * self._growth(k)
        draft = self._draft_attention(batch, k)
        return _with_kinks(knots, base[:, None] + verify, np.where(out, self._launch(), 0.0), other[:, None] + draft)

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Prefill of the policy and, with drafting, of the drafter's cache."""
        chunk = float(self.engine.max_num_batched_tokens)
        seconds = self.policy.prefill_seconds(prompts, tokens, chunk)
        host = np.ceil(tokens / chunk) * float(self.engine.host(self.policy.shape.layers, np.zeros(1))[0])
        if self.draft is not None and tokens > 0:
            seconds += self.draft.prefill_seconds(prompts, tokens, chunk)
        return float(seconds * self.engine.kernel_scale + host)

    def _launch(self) -> float:
        return self.engine.launch(self.policy.shape.layers)

    def _ragged(self, k: int) -> bool:
        return k > 0 and (self.engine.ragged_drafts or (self.drafter is not None and self.drafter.method == "ngram"))

    def _growth(self, k: int) -> float:
        if self._ragged(k):
            return max(self.engine.attention.fallback_factor, self.engine.attention.factor(k))
        return self.engine.attention.factor(k)

    def _attention(self, batch: Floats) -> Floats:
        return self.engine.kernel_scale * self.policy.shape.layers * self.policy.attention.rows(batch)

    def _draft_attention(self, batch: Floats, k: int) -> Floats:
        if k == 0 or self.draft is None:
            return np.zeros((len(batch), len(self.policy.attention.kv_lens)))
        return self.engine.kernel_scale * k * self.draft.shape.layers * self.draft.attention.rows(batch)

    def _flat(self, batch: Floats, k: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """(verify kernels without attention, everything else, whether out of the graph), by batch."""
        verified = batch * (k + 1)
        padded = self.engine.padded(verified)
        base = self.engine.kernel_scale * (self.policy.body_seconds(padded) + self.policy.head_seconds(verified))
        gpu, shape = self.policy.layout.gpu, self.policy.shape
        logits = verified * shape.vocab * 4.0
        sampler = self.engine.sampler_passes * logits / (gpu.attention_fraction * gpu.hbm_bytes_per_s)
        host = self.engine.host(self.policy.shape.layers, batch)
        out = (verified > self.engine.graph_ceiling) | self._ragged(k)
        return base, sampler + host + self._draft_flat(batch, k), out

    def _draft_flat(self, batch: Floats, k: int) -> Floats:
        """The drafter's share without attention: first pass over the verified tokens, k - 1 over one token a row."""
        if k == 0 or self.drafter is None:
            return np.zeros_like(batch)
        if self.draft is None:
            return self.engine.ngram_host_per_row_s * batch
        first = self.draft.body_seconds(batch * (k + 1))
        later = (k - 1) * self.draft.body_seconds(batch)
        heads = k * self.draft.head_seconds(batch)
        fusing = self.fusion.curve.at(batch * (k + 1)) if self.fusion is not None else 0.0
        kernels = self.engine.kernel_scale * (fusing + first + later + heads)
        return np.asarray(kernels + k * self.engine.draft_host_s)

    def _draft_path(self) -> Served:
        """The least trustworthy path of the drafter's operators."""
        if self.draft is None:
            return Served.ASSUMED
        return worst(*(operator.curve.served for operator in self.draft.body), self.draft.head.curve.served)

    def breakdown(self, k: int, batch: int, context: float) -> list[Part]:
        """One round by operator, with the path that served each."""
        rows = np.array([float(batch)])
        tokens = float(self.engine.padded(rows * (k + 1))[0])
        scale = self.engine.kernel_scale
        parts = [_part(operator, tokens, scale) for operator in self.policy.body]
        parts.append(_part(self.policy.head, float(batch * (k + 1)), scale))
        attention = scale * self.policy.shape.layers * self.policy.attention.at(batch, context) * self._growth(k)
        parts.append(
            Part(name="attention", seconds=attention, served=self.policy.attention.path(float(batch), context))
        )
        kernels = sum(part.seconds for part in parts)
        _, other, out = self._flat(rows, k)
        if out[0] and self._launch() > kernels:
            parts.append(Part(name="launch beyond kernels", seconds=self._launch() - kernels, served=Served.ASSUMED))
        host = float(self.engine.host(self.policy.shape.layers, rows)[0])
        draft = float(self._draft_flat(rows, k)[0])
        if self.draft is not None and k:
            draft += scale * k * self.draft.shape.layers * self.draft.attention.at(batch, context)
        sampler = float(other[0]) - host - float(self._draft_flat(rows, k)[0])
        parts.append(Part(name="sampler", seconds=sampler, served=Served.ROOFLINE))
        if k:
            parts.append(Part(name="draft", seconds=draft, served=self._draft_path()))
        parts.append(Part(name="host", seconds=host, served=Served.ASSUMED))
        return parts


def _part(operator: Operator, tokens: float, scale: float) -> Part:
    argument = tokens * operator.per_token
    seconds = scale * operator.count * float(operator.curve.at(np.array([argument]))[0])
    return Part(name=operator.name, seconds=seconds, served=operator.curve.path(argument))


def _with_kinks(knots: Floats, kernels: Floats, launch: Floats, rest: Floats) -> StepTable:
    """max(kernels, launch) + rest on the knots, with one more knot in each row where the two cross."""
    rows = len(kernels)
    index = np.arange(rows)
    below = kernels < launch[:, None]
    last = below.sum(axis=1)  # kernels ascend with context, so `below` is a prefix
    crossing = (last > 0) & (last < len(knots))
    i = np.where(crossing, last - 1, 0)
    span = np.where(crossing, kernels[index, i + 1] - kernels[index, i], 1.0)
    share = np.where(crossing, (launch - kernels[index, i]) / np.where(span > 0, span, 1.0), 0.5)
    share = np.clip(share, 1e-9, 1 - 1e-9)
    extra_x = knots[i] + share * (knots[i + 1] - knots[i])
    extra_k = kernels[index, i] + share * (kernels[index, i + 1] - kernels[index, i])
    extra_r = rest[index, i] + share * (rest[index, i + 1] - rest[index, i])
    x = np.concatenate([np.broadcast_to(knots, (rows, len(knots))), extra_x[:, None]], axis=1)
    y = np.maximum(np.concatenate([kernels, extra_k[:, None]], axis=1), launch[:, None])
    y = y + np.concatenate([np.broadcast_to(rest, kernels.shape), extra_r[:, None]], axis=1)
    order = np.argsort(x, axis=1, kind="stable")
    return StepTable(contexts=np.take_along_axis(x, order, 1), seconds=np.take_along_axis(y, order, 1))


def build_step_model(
    shape: ModelShape, layout: Layout, engine: EngineTerms, drafter: DraftShape | None = None
) -> StepModel:
    """The step model of a replica; the drafter is split over the same tensor-parallel group."""
    policy = build_forward(shape, layout)
    if drafter is None or drafter.model is None:
        return StepModel(policy=policy, engine=engine, drafter=drafter, draft=None, fusion=None)
    draft_layout = Layout(
        gpu=layout.gpu,
        tables=layout.tables,
        tensor_parallel=layout.tensor_parallel,
        dtype="bfloat16" if drafter.method != "small_model" else layout.dtype,
        kv_dtype=layout.kv_dtype,
    )
    draft = build_forward(drafter.model, draft_layout)
    fusion = None
    if drafter.fused_states:
        products = GemmModel(gpu=layout.gpu, dtype="bfloat16", tables=layout.tables)
        hidden = drafter.model.hidden
        width = max(1, hidden // layout.tensor_parallel)
        curve = products.curve(width, drafter.fused_states * hidden, "draft fusion")
        fusion = Operator(name="draft fusion", curve=curve, count=1)
    return StepModel(policy=policy, engine=engine, drafter=drafter, draft=draft, fusion=fusion)
