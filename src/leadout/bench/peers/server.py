"""Runs one engine for the bench: JSON lines in on standard input, JSON lines out on standard output.

    python -I server.py vllm|hf

A program of its own: it may run in an environment that has the engine and nothing else, so it imports no other module
of this project. Requests, each answered by one line:

    {"op": "load", "model": folder, "max_len": n, "max_rows": n, "kv_bytes": n, "threads": n}
                                             -> {"ok": true, "version": "..."}
    {"op": "generate", "prompts": [[id, ...], ...], "new_tokens": [n, ...], "seed": n}
                                             -> {"ok": true, "seconds": s, "lengths": [n, ...]}
    {"op": "stop"}                           -> {"ok": true}, then the program ends

Tokens are sampled at temperature 1 without filters, end-of-sequence tokens are ignored. `seconds` is the engine's own
call, without the JSON around it. What an engine refuses is answered by {"ok": false, "error": "..."}; any other error
ends the program. Whatever engines print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, Protocol

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Engine(Protocol):
    """What the loop needs."""

    def generate(self, prompts: list[list[int]], new_tokens: list[int], seed: int) -> tuple[float, list[int]]:
        """Seconds, and how many tokens each row got."""
        ...


class VllmEngine:
    """vLLM, compiled, with automatic settings but for what the comparison fixes."""

    def __init__(self, message: dict[str, Any]) -> None:
        import vllm

        self.version = str(vllm.__version__)
        self._vllm = vllm
        self._engine = vllm.LLM(
            model=message["model"],
            dtype="bfloat16",
            max_model_len=message["max_len"],
            max_num_seqs=message["max_rows"],
            kv_cache_memory_bytes=message["kv_bytes"],
            # The same prompts come again and again, which no real run does.
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, prompts: list[list[int]], new_tokens: list[int], seed: int) -> tuple[float, list[int]]:
        """All rows at once; the engine draws from its own seeded generator."""
        params = [
            self._vllm.SamplingParams(
                temperature=1.0, top_p=1.0, top_k=0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in new_tokens
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        began = time.perf_counter()
        outputs = self._engine.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, [len(output.outputs[0].token_ids) for output in outputs]


class HfEngine:
    """`model.generate` of transformers in bfloat16."""

    def __init__(self, message: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(message["threads"])
        self.version = str(transformers.__version__)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            message["model"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._config = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0
        )
        self._model.generation_config = self._config

    def generate(self, prompts: list[list[int]], new_tokens: list[int], seed: int) -> tuple[float, list[int]]:
        """Prompts of one length; every row runs as long as the longest."""
        torch = self._torch
        ids = torch.tensor(prompts, dtype=torch.int64)
        torch.manual_seed(seed)
        began = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(new_tokens)
            )
        seconds = time.perf_counter() - began
        return seconds, [int(out.shape[1] - ids.shape[1])] * len(prompts)


ENGINES = {"vllm": VllmEngine, "hf": HfEngine}


def serve(make: Any) -> None:
    """Answer until told to stop or nobody asks any more."""
    if sys.platform == "linux":
        # A stopped process would not notice that the bench was killed; the kernel does.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {"ok": True}
        try:
            if message["op"] == "load":
                engine = make(message)
                answer["version"] = engine.version
            elif message["op"] == "generate":
                seconds, lengths = engine.generate(message["prompts"], message["new_tokens"], message["seed"])
                answer |= {"seconds": seconds, "lengths": lengths}
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if message["op"] == "stop":
            return


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]])
