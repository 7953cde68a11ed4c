"""Generates in vLLM with draft heads. Runs in vLLM's environment, so it imports vLLM and the standard library only.

    python -I peer.py ask.json answer.json

The question: {"jobs": [{"model": folder, "speculation": {...}, "prompts": [[id, ...], ...], "new_tokens": n,
"max_len": n, "kv_bytes": n}, ...]}. Temperature 0, float32, no end-of-sequence tokens, nothing compiled. The answer is
a list with one entry per job: {"error": text} where the engine refused, or else

    {"rows": [{"tokens": [...], "drafted": [per round], "accepted": [per round]}, ...], "counters": {name: value}}

`counters` are what `get_metrics` says of speculation: all rounds of the job, the last of each row uncut.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import vllm

_PREFIX = "vllm:spec_decode_"


def counters(engine: Any) -> dict[str, list[int]]:
    """Speculation so far, in this process."""
    return {
        metric.name.removeprefix(_PREFIX): list(getattr(metric, "values", None) or [getattr(metric, "value", 0)])
        for metric in engine.get_metrics()
        if metric.name.startswith(_PREFIX)
    }


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """One job, with an engine of its own."""
    engine = vllm.LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["max_len"],
        max_num_seqs=len(job["prompts"]),
        kv_cache_memory_bytes=job["kv_bytes"],
        speculative_config=job["speculation"],
        per_request_spec_decode_metrics="detailed",
        disable_log_stats=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    before = counters(engine)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    after = counters(engine)
    rows = []
    for output in outputs:
        (one,) = output.outputs
        rounds = one.spec_decode_metrics
        rows.append(
            {
                "tokens": list(one.token_ids),
                "drafted": list(rounds.per_step_drafted),
                "accepted": list(rounds.per_step_accepted),
            }
        )
    zeros = {name: [0] * len(values) for name, values in after.items()}
    before = zeros | before
    return {
        "rows": rows,
        "counters": {name: [a - b for a, b in zip(values, before[name])] for name, values in after.items()},
    }


def main() -> None:
    """Answer every job; a refused one does not end the others."""
    ask, answer = map(Path, sys.argv[1:])
    answers = []
    for job in json.loads(ask.read_text())["jobs"]:
        try:
            answers.append(generate(job))
        except (OSError, RuntimeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [""]
            answers.append({"error": f"{type(error).__name__}: {lines[-1]}"})
        gc.collect()
    answer.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
