import dataclasses

import numpy as np
import pytest
import torch

from leadout.errors import CapacityError, ConfigError, ModelError, RefitError
from leadout.records import Finish, RolloutId, Source, TensorSpec, WeightUpdate
from tests.rollout.fakes import (
    OracleDrafter,
    TableDrafter,
    generate,
    make_engine,
    make_requests,
    markov_table,
    sequences,
)

TABLE = markov_table()


def plain_rollouts(requests, **engine):
    return generate(make_engine(TABLE, **engine)[0], requests)


def oracle_for(rollouts, num_slots=8, wrong_from=10**9, vocab_size=6):
    """Drafts what plain decoding emitted, except that positions divisible by `wrong_from` are wrong."""

    def script(rollout_id: RolloutId, position: int) -> int:
        tokens = rollouts[rollout_id].token_ids
        token = int(tokens[position]) if position < tokens.size else 0
        return (token + 1) % vocab_size if position % wrong_from == wrong_from - 1 else token

    return OracleDrafter(script, num_slots)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("wrong_from", [2, 3, 10**9])
def test_point_mass_speculation_emits_the_tokens_of_plain_decoding(k, wrong_from):
    requests = make_requests(3, 2, max_new_tokens=13, stop_token_ids=(5,), seed=3)
    plain = plain_rollouts(requests)
    engine, _ = make_engine(TABLE, drafter=oracle_for(plain, wrong_from=wrong_from), draft_length=k)
    assert sequences(generate(engine, requests)) == sequences(plain)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_rollout_does_not_depend_on_the_batch_around_it(temperature):
    requests = make_requests(5, 3, max_new_tokens=9, stop_token_ids=(4,), temperature=temperature, seed=1)
    together = sequences(plain_rollouts(requests, num_slots=16))
    few_slots = sequences(plain_rollouts(requests, num_slots=2))
    alone = {r.rollout_id: sequences(plain_rollouts([r]))[r.rollout_id] for r in requests}
    assert together == few_slots == alone


def test_sampled_speculation_does_not_depend_on_the_batch_around_it():
    requests = make_requests(4, 2, max_new_tokens=9, stop_token_ids=(4,), seed=1)
    q = markov_table(seed=5)[0].softmax(-1)

    def run(some, num_slots):
        engine, _ = make_engine(TABLE, num_slots=num_slots, drafter=TableDrafter(q, num_slots), draft_length=3)
        return sequences(generate(engine, some))

    together = run(requests, 16)
    assert together == run(requests, 3) == {k: v for r in requests for k, v in run([r], 1).items()}


def test_the_same_seed_gives_the_same_tokens_and_another_seed_does_not():
    first = sequences(plain_rollouts(make_requests(4, 2, seed=7)))
    assert sequences(plain_rollouts(make_requests(4, 2, seed=7))) == first
    assert sequences(plain_rollouts(make_requests(4, 2, seed=8))) != first


def test_siblings_of_one_prompt_differ():
    rollouts = sequences(plain_rollouts(make_requests(1, 8, max_new_tokens=12)))
    assert len({tuple(tokens) for tokens in rollouts.values()}) == 8


@pytest.mark.parametrize("budget", range(1, 10))
def test_the_token_budget_is_exact_for_every_length(budget):
    requests = make_requests(2, 2, max_new_tokens=budget)
    plain = plain_rollouts(requests)
    engine, _ = make_engine(TABLE, drafter=oracle_for(plain), draft_length=3)
    speculative = generate(engine, requests)
    assert sequences(speculative) == sequences(plain)
    assert {r.length for r in speculative.values()} == {budget}
    assert {r.finish for r in speculative.values()} == {Finish.LENGTH}


def test_speculation_uses_the_context_to_its_last_token():
    requests = make_requests(1, 2, prompt=(0, 1, 2), max_new_tokens=50)
    plain = plain_rollouts(requests, max_len=20)
    engine, _ = make_engine(TABLE, max_len=20, drafter=oracle_for(plain), draft_length=8)
    speculative = generate(engine, requests)
    assert sequences(speculative) == sequences(plain)
    assert {(r.length, r.finish) for r in speculative.values()} == {(17, Finish.CONTEXT)}


def test_an_end_token_accepted_inside_a_block_cuts_the_rollout_and_its_counts():
    request = make_requests(1, max_new_tokens=12, seed=2)
    free = plain_rollouts(request)[RolloutId(0, 0)]
    end = int(free.token_ids[3])
    first = free.token_ids.tolist().index(end)
    stopped = make_requests(1, max_new_tokens=12, seed=2, stop_token_ids=(end,))
    engine, _ = make_engine(TABLE, drafter=oracle_for({RolloutId(0, 0): free}), draft_length=8)
    rollout = generate(engine, stopped)[RolloutId(0, 0)]
    assert rollout.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (rollout.finish, rollout.stop) == (Finish.EOS, end)
    assert rollout.rounds.accepted.sum() == first
    assert rollout.logprobs.tolist() == free.logprobs[: first + 1].tolist()


