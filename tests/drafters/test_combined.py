from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leadout.draft_length.controller import Choice
from leadout.draft_length.load import Load
from leadout.draft_length.source_choice import SourceChoice
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.records import RolloutId
from tests.rollout.fakes import TableDrafter, generate, make_engine, make_requests, markov_table, sequences

CPU = torch.device("cpu")
SLOTS = 16


def model_table(vocab_size: int = 6, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, dtype=torch.float64, generator=generator).softmax(-1)


def combined(model: TableDrafter, **options: object) -> CombinedDrafter:
    history = HistoryDrafter(num_slots=SLOTS, max_len=64, device=CPU)
    return CombinedDrafter(history, model, SourceChoice(8, **options), device=CPU)  # type: ignore[arg-type]


def exact_law(table: torch.Tensor, prompt: tuple[int, int], length: int) -> np.ndarray:
    """Probability of every continuation of this length, in the order of its tokens."""
    p = table.softmax(-1).numpy()
    law = []
    for tokens in itertools.product(range(table.shape[0]), repeat=length):
        text, total = [*prompt, *tokens], 1.0
        for i, token in enumerate(tokens):
            total *= p[text[i], text[i + 1], token]
        law.append(total)
    return np.array(law)


@pytest.mark.parametrize("reduced", [False, True])
def test_mixed_rounds_emit_whole_sequences_with_the_policys_law(reduced):
    vocab_size, length, num_rollouts = 3, 4, 6_000
    table = markov_table(vocab_size, seed=1, scale=1.5)
    q, ids = model_table(vocab_size), None
    if reduced:
        ids, q = torch.tensor([0, 2]), q[:, :2] / q[:, :2].sum(-1, keepdim=True)
    drafter = combined(TableDrafter(q, SLOTS, ids))
    mixed: list[bool] = []
    joined = drafter._joined

    def watched(*args):
        draft = joined(*args)
        mixed.append(draft.probs is not None and bool(draft.looked_up_B.any()))
        return draft

    drafter._joined = watched  # type: ignore[method-assign]
    engine, _ = make_engine(table, num_slots=SLOTS, drafter=drafter, draft_length=3)
    requests = make_requests(num_rollouts // 8, 8, prompt=(0, 1), max_new_tokens=length)
    rollouts = generate(engine, requests)
    codes = [int("".join(map(str, r.token_ids)), vocab_size) for r in rollouts.values()]
    expected = exact_law(table, (0, 1), length) * num_rollouts
    counts = np.bincount(codes, minlength=vocab_size**length)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-6
    assert sum(mixed) > 100
    assert sum(int(r.rounds.accepted.sum()) for r in rollouts.values()) > num_rollouts / 4


def test_with_a_greedy_model_tokens_are_those_of_plain_decoding():
    table = markov_table()
    requests = make_requests(4, 4, max_new_tokens=30)
    engine, _ = make_engine(
        table, num_slots=SLOTS, drafter=combined(TableDrafter(model_table(), SLOTS, greedy=True)), draft_length=3
    )
    plain, _ = make_engine(table, num_slots=SLOTS)
    assert sequences(generate(engine, requests)) == sequences(generate(plain, requests))


def test_the_model_is_asked_only_for_rows_without_a_match():
    model = TableDrafter(model_table(20), SLOTS)
    asked: list[list[int]] = []
    propose = model.propose
    model.propose = lambda slots, lengths, noise: (asked.append(list(slots)), propose(slots, lengths, noise))[1]  # type: ignore[method-assign]
    drafter = combined(model)
    requests = make_requests(1, 2, prompt=(7, 8, 7))
    drafter.admit([0, 1], requests, None)
    drafter.observe([0, 1], torch.tensor([[8], [11]]), np.array([1, 1]), None)

    class Numbers:
        def draft_uniforms(self, depth: int) -> torch.Tensor:
            return torch.tensor([0.1, 0.9], dtype=torch.float64)

    draft = drafter.propose([0, 1], np.array([2, 2]), Numbers())
    assert asked == [[1]]
    assert draft.looked_up_B.tolist() == [True, False]
    assert draft.tokens_BK[0].tolist() == [7, 8]
    assert draft.counts_B.tolist() == [2, 2]
    q = model_table(20)
    torch.testing.assert_close(draft.probs.values_BKV[1, 0], q[11])
    assert draft.tokens_BK[1, 0] == int((q[11].cumsum(-1) <= 0.9).sum())


def test_a_trace_of_a_mixed_rollout_is_over_the_whole_vocabulary():
    table, q = markov_table(), model_table()
    ids = torch.tensor([0, 2, 3, 5])
    q = q[:, ids] / q[:, ids].sum(-1, keepdim=True)
    engine, _ = make_engine(table, num_slots=SLOTS, drafter=combined(TableDrafter(q, SLOTS, ids)), draft_length=3)
    rollouts = generate(engine, make_requests(4, 4, max_new_tokens=24, trace=True))
    kinds = set()
    for rollout in rollouts.values():
        trace = rollout.trace
        assert trace is not None and trace.probs_DV is not None and trace.token_ids_V is None
        np.testing.assert_allclose(trace.probs_DV.sum(-1), 1.0, atol=1e-9)
        assert (trace.draft_prob_D == trace.probs_DV[np.arange(len(trace.draft_D)), trace.draft_D]).all()
        kinds |= set((trace.probs_DV.max(-1) == 1.0).tolist())
        assert not trace.probs_DV[trace.probs_DV.max(-1) < 1.0][:, [1, 4]].any()
    assert kinds == {True, False}


def test_rounds_say_which_drafts_were_looked_up_and_go_on_saying_it():
    table, drafter = markov_table(), combined(TableDrafter(model_table(), SLOTS))
    engine, _ = make_engine(table, num_slots=SLOTS, drafter=drafter, draft_length=3)
    rollouts = list(generate(engine, make_requests(4, 4, max_new_tokens=24, trace=True)).values())
    for rollout in rollouts:
        rounds, trace = rollout.rounds, rollout.trace
        assert trace is not None and trace.probs_DV is not None and rounds.looked_up is not None
        drafted_D = rounds.looked_up[trace.round_D]
        assert (drafted_D == (trace.probs_DV.max(-1) == 1.0)).all()
    first = rollouts[0]
    (request,) = make_requests(1, max_new_tokens=36)
    more = replace(request, rollout_id=first.request_id, prompt=first.prompt, given=replace(first, trace=None))
    longer = generate(engine, [more])[first.request_id].rounds
    count = len(first.rounds.drafted)
    assert (longer.looked_up[:count] == first.rounds.looked_up).all()


def test_measurements_and_history_survive_a_resume():
    table, drafter = markov_table(), combined(TableDrafter(model_table(), SLOTS))
    engine, _ = make_engine(table, num_slots=SLOTS, drafter=drafter, draft_length=3, history=drafter)
    generate(engine, make_requests(4, 4, max_new_tokens=24))
    state = json.loads(json.dumps(engine.state_dict()))
    restored = combined(TableDrafter(model_table(), SLOTS))
    again, _ = make_engine(table, num_slots=SLOTS, drafter=restored, draft_length=3, history=restored)
    again.load_state_dict(state)
    assert again.state_dict() == engine.state_dict()
    requests = make_requests(4, 4, first_draw=4, max_new_tokens=24)
    assert sequences(generate(again, requests)) == sequences(generate(engine, requests))
    assert RolloutId(0, 0) not in {r.rollout_id for r in requests}


class Prefix:
    """A probe every round: only the first row is asked for drafts."""

    def choose(self, rows, load=Load):
        return Choice(2, 1)

    def record(self, outcome):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_what_a_probe_of_few_rows_finds_is_learnt():
    drafter = combined(TableDrafter(model_table(), SLOTS))
    engine, _ = make_engine(markov_table(6), num_slots=SLOTS, drafter=drafter, draft_length=Prefix())
    rollouts = generate(engine, make_requests(2, 4, max_new_tokens=20))
    probed = sum(int(np.count_nonzero(rollout.rounds.drafted)) for rollout in rollouts.values())
    counts = drafter.state_dict()["choice"]
    learnt = sum(entry["drafting"] for source in ("looked_up", "model") for entry in counts[source])
    assert probed > 10
    assert learnt == pytest.approx(probed, rel=0.05)
