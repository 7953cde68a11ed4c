from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from leadout.drafters.history import HistoryDrafter, longest_matches, majority
from leadout.drafters.history_store import BORDER, HistoryStore
from leadout.errors import ConfigError
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.rollout.fakes import generate, make_engine, make_requests, markov_table, sequences

CPU = torch.device("cpu")
TABLE = markov_table(scale=2.0)


class NoNoise:
    def draft_uniforms(self, depth: int) -> torch.Tensor:
        raise AssertionError("looked-up drafts need no numbers")


def request(draw: int, sibling: int = 0, prompt: tuple[int, ...] = (50, 51), name: str = "p") -> Request:
    made = Prompt(id=name, token_ids=np.array(prompt, np.int32), text="")
    return Request(rollout_id=RolloutId(draw, sibling), prompt=made, params=SamplingParams())


def say(drafter: HistoryDrafter, slot: int, *tokens: int) -> None:
    drafter.observe([slot], torch.tensor([tokens]), np.array([len(tokens)]), None)


def drafts(drafter: HistoryDrafter, slot: int, limit: int = 3) -> list[int]:
    draft = drafter.propose([slot], np.array([limit]), NoNoise())
    assert draft.probs is None
    return draft.tokens_BK[0, : draft.counts_B[0]].tolist()


def finished(*texts: tuple[int, ...], **options: int) -> HistoryDrafter:
    """A drafter after rollouts of one prompt with these texts."""
    drafter = HistoryDrafter(num_slots=4, max_len=64, device=CPU, **options)
    for draw, text in enumerate(texts):
        drafter.admit([0], [request(draw)], None)
        say(drafter, 0, *text)
        drafter.release([0])
    return drafter


def test_a_new_row_is_drafted_from_the_beginning_of_earlier_answers():
    drafter = finished((1, 2, 3, 4, 1, 9))
    drafter.admit([1], [request(7)], None)
    say(drafter, 1, 1)
    assert drafts(drafter, 1) == [2, 3, 4]


def test_the_longest_match_decides_not_the_latest():
    drafter = finished((1, 2, 3, 30), (8, 3, 40))
    drafter.admit([1], [request(7)], None)
    say(drafter, 1, 1, 2, 3)
    assert drafts(drafter, 1) == [30]


def test_most_occurrences_decide_and_the_latest_breaks_ties():
    drafter = finished((5, 6, 20), (5, 6, 20), (5, 6, 21))
    drafter.admit([1], [request(7)], None)
    say(drafter, 1, 5, 6)
    assert drafts(drafter, 1) == [20]
    assert majority(np.array([[1, 7], [2, 8]])).tolist() == [2, 8]


def test_drafts_never_run_from_one_answer_into_the_next():
    drafter = finished((1, 2), (3, 4, 5))
    drafter.admit([1], [request(7)], None)
    say(drafter, 1, 1)
    assert drafts(drafter, 1) == [2]


def test_the_rows_own_text_is_looked_up_too():
    drafter = finished()
    drafter.admit([0], [request(0, prompt=(7, 8, 9, 7))], None)
    say(drafter, 0, 8)
    assert drafts(drafter, 0) == [9, 7, 8]


def test_a_row_without_a_match_drafts_nothing():
    drafter = finished((1, 2, 3))
    drafter.admit([0], [request(9)], None)
    say(drafter, 0, 33)
    assert drafts(drafter, 0) == []


def test_a_match_shorter_than_asked_for_drafts_nothing():
    drafter = finished((10, 1, 2, 3, 4), min_match=3)
    drafter.admit([0], [request(9)], None)
    say(drafter, 0, 1, 2)
    assert drafts(drafter, 0) == []
    say(drafter, 0, 3)
    assert drafts(drafter, 0) == [4]


def test_other_prompts_share_nothing():
    drafter = finished((1, 2, 3))
    drafter.admit([0], [request(9, name="q")], None)
    say(drafter, 0, 1)
    assert drafts(drafter, 0) == []


def test_a_finished_sibling_helps_the_ones_still_running():
    drafter = HistoryDrafter(num_slots=4, max_len=64, device=CPU)
    drafter.admit([0, 1], [request(0, 0), request(0, 1)], None)
    say(drafter, 0, 1, 2, 3)
    say(drafter, 1, 1)
    assert drafts(drafter, 1) == []
    drafter.release([0])
    assert drafts(drafter, 1) == [2, 3]


