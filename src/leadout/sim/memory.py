"""Does it fit: weights, drafter, learner and cache on one GPU, and how many tokens the cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from leadout.errors import CapacityError
from leadout.sim.forward import Layout
from leadout.sim.hardware import DTYPE_BYTES
from leadout.sim.shapes import DraftShape, ModelShape

OVERHEAD_BYTES = 2.5e9
"""Activations, CUDA graphs and the framework (assumed)."""
NCCL_BYTES = 0.4e9
LEARNER_BYTES_PER_PARAM = 18.0
"""bf16 weights, fp32 master and gradient, two Adam moments."""
TRAIN_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one generating GPU, and the cache of one rank in tokens."""

    weights_bytes: float
    drafter_bytes: float
    learner_bytes: float
    overhead_bytes: float
    cache_bytes: float
    cache_tokens: float
    learner_train_bytes: float
    """Of the learner's state on one training GPU, while it trains."""


def weight_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes of policy weights on one generating GPU."""
    size = DTYPE_BYTES[layout.dtype]
    tables = shape.head_params * (1 if shape.tied else 2) * 2.0 / layout.tensor_parallel
    expert_layers = shape.layers - shape.dense_layers if shape.is_moe else 0
    routed = expert_layers * shape.experts * shape.expert_params
    rest = shape.params - routed - shape.head_params * (1 if shape.tied else 2)
    return tables + rest * size / layout.tensor_parallel + routed * size / layout.gpus


def check_memory(
    shape: ModelShape,
    layout: Layout,
    drafter: DraftShape | None,
    *,
    utilization: float,
    colocated: bool,
    offload: bool,
    training_gpus: int,
) -> Memory:
    """Raise CapacityError when weights or learner leave no room; else the split of one GPU's memory."""
    gpu = layout.gpu
    weights = weight_bytes(shape, layout)
    extra = drafter.params * 2.0 / layout.tensor_parallel if drafter is not None else 0.0
    trained = shape.params * LEARNER_BYTES_PER_PARAM / training_gpus
    if trained > TRAIN_SHARE * gpu.hbm_bytes:
        needed = int(shape.params * LEARNER_BYTES_PER_PARAM / (TRAIN_SHARE * gpu.hbm_bytes)) + 1
        raise CapacityError(
            f"training.gpus: weights and Adam of {shape.name} take {trained / 1e9:.0f} GB on each of {training_gpus} "
            f"GPUs, a {gpu.name} has {gpu.hbm_bytes / 1e9:.0f}; use at least {needed} GPUs"
        )
    resident = trained if colocated and not offload else 0.0
    overhead = OVERHEAD_BYTES + (NCCL_BYTES if layout.gpus > 1 else 0.0)
    cache = gpu.hbm_bytes * utilization - weights - extra - resident - overhead
    per_token = shape.kv_bytes_per_token(layout.tensor_parallel, DTYPE_BYTES[layout.kv_dtype])
    if drafter is not None and drafter.model is not None:
        per_token += drafter.model.kv_bytes_per_token(layout.tensor_parallel, DTYPE_BYTES[layout.kv_dtype])
    if cache <= 0:
        raise CapacityError(
            f"generation: weights {weights / 1e9:.1f} GB, drafter {extra / 1e9:.1f}, learner {resident / 1e9:.1f} and "
            f"overhead {overhead / 1e9:.1f} do not fit {utilization:.0%} of a {gpu.name}'s {gpu.hbm_bytes / 1e9:.0f} "
            "GB; raise generation.tensor_parallel or set training.offload: true"
        )
    return Memory(
        weights_bytes=weights,
        drafter_bytes=extra,
        learner_bytes=resident,
        overhead_bytes=overhead,
        cache_bytes=cache,
        cache_tokens=cache / per_token,
        learner_train_bytes=trained,
    )
