"""The paper's 235B projections and the blind round cost: nothing fitted, everything at stated assumptions.

The paper's simulator is closed; balanced routing without host time is what it looks like.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadout.sim.project import project
from leadout.sim.ranges import headline_ranges
from leadout.sim.scenario import Scenario, parse
from leadout.sim.setup import Workbench

GRID_235B = ((3, 3.0, 2.72, 1.70), (7, 5.0, 4.07, 1.96), (7, 8.0, 6.49, 2.22))
"""(k, acceptance length, rollout, step) on 512 GB200, synchronous."""
BLIND = (1.40, 1.57)
"""Published round costs at k = 3 on Hopper: 2.28 / 1.63 and 2.53 / 1.61."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """One figure of the paper beside ours."""

    name: str
    paper: float
    ours: float
    role: str
    """fitted, assumed or predicted."""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.ours / self.paper - 1.0


def scenario_235b(k: int, length: float, *, closed: bool, gpus: int = 512, lag: int = 0) -> Scenario:
    """A projection of the paper; lengths, layout and prompt are assumed (TP8, mean 4,000, CV 1, cap 32,768)."""
    engine: dict[str, object] = {"max_num_seqs": 256}
    if closed:
        engine |= {"host_s": 0.0, "host_per_layer_s": 0.0, "host_per_row_s": 0.0, "draft_host_s": 0.0}
        engine |= {"launch_per_layer_s": 0.0, "attention_per_draft": 0.0, "sampler_passes": 0.0}
    generating = gpus * 3 // 4 if lag else None
    return parse(
        {
            "name": f"235B k={k} length {length:g}",
            "model": "Qwen3-235B-A22B",
            "gpu": "GB200",
            "gpus": gpus,
            "precision": {"weights": "fp8", "kv_cache": "fp8", "train": "fp8"},
            "workload": {
                "num_prompts": 256,
                "num_generations": 16,
                "lengths": {"mean": 4000, "cv": 1.0, "cap": 32768},
            },
            "generation": {
                "tensor_parallel": 8,
                "gpus": generating,
                "moe_routing": "balanced" if closed else "power_law_1.2",
            },
            "engine": engine,
            "refit": {"method": "in_flight" if lag else None},
            "pipeline": {"mode": "async", "max_staleness": lag} if lag else {},
            "speculation": {
                "method": "eagle3",
                "num_speculative_tokens": k,
                "acceptance": {"mean_length": length, "at_k": k},
            },
            "draws": 1,
        }
    )


def projections_235b(*, closed: bool) -> list[Compare]:
    """The synchronous grid and the asynchronous point, rollout and step speedups."""
    bench, rows = Workbench(), []
    points = [(k, length, rollout, step, 512, 0) for k, length, rollout, step in GRID_235B]
    for k, length, rollout, step, gpus, lag in (*points, (5, 4.0, 3.5, 2.5, 2048, 2)):
        drafted = scenario_235b(k, length, closed=closed, gpus=gpus, lag=lag)
        ours = project(drafted, bench)
        plain = project(drafted.model_copy(update={"speculation": None}), bench)
        label = f"k={k} length {length:g}, {gpus} GPUs" + (f", lag {lag}" if lag else "")
        rows.append(
            Compare(name=f"{label}: rollout", paper=rollout, ours=plain.rollout_s / ours.rollout_s, role="predicted")
        )
        rows.append(Compare(name=f"{label}: step", paper=step, ours=plain.step_s / ours.step_s, role="predicted"))
    return rows


def blind_round_cost() -> tuple[float, float, float]:
    """Round cost at k = 3 of an 8B model on H100 with every constant at its default: (value, 5 %, 95 %).

    Rows a GPU and lengths of the published runs are not known; they range over 16-128 and means of 1,500-6,000.
    """
    found = headline_ranges(
        parse(
            {
                "model": "Qwen3-8B",
                "gpu": "H100",
                "gpus": 8,
                "workload": {
                    "num_prompts": 64,
                    "num_generations": 8,
                    "lengths": {"mean": 4000, "cv": 0.55, "cap": 8192},
                },
                "speculation": {"num_speculative_tokens": 3, "acceptance": {"mean_length": 2.28, "at_k": 3}},
                "ranges": {"workload.num_prompts": (16, 128), "workload.lengths.mean": (1500, 6000)},
                "draws": 1,
            }
        ),
        draws=64,
    )["round_cost"]
    return found.value, found.low, found.high
