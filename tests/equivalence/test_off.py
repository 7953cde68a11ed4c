"""Off is off: with no drafts, the forward passes are those of an engine without a drafter, and the drafter rests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from leadout.draft_length.controller import FixedLength, GoodputLength, RoundOutcome
from leadout.draft_length.costs import CostProfile
from tests.equivalence.tiny_engines import (
    MAX_LEN,
    drafted,
    eagle3_drafter,
    eagle3_head,
    engine,
    generate,
    history_drafter,
    ngram_drafter,
    ragged_requests,
    small_drafter,
    tokens_of,
    with_history,
)

NAMES = ["ngram", "history", "eagle3", "parallel", "mtp", "small", "history+eagle3", "history+small"]


def make_drafter(name, llama, fused):
    if name.startswith("history+"):
        return with_history(make_drafter(name.removeprefix("history+"), llama, fused), 16)
    if name == "small":
        return small_drafter(llama, 16)
    if name in ("eagle3", "parallel", "mtp"):
        return eagle3_drafter(eagle3_head(llama, kind=name), fused, 16)
    return {"ngram": ngram_drafter, "history": history_drafter}[name](16)


def never_pays(rows: int = 16) -> GoodputLength:
    """Chooses every round; drafts cost more than a plain step, and it has learnt so: it has just probed again."""
    length = GoodputLength(5, CostProfile({1: 1.0, 64: 64.0}, {1: 1.5}, frozen=True))
    for rounds in itertools.count():
        choice = length.choose(rows)
        asks_B = np.arange(rows) < (choice.num_rows if choice.num_drafts else 0)
        length.record(
            RoundOutcome(
                num_drafts=choice.num_drafts,
                num_asked=int(asks_B.sum()),
                drafted_B=np.where(asks_B, choice.num_drafts, 0),
                accepted_B=np.zeros(rows, np.int64),
                draft_seconds=0.0,
                verify_seconds=0.0,
            )
        )
        if rounds >= 300 and choice.num_drafts:
            return length
    raise AssertionError("it never probes")


OFF = {"k = 0": lambda: FixedLength(0), "auto": never_pays}


class Calls:
    """Counts what the policy and the drafter are asked for."""

    def __init__(self, monkeypatch, fused, drafter) -> None:
        self.widths: list[tuple[int, ...]] = []
        self.heads: list[int] = []
        self.proposals = 0
        forward, logits = fused.forward, fused.logits

        def counted_forward(tokens_BN, *others, **named):
            self.widths.append(tuple(tokens_BN.shape))
            return forward(tokens_BN, *others, **named)

        def counted_logits(hidden_XH):
            self.heads.append(len(hidden_XH))
            return logits(hidden_XH)

        monkeypatch.setattr(fused, "forward", counted_forward)
        monkeypatch.setattr(fused, "logits", counted_logits)
        if drafter is not None:
            propose = drafter.propose

            def counted_propose(*arguments):
                self.proposals += 1
                return propose(*arguments)

            monkeypatch.setattr(drafter, "propose", counted_propose)


def run_counted(fused, drafter, draft_length, requests):
    with pytest.MonkeyPatch.context() as patched:
        calls = Calls(patched, fused, drafter)
        return generate(engine(fused, drafter, draft_length), requests), calls


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("name", NAMES)
def test_while_off_the_policy_runs_as_often_as_without_a_drafter_and_the_drafter_not_at_all(llama, fused, name, off):
    requests = ragged_requests(4, 4, temperature=0.7, max_new_tokens=14, seed=2)
    plain, plainly = run_counted(fused, None, 0, requests)
    drafter = make_drafter(name, llama, fused)
    rollouts, calls = run_counted(fused, drafter, OFF[off](), requests)
    assert calls.widths == plainly.widths and calls.heads == plainly.heads
    assert len(calls.widths) >= 14
    assert calls.proposals == 0
    assert drafted(rollouts) == 0
    assert tokens_of(rollouts) == tokens_of(plain)


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("name", ["eagle3", "parallel", "mtp"])
def test_while_off_a_head_is_never_run(llama, fused, name, off):
    drafter = eagle3_drafter(eagle3_head(llama, kind=name), fused, 16)
    entries = []
    for module in drafter._head.modules():
        module.register_forward_hook(lambda *_: entries.append(1))
    requests = ragged_requests(4, 2, temperature=0.7, max_new_tokens=14, seed=2)
    generate(engine(fused, drafter, OFF[off]()), requests)
    assert entries == []
    generate(engine(fused, drafter, FixedLength(2)), requests)
    assert entries, "the hooks do see a head that drafts"


def test_off_by_choice_asks_the_drafter_in_probes_only_and_in_at_most_two_of_a_hundred_rounds(llama, fused):
    length, drafter = never_pays(rows=1), make_drafter("eagle3", llama, fused)
    rounds, proposals = 0, 0
    for seed in range(12):
        requests = ragged_requests(1, 1, temperature=0.7, max_new_tokens=MAX_LEN - 2, seed=seed)
        rollouts, calls = run_counted(fused, drafter, length, requests)
        rounds += sum(rollout.rounds.drafted.size for rollout in rollouts.values())
        proposals += calls.proposals
    assert rounds > 1000
    assert 0 < proposals <= 0.02 * rounds