def test_an_interrupted_rollout_is_kept_once_and_is_not_its_own_draft():
    drafter = finished((1, 2, 3))
    drafter.admit([0], [request(0)], None)
    say(drafter, 0, 1)
    assert drafts(drafter, 0) == []
    say(drafter, 0, 2, 3)
    drafter.release([0])
    assert drafter.store.text("p").tolist() == [BORDER, 1, 2, 3]


def test_a_restored_history_gives_the_same_drafts():
    drafter = finished((1, 2, 3), (4, 5, 6))
    restored = HistoryDrafter(num_slots=4, max_len=64, device=CPU)
    restored.load_state_dict(json.loads(json.dumps(drafter.state_dict())))
    restored.admit([0], [request(9)], None)
    say(restored, 0, 4)
    assert drafts(restored, 0) == [5, 6]


def test_weights_are_refused():
    with pytest.raises(ConfigError, match="takes no weights"):
        finished().load({"w": torch.zeros(1)}, 1)


def test_the_store_drops_the_oldest_rollouts_of_the_least_used_prompt():
    store = HistoryStore(max_tokens=10, max_rollouts=8)
    for draw in range(3):
        store.add("old", RolloutId(draw, 0), np.full(2, draw))
    store.add("new", RolloutId(5, 0), np.full(4, 7))
    assert store.num_tokens == 10
    store.start("old", RolloutId(9, 0))
    store.add("third", RolloutId(6, 0), np.full(1, 8))
    assert store.text("new").tolist() == []
    assert store.text("old").tolist() == [BORDER, 0, 0, BORDER, 1, 1, BORDER, 2, 2]
    assert store.num_tokens == 7


def test_the_store_keeps_the_newest_rollouts_of_a_prompt():
    store = HistoryStore(max_tokens=100, max_rollouts=2)
    for draw in range(4):
        store.add("p", RolloutId(draw, 0), np.array([draw]))
    assert store.text("p").tolist() == [BORDER, 2, BORDER, 3]


def test_a_rollout_larger_than_the_store_is_not_kept():
    store = HistoryStore(max_tokens=3, max_rollouts=2)
    store.add("p", RolloutId(0, 0), np.arange(4))
    assert (store.num_tokens, store.text("p").size) == (0, 0)


def test_matches_equal_those_of_a_slow_search():
    rng = np.random.default_rng(0)
    for _ in range(300):
        text, suffix = rng.integers(0, 3, rng.integers(0, 14)), rng.integers(0, 3, rng.integers(1, 8))
        best: tuple[int, list[int]] = (0, [])
        for size in range(1, len(suffix) + 1):
            ends = [e for e in range(size, len(text)) if text[e - size : e].tolist() == suffix[-size:].tolist()]
            if ends:
                best = (size, ends)
        size, ends = longest_matches(text, suffix)
        assert (size, ends.tolist()) == best


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_engine_emits_the_tokens_of_plain_decoding_and_a_second_epoch_accepts_more(temperature):
    def requests(first_draw: int):
        made = make_requests(3, 4, first_draw=first_draw, max_new_tokens=30, temperature=temperature)
        return [
            Request(
                rollout_id=r.rollout_id,
                prompt=Prompt(id=f"row/{i // 4}", token_ids=r.prompt.token_ids, text=""),
                params=r.params,
            )
            for i, r in enumerate(made)
        ]

    drafter = HistoryDrafter(num_slots=8, max_len=64, device=CPU)
    engine, _ = make_engine(TABLE, drafter=drafter, draft_length=3)
    plain, _ = make_engine(TABLE)
    accepted = []
    for epoch in range(2):
        speculative = generate(engine, requests(10 * epoch))
        assert sequences(speculative) == sequences(generate(plain, requests(10 * epoch)))
        accepted.append(sum(int(r.rounds.accepted.sum()) for r in speculative.values()))
    assert accepted[1] > accepted[0] > 0
    assert drafter.store.num_tokens == 24 * 30


def test_a_prompt_of_one_token_is_decoded_plainly():
    drafter = HistoryDrafter(num_slots=8, max_len=64, device=CPU, min_match=3)
    engine, _ = make_engine(TABLE, drafter=drafter, draft_length=3)
    (rollout,) = generate(engine, make_requests(1, prompt=(2,), max_new_tokens=3)).values()
    assert rollout.rounds.drafted.tolist() == [0, 0]