def test_stop_strings_end_a_rollout_at_the_token_that_completes_them():
    request = make_requests(1, max_new_tokens=20, seed=4)
    free = plain_rollouts(request)[RolloutId(0, 0)]
    text = "".join(chr(97 + t) for t in free.token_ids)
    stop = text[5:8]
    for k, drafter in ((0, None), (4, oracle_for({RolloutId(0, 0): free}))):
        engine, _ = make_engine(TABLE, drafter=drafter, draft_length=k)
        rollout = generate(engine, make_requests(1, max_new_tokens=20, seed=4, stop=(stop,)))[RolloutId(0, 0)]
        assert rollout.token_ids.tolist() == free.token_ids[: text.index(stop) + 3].tolist()
        assert (rollout.finish, rollout.stop) == (Finish.STOP, stop)


def test_an_always_wrong_drafter_gives_one_token_per_round_and_keeps_rows_apart():
    requests = make_requests(2, 1, max_new_tokens=6)
    plain = plain_rollouts(requests)
    engine, _ = make_engine(TABLE, drafter=oracle_for(plain, wrong_from=1), draft_length=2)
    speculative = generate(engine, requests)
    assert sequences(speculative) == sequences(plain)
    for rollout in speculative.values():
        assert rollout.rounds.accepted.tolist() == [0] * 5


def test_off_means_exactly_the_plain_path():
    requests = make_requests(2, 2)
    engine, decoder = make_engine(TABLE)
    generate(engine, requests)
    drafter = TableDrafter(markov_table()[0].softmax(-1), 8)
    off, off_decoder = make_engine(TABLE, drafter=drafter, draft_length=0)
    generate(off, requests)
    assert off_decoder.forward_widths == decoder.forward_widths
    assert drafter.calls == 0


def test_a_group_shares_the_prefill_of_its_prompt():
    engine, decoder = make_engine(TABLE)
    generate(engine, make_requests(1, 8, prompt=(0, 1, 2, 3)))
    assert decoder.forward_widths[0] == (1, 4)
    assert decoder.forward_widths[1] == (8, 1)


def test_finished_rows_make_room_for_waiting_ones():
    engine, decoder = make_engine(TABLE, num_slots=2)
    rollouts = generate(engine, make_requests(5, 1, max_new_tokens=4))
    assert len(rollouts) == 5
    assert max(batch for batch, _ in decoder.forward_widths) == 2


def test_long_prompts_are_prefilled_in_bounded_pieces():
    prompt = [i % 5 for i in range(30)]
    requests = make_requests(3, 2, prompt=prompt)
    engine, decoder = make_engine(TABLE, prefill_tokens=8)
    assert sequences(generate(engine, requests)) == sequences(plain_rollouts(requests))
    assert max(batch * width for batch, width in decoder.forward_widths) <= 8


LONG = [i % 5 for i in range(12)]


def test_a_long_prompt_is_filled_between_the_rounds_of_rows_that_decode():
    engine, decoder = make_engine(TABLE, prefill_tokens=64, prefill_chunk=4)
    running, late = make_requests(3, 1, max_new_tokens=20), make_requests(1, prompt=LONG, first_draw=9)
    engine.submit(running)
    assert engine.collect(timeout=0.0) == []
    engine.submit(late)
    found = sequences(generate(engine, []))
    assert decoder.forward_widths[2:9] == [(1, 4), (3, 1), (1, 4), (3, 1), (1, 4), (4, 1), (4, 1)]
    assert found == sequences(plain_rollouts([*running, *late]))


def test_a_batch_mostly_empty_is_filled_before_it_decodes():
    engine, decoder = make_engine(TABLE, prefill_tokens=8, prefill_chunk=4)
    engine.submit([request for draw in range(4) for request in make_requests(1, 1, prompt=[draw] * 8, first_draw=draw)])
    engine.collect()
    assert decoder.forward_widths[:4] == [(1, 8)] * 3 + [(1, 4)]


@pytest.mark.parametrize("running", ["finish", "cancel", "recompute"])
def test_prompts_half_filled_start_over_with_new_weights(running):
    engine, _ = make_engine(TABLE, prefill_tokens=64, prefill_chunk=4)
    late = make_requests(1, prompt=LONG, first_draw=9)
    engine.submit(make_requests(3, 1, max_new_tokens=20))
    engine.collect(timeout=0.0)
    engine.submit(late)
    engine.collect(timeout=0.0)
    engine.refit(update_with(TABLE, 1), running)
    found = generate(engine, [])
    assert found[RolloutId(9, 0)].spans[0].version == 1
    assert found[RolloutId(9, 0)].token_ids.tolist() == plain_rollouts(late)[RolloutId(9, 0)].token_ids.tolist()


