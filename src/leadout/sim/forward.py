"""One forward pass of a model on one replica, operator by operator, attention left out.

A replica is `tensor_parallel` GPUs, or with data-parallel attention `data_parallel` ranks that share their experts.
Every operator is a `Curve` over tokens; a pass adds them up with their multiplicities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadout.errors import ConfigError
from leadout.sim.attention import (
    DecodeAttention,
    decode_attention,
    latent_attention,
    prefill_attention,
    roofline_attention,
)
from leadout.sim.collectives import Collectives
from leadout.sim.curves import Curve
from leadout.sim.experts import expert_curve
from leadout.sim.gemm import GemmModel, base_gpu
from leadout.sim.hardware import DTYPE_BYTES, Gpu
from leadout.sim.kernel_tables import Floats, KernelTables
from leadout.sim.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Where a model's weights lie during generation."""

    gpu: Gpu
    tables: KernelTables | None
    """None: roofline everywhere."""
    tensor_parallel: int = 1
    expert_parallel: int = 1
    """1: every expert is split over all GPUs of the replica."""
    data_parallel: int = 1
    """Ranks with their own attention and cache that step in lockstep and share experts."""
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    routing: str = "power_law_1.2"
    expert_kernel: str = "default"

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.data_parallel

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError when the layout does not divide the model."""
        tp, dp = self.tensor_parallel, self.data_parallel
        if dp > 1 and not shape.is_moe:
            raise ConfigError(
                f"generation.data_parallel must be 1 for {shape.name}, got {dp}: it is dense, so ranks share "
                "nothing and are independent replicas, of which there are gpus / tensor_parallel"
            )
        if tp < 1 or shape.heads % tp:
            raise ConfigError(
                f"generation.tensor_parallel must divide {shape.heads} query heads of {shape.name}, got {tp}"
            )
        whole = not shape.is_moe or shape.dense_layers > 0
        for width in (shape.ffn if whole else 0, shape.shared_experts * shape.expert_ffn):
            if width % tp:
                raise ConfigError(f"generation.tensor_parallel must divide the feed-forward width {width}, got {tp}")
        if shape.is_moe and self.expert_parallel == 1 and shape.expert_ffn % self.gpus:
            raise ConfigError(
                f"generation.tensor_parallel x data_parallel must divide the experts' width {shape.expert_ffn} of "
                f"{shape.name}, got {self.gpus}; with expert_parallel = {self.gpus} whole experts are spread"
            )
        if not shape.latent and max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
            raise ConfigError(
                f"generation.tensor_parallel must divide or be a multiple of {shape.kv_heads} key-value heads, got {tp}"
            )
        if self.expert_parallel > 1 and not shape.is_moe:
            raise ConfigError(f"generation.expert_parallel needs a model with experts, {shape.name} is dense")
        if self.expert_parallel not in (1, self.gpus):
            raise ConfigError(
                f"generation.expert_parallel must be 1 or tensor_parallel x data_parallel = {self.gpus}, "
                f"got {self.expert_parallel}"
            )
        if shape.is_moe and shape.experts % self.expert_parallel:
            raise ConfigError(
                f"generation.expert_parallel must divide {shape.experts} experts, got {self.expert_parallel}"
            )
        if self.dtype not in DTYPE_BYTES or self.kv_dtype not in DTYPE_BYTES:
            raise ConfigError(f"precision must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype}/{self.kv_dtype}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One kind of kernel in a pass."""

    name: str
    curve: Curve
    count: float
    """Calls per pass."""
    per_token: float = 1.0
    """The curve's argument per token of the pass (elements for collectives, ranks for experts)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """The operators of one model on one layout."""

    shape: ModelShape
    layout: Layout
    body: tuple[Operator, ...]
    head: Operator
    attention: DecodeAttention
    prefill: Curve

    def body_seconds(self, tokens: Floats) -> Floats:
        """Everything but attention and the output layer, for this many tokens a rank."""
        total = np.zeros_like(tokens)
        for operator in self.body:
            total = total + operator.count * operator.curve.at(tokens * operator.per_token)
        return total

    def head_seconds(self, tokens: Floats) -> Floats:
        """The output layer."""
        return self.head.curve.at(tokens)

    def prefill_seconds(self, prompts: int, tokens: float, chunk: float) -> float:
        """Prefill of `prompts` prompts with `tokens` tokens together, in chunks of at most `chunk` tokens."""
        if tokens <= 0 or prompts <= 0:
            return 0.0
        size = min(tokens, chunk)
        products = float(self.body_seconds(np.array([size]))[0]) * tokens / size
        attention = self.shape.layers * prompts * float(self.prefill.at(np.array([tokens / prompts]))[0])
        return products + attention + float(self.head_seconds(np.array([float(prompts)]))[0])


def build_forward(shape: ModelShape, layout: Layout) -> Forward:
    """Assemble the operators of `shape` on `layout`."""
    layout.check(shape)
    products = GemmModel(gpu=layout.gpu, dtype=layout.dtype, tables=layout.tables)
    tp = layout.tensor_parallel
    whole = latent_rows(shape, layout) is not None  # the measured layer holds its projections
    own = [] if whole else _attention_products(shape, products, tp)
    body = [*own, *_feed_forward(shape, layout, products), *_comm(shape, layout)]
    head_products = GemmModel(gpu=layout.gpu, dtype="bfloat16", tables=layout.tables)
    vocab = -(-shape.vocab // tp)
    head = Operator(name="output layer", curve=head_products.curve(vocab, shape.hidden, "output layer"), count=1)
    return Forward(
        shape=shape,
        layout=layout,
        body=tuple(body),
        head=head,
        attention=_attention(shape, layout),
        prefill=prefill_attention(
            layout.gpu, layout.tables, shape.heads // tp, max(1, shape.kv_heads // tp), shape.head_dim
        ),
    )


def _attention_products(shape: ModelShape, products: GemmModel, tp: int) -> list[Operator]:
    h, d = shape.hidden, shape.head_dim
    widths: tuple[tuple[int, int], ...]
    if shape.latent:
        rope = shape.latent - 512
        widths = (
            (shape.q_lora + shape.latent, h),
            (shape.heads // tp * (d + rope), shape.q_lora),
            (shape.heads // tp * (d + shape.v_head_dim), 512),
            (h, shape.heads // tp * shape.v_head_dim),
        )
    else:
        kv = max(1, shape.kv_heads // tp)
        widths = (((shape.heads // tp + 2 * kv) * d, h), (h, shape.heads // tp * d))
    names = ("q_a, kv_a", "q_b", "kv_b", "attention output") if shape.latent else ("qkv", "attention output")
    return [
        Operator(name=name, curve=products.curve(n, k, name), count=shape.layers)
        for name, (n, k) in zip(names, widths, strict=True)
    ]


def _feed_forward(shape: ModelShape, layout: Layout, products: GemmModel) -> list[Operator]:
    tp, h = layout.tensor_parallel, shape.hidden
    expert_layers = shape.layers - shape.dense_layers if shape.is_moe else 0
    out: list[Operator] = []

    def dense(width: int, count: int, label: str) -> None:
        out.append(Operator(name=f"{label} gate, up", curve=products.curve(2 * width // tp, h, label), count=count))
        out.append(Operator(name=f"{label} down", curve=products.curve(h, width // tp, label), count=count))

    if shape.layers > expert_layers:
        dense(shape.ffn, shape.layers - expert_layers, "mlp")
    if expert_layers:
        ep = layout.expert_parallel
        expert_tp = 1 if ep > 1 else layout.gpus
        curve = expert_curve(
            layout.gpu,
            layout.tables,
            layout.dtype,
            shape,
            tp=expert_tp,
            ep=ep,
            routing=layout.routing,
            family=layout.expert_kernel,
        )
        out.append(Operator(name="experts", curve=curve, count=expert_layers, per_token=layout.data_parallel))
        out.append(Operator(name="router", curve=products.curve(shape.experts, h, "router"), count=expert_layers))
        if shape.shared_experts:
            dense(shape.shared_experts * shape.expert_ffn, expert_layers, "shared expert")
    return out


def _comm(shape: ModelShape, layout: Layout) -> list[Operator]:
    collectives = Collectives(gpu=layout.gpu, tables=layout.tables)
    out: list[Operator] = []
    expert_layers = shape.layers - shape.dense_layers if shape.is_moe else 0
    if layout.tensor_parallel > 1:
        per_layer = 1 if layout.data_parallel > 1 else 2
        count = per_layer * shape.layers
        curve = collectives.curve("all_reduce", layout.tensor_parallel)
        out.append(Operator(name="all-reduce", curve=curve, count=count, per_token=shape.hidden))
    if layout.data_parallel > 1 and expert_layers:
        for op in ("all_gather", "reduce_scatter"):
            curve = collectives.curve(op, layout.gpus)
            elements = float(shape.hidden * layout.data_parallel)
            out.append(Operator(name=op.replace("_", "-"), curve=curve, count=expert_layers, per_token=elements))
    return out


def latent_rows(shape: ModelShape, layout: Layout) -> Floats | None:
    """Measured latent attention of this layout, [batch, kv_len]; only the full tables have any."""
    if not shape.latent or layout.tables is None or layout.gpu != base_gpu(layout.gpu):
        return None
    key = f"{layout.gpu.table}|{layout.kv_dtype}|{shape.heads // layout.tensor_parallel}"
    return layout.tables.mla.get(key)


def _attention(shape: ModelShape, layout: Layout) -> DecodeAttention:
    tp = layout.tensor_parallel
    rows = latent_rows(shape, layout)
    if rows is not None and layout.tables is not None:
        return latent_attention(layout.tables, rows)
    if shape.latent:
        traffic = shape.latent * DTYPE_BYTES[layout.kv_dtype]
        arithmetic = 2.0 * shape.heads / tp * (2 * shape.latent - 64) / (0.6 * layout.gpu.bf16_flops)
        in_bytes = arithmetic * layout.gpu.attention_fraction * layout.gpu.hbm_bytes_per_s
        return roofline_attention(layout.gpu, max(traffic, in_bytes))
    return decode_attention(
        layout.gpu,
        layout.tables,
        shape.heads // tp,
        max(1, shape.kv_heads // tp),
        shape.head_dim,
        layout.kv_dtype,
    )
