"""Every fault of `leadout audit --list-faults`, in the engine, over many seeds.

    PYTHONPATH=. python benchmarks/audit_faults.py --seeds 20

The engine runs a tiny random model in bf16 with the `noisy_policy` drafter; the learner's passes are fp32 and bf16.
Prints how many seeds fail, and which tests find each fault. A fault must fail in at least 19 of 20 seeds, a harmless
change in none.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import torch
from tests.audit.tiny_engine import EOS, make_decoder, make_generator, make_requests, make_score

from leadout.audit.faults import Fault, faults
from leadout.audit.judge import Demands
from leadout.audit.runner import run_audit
from leadout.audit.verdict import Outcome, Verdict
from leadout.records import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--draws", type=int, default=80, help="prompt draws of four siblings; 100 tokens each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine, learner = make_decoder(torch.bfloat16), make_decoder(torch.float32)
    score = make_score(learner, engine)

    def audit(fault: Fault | None, seed: int) -> Verdict:
        setting = SamplingParams() if fault is None else fault.setting
        params = replace(setting, max_new_tokens=32, stop_token_ids=(EOS,), seed=seed)
        return run_audit(
            make_generator(engine, fault, params),
            score,
            make_requests(params, arguments.draws),
            name="tiny",
            precision="bfloat16",
            demands=Demands(tokens=1000, class_tokens=50, temperature_error=0.5),
            seed=seed,
        )

    print("| fault | fails | tokens | found by |")
    print("|---|---|---|---|")
    for fault in (None, *faults()):
        found = [audit(fault, seed) for seed in range(arguments.seeds)]
        failed = [verdict for verdict in found if verdict.outcome is Outcome.FAIL]
        by = Counter(test for verdict in failed for test in {result.test for result in verdict.failures})
        tests = ", ".join(f"{test} {count}" for test, count in sorted(by.items())) or "-"
        name = "(none)" if fault is None else f"({fault.name})" if fault.harmless else fault.name
        tokens = sum(verdict.tokens for verdict in found) // len(found)
        print(f"| {name} | {len(failed)}/{len(found)} | {tokens:,} | {tests} |", flush=True)


if __name__ == "__main__":
    main()
