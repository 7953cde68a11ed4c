"""One whole GRPO step, leadout beside TRL's GRPOTrainer: same model, prompts, group sizes and token counts.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/trl_step.py --trl-python /tmp/trl/bin/python

Every contender runs in a process of its own with two threads; all but the one whose turn it is are stopped (SIGSTOP).
They take steps in turn, A B C, A B C; the first round warms up and is not counted. Each holds 3.5 to 6 GB, so ask for
few rows at a time. All: one micro-batch, beta 0, no gradient checkpointing. TRL once with bfloat16 weights and once
with float32 weights under autocast, which is leadout's own precision. End of sequence is ignored on both
sides, so that all work on the same number of tokens, and the reward differs within almost every group, so that none is
left out of the backward pass for want of a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROWS = {
    "leadout": "leadout, EAGLE-3 learning along",
    "leadout-quarter": "leadout, EAGLE-3 learning from a quarter of the rollouts",
    "leadout-shipped": "leadout, the project's own EAGLE-3 head learning along",
    "leadout-shipped-quarter": "leadout, that head learning from a quarter of the rollouts",
    "leadout-plain": "leadout, no drafter",
    "trl-bf16": "TRL, bfloat16 weights",
    "trl-fp32": "TRL, float32 weights, bf16 autocast",
}
MARK = "@@"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", default="leadout,leadout-plain,trl-bf16,trl-fp32", help=", ".join(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        drive(options)
    elif options.side.startswith("trl"):
        run_trl(options)
    else:
        run_leadout(options)


def drive(options: argparse.Namespace) -> None:
    """Start the contenders one after the other and let them step in turn."""
    names = options.rows.split(",")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = {}
        for name in names:
            python = options.trl_python if name.startswith("trl") else sys.executable
            passed = [f"--{key}={getattr(options, key)}" for key in ("steps", "prompts", "generations", "tokens")]
            processes[name] = subprocess.Popen(
                [python, __file__, "--side", name, "--folder", folder, *passed],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"},
            )
            # A stopped one would otherwise stay, with all its memory, where another fails.
            stack.callback(processes[name].kill)
            answer(processes[name])
            processes[name].send_signal(signal.SIGSTOP)
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn in range(options.steps + 1):
            for name, process in processes.items():
                process.send_signal(signal.SIGCONT)
                print("step", file=process.stdin, flush=True)
                taken[name].append(answer(process))
                process.send_signal(signal.SIGSTOP)
                print(f"{turn}: {name}: {taken[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    show({name: steps[1:] for name, steps in taken.items()}, options)


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """The next marked line of a contender."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    raise SystemExit(f"a contender ended early: {process.args}")


def show(taken: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    base = next(iter(taken))
    print(f"{options.prompts * options.generations} completions of {options.tokens} tokens, {options.steps} steps each")
    print("| | step s | quartiles | rollout s | train s | peak memory GB | x of the first |")
    print("|---|---|---|---|---|---|---|")
    for name, steps in taken.items():
        seconds = [step["seconds"] for step in steps]
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
        ratio = statistics.median(s / step["seconds"] for s, step in zip(seconds, taken[base], strict=True))
        stages = [
            f"{statistics.median(step[key] for step in steps):.2f}" if key in steps[0] else "-"
            for key in ("rollout", "train")
        ]
        print(
            f"| {ROWS[name]} | {statistics.median(seconds):.2f} | {low:.2f}..{high:.2f} | {stages[0]} | {stages[1]} "
            f"| {steps[-1]['peak_gb']:.2f} | {ratio:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(taken, indent=1))


def tell(**values: float) -> None:
    """One marked line to the driver."""
    print(
        MARK + json.dumps({**values, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}), flush=True
    )


def reward(completions: list[str], **_: object) -> list[float]:
    """Says nothing about the answer; see above."""
    return [float(sum(map(ord, text)) % 5) for text in completions]


def run_leadout(options: argparse.Namespace) -> None:
    """The command's own objects, stepped by hand."""
    from dataclasses import replace

    from rich.console import Console

    from leadout.build.run import build_run
    from leadout.config import RunConfig

    shipped = Path(__file__).parents[1] / "drafts" / "smollm2-135m-eagle3"
    head = str(shipped) if "shipped" in options.side else None
    config = RunConfig.model_validate(
        {
            "model": "smollm2-135m",
            "data": {"train": {"task": "arithmetic"}},
            "rollout": {
                "num_prompts": options.prompts,
                "num_generations": options.generations,
                "max_completion_length": options.tokens,
                "speculative_config": (
                    {"method": "eagle3", "model": head} if options.side != "leadout-plain" else None
                ),
            },
            "draft": {
                "vocab_size": 4096 if head is None else None,
                "token_fraction": 0.25 if options.side.endswith("quarter") else 1.0,
            },
            "reward": [{"function": "trl_step:reward"}],
            "train": {"micro_batch_size": options.prompts * options.generations},
            "optim": {"learning_rate": 2e-5},
            "threads": 2,
            "name": options.side,
            "output_dir": str(options.folder),
        }
    )
    pipeline = build_run(config, resume=None, console=Console(file=sys.stderr)).run.pipeline
    pipeline.params = replace(pipeline.params, stop_token_ids=())
    texts = options.folder / "prompts.json"
    if not texts.exists():
        count = options.prompts * (options.steps + 1)
        taken = [prompt.text for prompt in pipeline.source.take(count)]
        texts.write_text(json.dumps(taken))
    tell()
    for number, _ in enumerate(sys.stdin, start=1):
        began = time.perf_counter()
        row = pipeline.step(number).report
        seconds = {stage.value: spent for stage, spent in row.seconds.items()}
        tell(seconds=time.perf_counter() - began, rollout=seconds["rollout"], train=seconds["train"])


def run_trl(options: argparse.Namespace) -> None:
    """GRPOTrainer, which waits for the driver before each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cache = Path(os.environ.get("LEADOUT_CACHE", Path.home() / ".cache" / "leadout"))
    path = cache / "models" / "smollm2-135m"
    torch.set_num_threads(2)
    low = options.side == "trl-bf16"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if low else torch.float32)
    prompts = json.loads((options.folder / "prompts.json").read_text())
    rows = options.prompts * options.generations
    config = GRPOConfig(
        output_dir=str(options.folder / options.side),
        per_device_train_batch_size=rows,
        num_generations=options.generations,
        max_completion_length=options.tokens,
        generation_kwargs={"min_new_tokens": options.tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        bf16=not low,
        use_cpu=True,
        max_steps=options.steps + 1,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            sys.stdin.readline()
            self.began = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            tell(seconds=time.perf_counter() - self.began)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[Turns()],
    )
    tell()
    trainer.train()


if __name__ == "__main__":
    main()
