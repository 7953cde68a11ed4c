"""Milliseconds of a plain decoding step (forward, head, law, draw) by batch, native and PyTorch operators in turn.

python benchmarks/decode_step.py [--batches 1,4,8,16,32,64] [--context 96] [--threads 2] [--repeats 9] [--only native]

On a busy machine wall clock says little; ``--threads 1 --clock cpu`` counts the time the thread was really running.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from leadout.models.decoder import FusedDecoder
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, read_config, resolve
from leadout.models.sampling import ParamsBatch
from leadout.models.spec import DecoderSpec
from leadout.records import SamplingParams
from leadout.rollout.sampler import Sampler

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,8,16,32,64")
    parser.add_argument("--widths", default="1", help="tokens per row and step")
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("native", "torch"))
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of this thread, with --threads 1"
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    torch.set_num_threads(options.threads)
    path = resolve("smollm2-135m")
    spec = DecoderSpec.from_config(read_config(path))
    tensors = dict(iter_weights(path))
    kinds = [options.only] if options.only else ["native", "torch"]
    decoders = {}
    for kind in kinds:
        decoders[kind] = FusedDecoder(
            spec, dtype=torch.bfloat16, max_len=options.context + 64, native=None if kind == "native" else False
        )
        decoders[kind].load(tensors)
    num_bytes = 2 * sum(tensor.numel() for tensor in tensors.values())
    print(f"{num_bytes / 1e6:.0f} MB of weights, {options.threads} threads, context {options.context}")
    print("batch  width  " + "  ".join(f"{kind:>8} least..median (forward/head/law+draw)" for kind in kinds))
    for batch in (int(b) for b in options.batches.split(",")):
        for width in (int(w) for w in options.widths.split(",")):
            kv = KVSlots(spec, batch, options.context + 64, torch.bfloat16)
            slots = kv.allocate(batch)
            kv.advance(slots, np.full(batch, options.context))
            times = {kind: [] for kind in kinds}
            for _ in range(options.repeats):
                for kind in kinds:
                    times[kind].extend(steps(decoders[kind], kv, slots, width, clock))
            print(f"{batch:5}  {width:5}  " + "  ".join(summary(times[kind]) for kind in kinds), flush=True)


def summary(rows: list[tuple[float, ...]]) -> str:
    whole = sorted(sum(row) for row in rows)
    parts = "/".join(f"{statistics.median(column) * 1e3:.2f}" for column in zip(*rows, strict=True))
    return f"{whole[0] * 1e3:8.2f}..{statistics.median(whole) * 1e3:.2f} ({parts})"


@torch.inference_mode()
def steps(
    decoder: FusedDecoder, kv: KVSlots, slots: list[int], width: int, clock: Callable[[], float]
) -> list[tuple[float, ...]]:
    sampler = Sampler(len(slots), decoder.spec.vocab_size, torch.device("cpu"))
    params = ParamsBatch.of([SamplingParams(temperature=1.0)] * len(slots))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoder.spec.vocab_size, (len(slots), width), generator=generator)
    uniforms = torch.rand(tokens.numel(), dtype=torch.float64, generator=generator)
    rows = []
    for step in range(STEPS + 1):
        marks = [clock()]
        states = decoder.forward(tokens, kv, slots)
        marks.append(clock())
        logits = decoder.logits(states.hidden_BNH.flatten(0, 1))
        marks.append(clock())
        tokens = sampler.laws(logits, params, slots, tokens).sampled.draw(uniforms).view(tokens.shape)
        marks.append(clock())
        if step:  # the first one after the other kind finds cold caches
            rows.append(tuple(b - a for a, b in itertools.pairwise(marks)))
    return rows


if __name__ == "__main__":
    main()
