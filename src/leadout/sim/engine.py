"""What the engine around the kernels costs: host time, CUDA graphs, the kernel for several queries, the sampler.

Names follow vLLM where it has one. Out of the graph a step takes max(kernels, launch), since launching and computing
overlap. Defaults and their ranges are what publications support; see docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from leadout.errors import ConfigError
from leadout.sim.attention import QueryGrowth
from leadout.sim.kernel_tables import Floats

GRAPH_LIMIT = 512
"""vLLM's largest default captured size, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """Engine constants. Seconds."""

    host_s: float = 1.3e-4
    """Host time of every step, not hidden behind the GPU."""
    host_per_layer_s: float = 2.4e-5
    """More per layer: small kernels between the products, and their launches (1.0 ms a step at 36 layers in all)."""
    host_per_row_s: float = 1.0e-5
    """o_1: more per live row."""
    draft_host_s: float = 4.0e-4
    """h_d: host time of a sequential draft step (0.1 ms with one graph for the loop, 0.5-1.2 ms in a Python loop)."""
    ngram_host_per_row_s: float = 2.0e-5
    """Matching on the CPU, per row and round."""
    launch_per_layer_s: float = 6.0e-4
    """Launch time of one layer out of the graph (15-20 operators x 20-45 us)."""
    launch_s: float | None = None
    """The whole of it; takes the place of `launch_per_layer_s`."""
    sampler_passes: float = 8.0
    """n_pass: passes over float32 logits in copy, softmax and rejection."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """These two are conservative: vLLM's own on an A100 and on smaller GPUs; its `LLM` class takes 1,024 and 16,384 on
    other GPUs of 70 GiB and more."""
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Captured sizes in tokens; None takes vLLM's default list up to min(2 x max_num_seqs, 512)."""
    attention: QueryGrowth = field(default_factory=QueryGrowth)
    kernel_scale: float = 1.0
    """Factor on all kernel times, for their uncertainty (another engine version, another clock)."""
    ragged_drafts: bool = False
    """Draft lengths differ between rows (n-gram): attention takes the fallback kernel."""

    def __post_init__(self) -> None:
        for name in (
            "host_s",
            "host_per_layer_s",
            "host_per_row_s",
            "draft_host_s",
            "launch_per_layer_s",
            "sampler_passes",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"engine.{name} must be >= 0, got {getattr(self, name)}")
        if self.kernel_scale <= 0:
            raise ConfigError(f"engine.kernel_scale must be > 0, got {self.kernel_scale}")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError("engine.max_num_seqs and engine.max_num_batched_tokens must be >= 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"engine.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.cudagraph_capture_sizes is not None and any(size < 1 for size in self.cudagraph_capture_sizes):
            raise ConfigError("engine.cudagraph_capture_sizes must be positive token counts")

    @property
    def graph_ceiling(self) -> int:
        """Largest captured step in tokens; 0 in eager mode."""
        if self.enforce_eager:
            return 0
        if self.cudagraph_capture_sizes is not None:
            return max(self.cudagraph_capture_sizes, default=0)
        return min(2 * self.max_num_seqs, GRAPH_LIMIT)

    def capture_sizes(self) -> Floats:
        """Captured sizes, ascending."""
        if self.cudagraph_capture_sizes is not None:
            return np.array(sorted(self.cudagraph_capture_sizes), dtype=float)
        ceiling = self.graph_ceiling
        sizes = [1, 2, 4, *range(8, 257, 8), *range(272, GRAPH_LIMIT + 1, 16)]
        return np.array([size for size in sizes if size <= ceiling], dtype=float)

    def padded(self, tokens: Floats) -> Floats:
        """Tokens a step runs with: the next captured size inside the graph, as they are outside."""
        sizes = self.capture_sizes()
        if sizes.size == 0:
            return tokens
        index = np.minimum(np.searchsorted(sizes, tokens), sizes.size - 1)
        return np.where(tokens <= sizes[-1], sizes[index], tokens)

    def host(self, layers: int, rows: Floats) -> Floats:
        """o_0 + o_1 B: host time of a step."""
        return self.host_s + self.host_per_layer_s * layers + self.host_per_row_s * rows

    def launch(self, layers: int) -> float:
        """t_launch of a step out of the graph."""
        return self.launch_s if self.launch_s is not None else self.launch_per_layer_s * layers
