"""NeMo RL v0.6's published performance table against the model, inputs from its v0.6.0 recipes, nothing fitted.

Source: NVIDIA-NeMo/RL docs/about/performance-summary.md (means of five steps; bf16, OpenMathInstruct-2, Megatron, vLLM
0.17.1 with Triton expert kernels). "Maximum length" there is prompt and response together.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadout.sim.project import Projection, project
from leadout.sim.scenario import Scenario, parse
from leadout.sim.setup import Workbench


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    model: str
    gpu: str
    gpus: int
    generating: int | None
    """GPUs that generate; None: all, shared with training."""
    lag: int
    cap: int
    mean: float
    prompts: int
    generations: int
    tensor_parallel: int
    step_s: float
    """Measured."""
    gated: bool = False
    note: str = ""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """How the row is printed."""
        policy = "on-policy" if self.generating is None else f"{self.lag}-off"
        fp8 = " FP8" if self.dtype == "fp8" else ""
        return f"{self.model} {self.gpus} {self.gpu} {policy}{fp8}"


_235B = {"model": "Qwen3-235B-A22B", "cap": 8072, "prompts": 16, "generations": 32}
_30B = {"model": "Qwen3-30B-A3B", "cap": 3996, "prompts": 64, "generations": 32}
_V3 = {"model": "DeepSeek-V3", "cap": 1430, "prompts": 32, "generations": 16}
_TWO_DOMAINS = "128 GB200 are two NVLink domains; where replicas lie in them is not published"
_30B_NOTE = "stages not published; an MFU of .05-.10 with experts 768 wide (ours .15-.19) would explain the rest"
_V3_NOTE = "no expert or latent-attention table of this shape: roofline only"


def _row(base: dict[str, object], *args: object, **more: object) -> Row:
    names = ("gpu", "gpus", "generating", "lag", "mean", "tensor_parallel", "step_s")
    return Row(**{**base, **dict(zip(names, args, strict=True)), **more})  # type: ignore[arg-type]


ROWS = (
    _row(_235B, "GB200", 64, None, 0, 5709, 8, 286),
    _row(_235B, "GB200", 128, None, 0, 5693, 8, 345, note=_TWO_DOMAINS),
    _row(_235B, "GB200", 128, 64, 1, 5705, 8, 278, note=_TWO_DOMAINS),
    _row(_235B, "H100", 128, None, 0, 5698, 16, 395, gated=True),
    _row(_235B, "H100", 256, None, 0, 5713, 16, 312, gated=True),
    _row(_235B, "H100", 256, 128, 1, 5721, 8, 231, note="the row's tokens and time disagree by 19 %"),
    _row(_30B, "GB200", 16, None, 0, 3199, 1, 221, note=_30B_NOTE),
    _row(_30B, "GB200", 16, 8, 1, 3197, 1, 301, note=_30B_NOTE),
    _row(_30B, "H100", 32, None, 0, 3203, 2, 192, note=_30B_NOTE),
    _row(_30B, "H100", 32, 16, 1, 3203, 2, 152, note=_30B_NOTE),
    _row(_30B, "H100", 192, 64, 8, 3206, 2, 34.5, note="four optimizer steps of 512 rollouts; " + _30B_NOTE),
    _row(_V3, "GB200", 128, None, 0, 711, 32, 108, note=_V3_NOTE),
    _row(_V3, "GB200", 256, None, 0, 700, 32, 98.7, note=_V3_NOTE),
    _row(_V3, "GB200", 256, 128, 1, 708, 16, 61.7, note=_V3_NOTE),
    _row(_V3, "H100", 256, None, 0, 701, 32, 134, note=_V3_NOTE),
    _row(_V3, "H100", 512, None, 0, 697, 32, 111, note=_V3_NOTE),
    _row(_V3, "H100", 512, 256, 1, 710, 32, 64.1, note=_V3_NOTE),
    _row(_V3, "H100", 512, 256, 1, 721, 16, 59.2, dtype="fp8", note=_V3_NOTE),
)
"""All rows but the Nemotron one, whose hybrid layers the model does not know."""


def scenario(row: Row) -> Scenario:
    """A row as a scenario."""
    asynchronous = row.generating is not None
    return parse(
        {
            "name": row.name,
            "model": row.model,
            "gpu": row.gpu,
            "gpus": row.gpus,
            "precision": {"weights": row.dtype},
            "workload": {
                "num_prompts": row.prompts,
                "num_generations": row.generations,
                "prompt_length": 110,
                "lengths": {"mean": row.mean, "cv": 0.55, "cap": row.cap},
            },
            "generation": {
                "gpus": row.generating,
                "tensor_parallel": row.tensor_parallel,
                "moe_kernel": "triton",
            },
            "refit": {"method": "in_flight" if asynchronous else None},
            "pipeline": {"mode": "async", "max_staleness": row.lag} if asynchronous else {},
            "draws": 2,
        }
    )


def project_rows(rows: tuple[Row, ...] = ROWS) -> list[tuple[Row, Projection]]:
    """Every row beside its projection."""
    bench = Workbench()
    return [(row, project(scenario(row), bench)) for row in rows]
