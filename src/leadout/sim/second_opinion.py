"""A second opinion on a plain round: the step time of `aiconfigurator-core`'s own engine beside ours.

Needs the optional package that `leadout.sim.aic` reads tables of; here its engine is imported and run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from leadout.errors import ConfigError
from leadout.sim.aic import VERSION, data_folder, engine_version
from leadout.sim.project import Projection
from leadout.sim.resolve import resolve_gpu
from leadout.sim.scenario import Scenario
from leadout.sim.shapes import MODELS, find_model

ENGINE_MODELS = {
    **{f"Qwen3-{size}": f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
}
"""Names the package's engine has for the built-in models."""


def engine_model(model: str) -> str:
    """What the engine calls a scenario's model: its name for a built-in one, else the folder of the config.json."""
    shape, path = find_model(model), Path(model)
    if MODELS.get(shape.name) is shape:
        return ENGINE_MODELS[shape.name]
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"--second-opinion aic reads a model from a folder with a config.json, got {model}")
    return str(path if path.is_dir() else path.parent)


def second_opinion(engine: str, plain: Projection) -> tuple[str, dict[str, float]]:
    """The step time of aiconfigurator's own engine beside ours, for the plain round the breakdown shows."""
    if engine != "aic":
        raise ConfigError(f"--second-opinion must be aic, got {engine!r}")
    data_folder()
    scenario = plain.scenario
    gpu, (rows, context, _) = resolve_gpu(scenario.gpu), plain.breakdown_at
    if gpu.table is None:
        raise ConfigError("--second-opinion aic needs a GPU with tables, the scenario's has none")
    theirs = _engine_seconds(scenario, gpu.table, rows, int(context))
    ours = sum(part.seconds for part in plain.breakdown)
    line = (
        f"second opinion (aiconfigurator-core {VERSION}): plain round of {rows} rows at context {context:.0f}: "
        f"{theirs * 1e3:.2f} ms, ours {ours * 1e3:.2f} ms ({ours / theirs - 1:+.0%}; ours includes host time)"
    )
    return line, {"theirs_s": theirs, "ours_s": ours}


def _engine_seconds(scenario: Scenario, system: str, rows: int, context: int) -> float:
    """Seconds of a decode step by the package's engine; raises ConfigError with its words when it refuses."""
    model = engine_model(scenario.model)
    section = scenario.generation
    handle = import_module("aiconfigurator_core.sdk").EngineHandle
    no_model: type[Exception] = import_module("aiconfigurator_core.sdk.utils").HuggingFaceDownloadError
    try:
        compiled = handle.compile(
            model,
            system,
            "vllm",
            backend_version=engine_version(system),
            tp_size=section.tensor_parallel,
            moe_tp_size=1 if section.expert_parallel > 1 else section.tensor_parallel,
            moe_ep_size=section.expert_parallel,
            gemm_quant_mode=None if scenario.precision.weights == "bfloat16" else "fp8",
        )
        return float(compiled.predict_decode_latency(rows, context, 2)) * 1e-3
    except (ValueError, RuntimeError, no_model) as error:  # what the package raises for inputs it cannot serve
        words = " ".join(str(error).split())
        raise ConfigError(f"--second-opinion aic has none for {model} on {system}: {words}") from error
