"""False alarms and power of the audit on the synthetic policy.

    python benchmarks/audit_power.py false-alarms --audits 20000
    python benchmarks/audit_power.py power --audits 20

`false-alarms` judges that many independent audits of a correct generator (sampled drafts, point-mass drafts, and
sampled drafts under temperature and top-p, in turn) and counts failures; at the declared level of 2e-4 per audit,
20,000 audits fail four times on average and more than eight times with a chance of 2 %.

`power` prints, for every injected bias, the share of audits that fail at several sample sizes, and by which tests.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace

import torch

from leadout.audit.biased_rules import BIASED, exact, greedy_point, point_mass, second_chance
from leadout.audit.judge import Demands, judge
from leadout.audit.synthetic import Setup
from leadout.audit.synthetic_audits import samples
from leadout.audit.verdict import Outcome, Verdict
from leadout.records import SamplingParams

DEMANDS = Demands(tokens=1, class_tokens=1, temperature_error=100.0)
CORRECT = {
    "sampled drafts, T=1": Setup(num_rollouts=24),
    "point-mass drafts, T=1": Setup(num_rollouts=24, rule=greedy_point, point_drafts=True),
    "sampled drafts, T=0.7, top-p 0.8": Setup(num_rollouts=24, params=SamplingParams(temperature=0.7, top_p=0.8)),
}
BATCH = 500


def verdicts(setup: Setup, num_audits: int, seed: int) -> list[Verdict]:
    return [judge(sample, "synthetic", "bfloat16", DEMANDS) for sample in samples(setup, num_audits, seed)]


def false_alarms(num_audits: int) -> None:
    started, done, failed, names = time.perf_counter(), 0, 0, list(CORRECT)
    classes: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    batch = 0
    while done < num_audits:
        size = min(BATCH, num_audits - done)
        for verdict in verdicts(CORRECT[names[batch % len(names)]], size, seed=10_000 + batch):
            classes.update(verdict.class_tokens)
            tests.update({result.test for result in verdict.results})
            failed += verdict.outcome is Outcome.FAIL
            causes.update(f"{result.test} {result.name}, {result.class_name}" for result in verdict.failures)
        done, batch = done + size, batch + 1
    print(f"{done} audits, {failed} failures, {time.perf_counter() - started:.0f} s")
    print("tests run:", ", ".join(f"{name} {count}" for name, count in sorted(tests.items())))
    print("tokens by class:", ", ".join(f"{name} {count}" for name, count in classes.items()))
    for cause, count in causes.most_common():
        print(f"  {count} x {cause}")


def biased() -> dict[str, Setup]:
    base = Setup()
    cases = {name: replace(base, rule=rule) for name, rule in BIASED.items()}
    cases["point draft with a second chance"] = replace(base, rule=second_chance, point_drafts=True)
    cases["temperature 0.98"] = replace(base, true_temperature=0.98)
    cases["temperature 0.95"] = replace(base, true_temperature=0.95)
    cases["stale cache after a rejection"] = replace(base, stale_after_rejection=True)
    cases["bonus from the position before"] = replace(base, wrong_bonus=True)
    cases["same noise for siblings"] = replace(base, shared_noise=True)
    cases["(harmless) sampled draft as point mass"] = replace(base, rule=point_mass, traced=False)
    cases["(harmless) drafter unrelated to the policy"] = replace(base, rule=exact, draft_noise=4.0)
    return cases


def power(num_audits: int) -> None:
    print("| bias | 600 tokens | 2,500 | 10,000 | 40,000 | found by |")
    print("|---|---|---|---|---|---|")
    for name, setup in biased().items():
        shares, by = [], Counter[str]()
        for num_rollouts in (32, 128, 512, 2048):
            found = verdicts(replace(setup, num_rollouts=num_rollouts), num_audits, seed=7)
            failed = [verdict for verdict in found if verdict.outcome is Outcome.FAIL]
            shares.append(f"{len(failed)}/{num_audits}")
            by.update(test for verdict in failed for test in {result.test for result in verdict.failures})
        print(f"| {name} | {' | '.join(shares)} | {', '.join(sorted(by)) or '-'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("false-alarms", "power"))
    parser.add_argument("--audits", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "power":
        power(arguments.audits)
    else:
        false_alarms(arguments.audits)


if __name__ == "__main__":
    main()