def test_cancelling_a_prompt_half_filled_leaves_the_others_waiting():
    engine, _ = make_engine(TABLE, prefill_tokens=64, prefill_chunk=4)
    late = make_requests(2, prompt=LONG, first_draw=9)
    engine.submit(make_requests(6, max_new_tokens=20))
    engine.collect(timeout=0.0)
    engine.submit(late)
    engine.collect(timeout=0.0)
    assert [rollout.length for rollout in engine.cancel([RolloutId(9, 0)])] == [0]
    found = generate(engine, [])
    assert RolloutId(9, 0) not in found
    assert found[RolloutId(10, 0)].token_ids.tolist() == plain_rollouts(late)[RolloutId(10, 0)].token_ids.tolist()


def test_log_probabilities_are_those_of_the_law_the_token_was_drawn_from():
    requests = make_requests(1, 2, temperature=0.7, top_k=3, max_new_tokens=8)
    q = markov_table(seed=9)[0].softmax(-1)
    engine, _ = make_engine(TABLE, drafter=TableDrafter(q, 8), draft_length=3)
    for rollout in generate(engine, requests).values():
        context = [0, 1, *rollout.token_ids.tolist()]
        for position, token in enumerate(rollout.token_ids.tolist()):
            logits = TABLE[context[position], context[position + 1]] / 0.7
            kept = torch.where(logits >= logits.topk(3).values[-1], logits, -torch.inf)
            assert rollout.logprobs[position] == pytest.approx(float(kept.log_softmax(-1)[token]), abs=1e-9)
            assert rollout.policy_logprobs[position] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-9)


def test_greedy_rows_report_untempered_policy_log_probabilities():
    rollout = plain_rollouts(make_requests(1, temperature=0.0))[RolloutId(0, 0)]
    logits = TABLE[0, 1].log_softmax(-1)
    assert rollout.token_ids[0] == int(logits.argmax())
    assert rollout.policy_logprobs[0] == pytest.approx(float(logits.max()), abs=1e-9)
    assert rollout.logprobs[0] == 0.0


def test_mixed_temperatures_in_one_batch_leave_each_row_as_it_is_alone():
    temperatures = [0.0, 0.7, 0.0, 1.0]
    requests = [make_requests(1, first_draw=i, temperature=t)[0] for i, t in enumerate(temperatures)]
    together = sequences(plain_rollouts(requests))
    alone = {r.rollout_id: sequences(plain_rollouts([r]))[r.rollout_id] for r in requests}
    assert together == alone


def test_repetition_penalty_counts_the_drafts_of_the_round():
    requests = make_requests(2, 2, temperature=0.0, repetition_penalty=2.0, max_new_tokens=10, presence_penalty=0.3)
    plain = plain_rollouts(requests)
    engine, _ = make_engine(TABLE, drafter=oracle_for(plain, wrong_from=3), draft_length=4)
    assert sequences(generate(engine, requests)) == sequences(plain)
    assert sequences(plain) != sequences(plain_rollouts(make_requests(2, 2, temperature=0.0, max_new_tokens=10)))


def test_a_cancelled_rollout_continues_as_if_it_had_never_stopped():
    whole = plain_rollouts(make_requests(1, max_new_tokens=12))[RolloutId(0, 0)]
    engine, _ = make_engine(TABLE)
    request = make_requests(1, max_new_tokens=12)[0]
    engine.submit([request])
    engine.collect(timeout=0.0)
    (partial,) = engine.cancel([request.rollout_id])
    assert partial.finish is Finish.CANCELLED and 0 < partial.length < 12
    assert engine.collect() == []
    continued = make_requests(1, max_new_tokens=12)[0]
    object.__setattr__(continued, "given", partial)
    finished = generate(engine, [continued])[RolloutId(0, 0)]
    assert finished.token_ids.tolist() == whole.token_ids.tolist()
    assert finished.rounds.drafted.size == 11


def update_with(table: torch.Tensor, version: int) -> WeightUpdate:
    spec = TensorSpec(shape=tuple(table.shape), dtype="F64", crc32=0)
    return WeightUpdate(
        version=version, draft_version=0, manifest={"table": spec}, chunks=iter([("table", table)]), draft_spec=None
    )


