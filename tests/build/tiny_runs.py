"""A model folder small enough to train in seconds, and recipes over it. Run as a program it carries out one recipe."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from leadout import build
from leadout.metrics import read_rows
from leadout.recipe import load_recipe
from tests.codecs import byte_codec

ROOT = Path(__file__).parents[2]
MEASURED = re.compile(r"seconds/.*|exposed/.*|.*_per_second|memory/.*")
EOS = 256
STEPS = 4


def model_folder(folder: Path, *, template: bool = True, context: int = 128, seed: int = 0, layers: int = 4) -> Path:
    """A random Llama with a byte tokenizer, as transformers saves them."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=257,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    codec = byte_codec() if template else byte_codec(template=None)
    codec._tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, count: int = 40) -> Path:
    """Rows with `question` and `answer`."""
    rows = [{"question": f"{i}+{i % 7}?", "answer": str(i + i % 7)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe(folder: Path, model: Path, **changes: Any) -> Path:
    """A recipe file; dotted keys with __ for the dots change it."""
    tree: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": str(model),
        "seed": 3,
        "data": {"train": {"task": "arithmetic", "num_rows": 20}},
        "reward": [{"function": "tests.build.rewards:letters"}],
        "rollout": {
            "num_prompts": 2,
            "num_generations": 3,
            "max_completion_length": 10,
            "dtype": "float32",
            "speculative_config": {"method": "eagle3", "num_speculative_tokens": 2},
        },
        "draft": {"vocab_size": 128, "learning_rate": 1e-2, "warmup_steps": 1},
        "optim": {"learning_rate": 1e-3},
        "train": {"dtype": "float32", "micro_batch_size": 3},
        "pipeline": {"max_steps": STEPS},
        "checkpoint": {"every": 2},
        "log": {"benchmark": False},
        "threads": 1,
    }
    for key, value in changes.items():
        *parts, last = key.split("__")
        section = tree
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = value
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def learning(method: str, small: str) -> dict[str, Any]:
    """Changes of the recipe for a drafter that learns by this method; `small`: the folder of a small model."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method.endswith("small_model"):
        speculation["model"] = small
    changes: dict[str, Any] = {"rollout__speculative_config": speculation, "draft__enabled": True}
    return changes | ({"draft__vocab_size": None} if method.endswith(("mtp", "small_model")) else {})


def train(path: Path, *overrides: str, resume: Path | None = None) -> tuple[Path, str]:
    """Carry out a recipe in this process; the run folder and what was printed."""
    printed = io.StringIO()
    folder = build.train(load_recipe(path, overrides), resume=resume, console=Console(file=printed, width=120))
    return folder, printed.getvalue()


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-c", "from leadout.cli.main import run; run()", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def unmeasured(folder: Path) -> list[dict[str, object]]:
    """Rows of metrics.jsonl without what a clock or the system measured."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not MEASURED.fullmatch(name)} for row in rows]