def test_tokens_are_stamped_with_the_weights_that_made_them():
    engine, _ = make_engine(TABLE)
    request = make_requests(1, max_new_tokens=10)[0]
    engine.submit([request])
    engine.collect(timeout=0.0)
    engine.refit(update_with(markov_table(seed=1), 3), running="recompute")
    (rollout,) = engine.collect()
    assert [span.version for span in rollout.spans] == [0, 3]
    assert all(span.source is Source.POLICY for span in rollout.spans)
    assert rollout.versions.size == rollout.length == 10
    made_before = rollout.spans[0].length
    context = [0, 1, *rollout.token_ids.tolist()]
    new = markov_table(seed=1)
    for position in range(made_before, 10):
        expected = new[context[position], context[position + 1]].log_softmax(-1)[context[position + 2]]
        assert rollout.logprobs[position] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize(
    ("running", "finish", "length"), [("finish", Finish.LENGTH, 10), ("cancel", Finish.CANCELLED, 2)]
)
def test_refit_finishes_or_cancels_what_is_running(running, finish, length):
    engine, _ = make_engine(TABLE)
    engine.submit(make_requests(1, max_new_tokens=10))
    engine.collect(timeout=0.0)
    engine.refit(update_with(TABLE, 1), running=running)
    (rollout,) = engine.collect()
    assert (rollout.finish, rollout.length) == (finish, length)
    assert rollout.versions.tolist() == [0] * length


def test_keeping_stale_caches_over_a_refit_is_refused():
    engine, _ = make_engine(TABLE)
    with pytest.raises(RefitError, match="recompute"):
        engine.refit(update_with(TABLE, 1), running="keep_kv")


def test_a_prompt_that_fills_the_context_is_refused_with_its_size():
    engine, _ = make_engine(TABLE, max_len=8)
    with pytest.raises(CapacityError, match=r"has 8 tokens.*context of 8"):
        engine.submit(make_requests(1, prompt=[0] * 8))


@pytest.mark.parametrize("prompt", [[], [0, 99]])
def test_impossible_prompts_are_refused(prompt):
    engine, _ = make_engine(TABLE)
    with pytest.raises(ConfigError, match="row/0"):
        engine.submit(make_requests(1, prompt=prompt))


def test_an_id_in_flight_cannot_be_used_again():
    engine, _ = make_engine(TABLE)
    with pytest.raises(ConfigError, match="already being generated"):
        engine.submit(make_requests(1) + make_requests(1))


def test_a_trace_holds_every_verified_draft_with_its_probabilities():
    q = markov_table(seed=9)[0].softmax(-1)
    engine, _ = make_engine(TABLE, drafter=TableDrafter(q, 8), draft_length=3)
    (rollout,) = generate(engine, make_requests(1, max_new_tokens=9, trace=True)).values()
    trace = rollout.trace
    assert trace is not None and trace.probs_DV is not None
    drafted, accepted = rollout.rounds.drafted, rollout.rounds.accepted
    assert np.bincount(trace.round_D, weights=trace.accepted_D, minlength=drafted.size).tolist() == accepted.tolist()
    emitted = rollout.token_ids[trace.position_D]
    assert (emitted[trace.accepted_D] == trace.draft_D[trace.accepted_D]).all()
    assert (emitted[~trace.accepted_D] != trace.draft_D[~trace.accepted_D]).all()
    context = np.concatenate([[1], rollout.token_ids])
    for row, position in enumerate(trace.position_D):
        assert trace.probs_DV[row].tolist() == pytest.approx(q[context[position]].tolist(), abs=1e-6)
        assert trace.draft_prob_D[row] == trace.probs_DV[row, trace.draft_D[row]]


@pytest.mark.parametrize("finish", [Finish.EOS, Finish.STOP])
def test_a_rollout_that_ended_by_itself_is_not_continued(finish):
    done = plain_rollouts(make_requests(1, max_new_tokens=4))[RolloutId(0, 0)]
    given = dataclasses.replace(done, finish=finish)
    request = dataclasses.replace(make_requests(1, max_new_tokens=12)[0], given=given)
    assert generate(make_engine(TABLE)[0], [request])[RolloutId(0, 0)].token_ids.tolist() == done.token_ids.tolist()


def test_a_continuation_that_fills_the_context_ends_there():
    done = plain_rollouts(make_requests(1, max_new_tokens=6), max_len=8)[RolloutId(0, 0)]
    request = dataclasses.replace(make_requests(1, max_new_tokens=12)[0], given=done)
    over = generate(make_engine(TABLE, max_len=8)[0], [request])[RolloutId(0, 0)]
    assert (over.length, over.finish) == (6, Finish.CONTEXT)


def test_a_drafter_of_broken_weights_is_an_error_and_not_a_bias():
    engine, _ = make_engine(TABLE, drafter=TableDrafter(torch.full((6, 6), torch.nan), 8), draft_length=2)
    with pytest.raises(ModelError, match="not finite"):
        generate(engine, make_requests(1))
