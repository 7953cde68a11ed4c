import math
from dataclasses import replace

import pytest
import torch

from leadout.audit.training import TrainingAuditor, is_selected
from leadout.errors import AuditError
from leadout.records import Finish, SamplingParams, Source, Span
from tests.audit.fakes import EOS, TableGenerator, make_requests, make_tables, table_score
from tests.fakes import make_rollout

PARAMS = SamplingParams(max_new_tokens=40, stop_token_ids=(EOS,))
TABLE_SV, DRAFT_SV = make_tables()
SCORE = table_score(TABLE_SV)


def step(auditor, generator, first_draw, draws=20):
    requests = make_requests(first_draw + draws, 4, PARAMS)[first_draw * 4 :]
    generator.submit(requests)
    while rollouts := generator.collect():
        for rollout in rollouts:
            if auditor.select(rollout):
                auditor.observe(rollout, next(iter(SCORE([rollout]))).exact_TV)
    return auditor.finish_step()


def test_selection_depends_on_the_id_only_and_keeps_its_share():
    kept = [is_selected(draw, sibling, 0, 0.25) for draw in range(1000) for sibling in range(4)]
    assert 0.22 < sum(kept) / len(kept) < 0.28
    auditor = TrainingAuditor(PARAMS, precision="float64", share=0.25)
    for draw in range(20):
        short = make_rollout(draw, 1, tokens=(5, 2), drafted=(0,), accepted=(0,))
        long = make_rollout(draw, 1, tokens=(5, 6, 7, 2), drafted=(2,), accepted=(2,))
        assert auditor.select(short) == auditor.select(long) == is_selected(draw, 1, 0, 0.25)


def test_a_correct_run_goes_on_with_an_e_value_near_one():
    auditor = TrainingAuditor(PARAMS, precision="float64", share=1.0)
    generator = TableGenerator(TABLE_SV, DRAFT_SV, traced=False)
    for number in range(4):
        metrics = step(auditor, generator, 20 * number)
        assert metrics["audit/log_e"] < math.log(100.0)
        assert metrics["audit/outside"] == 0.0
        assert metrics["audit/logprob_rms"] < 1e-12
        assert metrics["audit/tokens"] > 500


def test_evidence_multiplies_over_steps_until_the_run_stops():
    auditor = TrainingAuditor(PARAMS, precision="float64", share=1.0)
    generator = TableGenerator(TABLE_SV, DRAFT_SV, law_temperature=0.9, traced=False)
    first = step(auditor, generator, 0)
    assert first["audit/log_e"] < math.log(1e4)
    assert first["audit/temperature_error"] < 0.0
    with pytest.raises(AuditError, match=r"expected tokens drawn at temperature 1\.0, got an e-value of"):
        for number in range(1, 30):
            step(auditor, generator, 20 * number)


def test_the_e_value_survives_a_resume():
    generator = TableGenerator(TABLE_SV, DRAFT_SV, law_temperature=0.95, traced=False)
    whole = TrainingAuditor(PARAMS, precision="float64", share=0.5)
    step(whole, generator, 0)
    resumed = TrainingAuditor(PARAMS, precision="float64", share=0.5)
    resumed.load_state_dict(whole.state_dict())
    assert step(whole, generator, 20) == step(resumed, generator, 20)


def test_a_step_without_audited_rollouts_reports_the_e_value_alone():
    auditor = TrainingAuditor(PARAMS, precision="bfloat16", share=0.1)
    assert auditor.finish_step() == {"audit/tokens": 0.0, "audit/log_e": 0.0}


def test_wrong_log_probabilities_warn_and_do_not_stop_the_run(caplog):
    auditor = TrainingAuditor(PARAMS, precision="float64", share=1.0)
    generator = TableGenerator(TABLE_SV, DRAFT_SV, logprob_temperature=0.5, traced=False)
    step(auditor, generator, 0)
    assert "log-probability: largest error" in caplog.text


def test_a_broken_record_stops_the_run():
    auditor = TrainingAuditor(PARAMS, precision="float64", share=1.0)
    rollout = make_rollout(tokens=(5, 6, 7), drafted=(0,), accepted=(0,))
    auditor.observe(rollout, torch.zeros(3, 16))
    with pytest.raises(AuditError, match="rounds account for 2 tokens"):
        auditor.finish_step()


@pytest.mark.parametrize(
    ("tokens", "finish", "stop"),
    [
        ((5, EOS), Finish.EOS, EOS),
        ((5, 6), Finish.STOP, "x"),
        ((5, 6), Finish.CONTEXT, None),
        ((5,) * 40, Finish.LENGTH, None),
        ((5, 6), Finish.CANCELLED, None),
        ((5, 6), Finish.ERROR, None),
        ((), Finish.CANCELLED, None),
    ],
)
def test_no_way_a_rollout_may_end_stops_a_run(tokens, finish, stop):
    auditor = TrainingAuditor(replace(PARAMS, stop=("x",)), precision="bfloat16", share=1.0)
    plain = [0] * max(len(tokens) - 1, 0)
    rollout = replace(make_rollout(tokens=tokens, drafted=plain, accepted=plain, finish=finish), stop=stop)
    auditor.observe(rollout, torch.zeros(len(tokens), 16))
    seen = 0.0 if finish in (Finish.CANCELLED, Finish.ERROR) else float(len(tokens))
    assert auditor.finish_step()["audit/tokens"] == seen


def test_a_rollout_continued_under_other_weights_is_left_out_of_the_sample():
    auditor = TrainingAuditor(PARAMS, precision="bfloat16", share=1.0)
    spans = (Span(length=1, source=Source.POLICY, version=0), Span(length=2, source=Source.POLICY, version=1))
    rollout = replace(make_rollout(tokens=(5, 6, EOS), drafted=(0, 0), accepted=(0, 0)), spans=spans, stop=EOS)
    auditor.observe(rollout, torch.zeros(3, 16))
    assert auditor.finish_step()["audit/tokens"] == 0.0


def test_a_rollout_whose_end_was_cut_off_stops_the_run():
    auditor = TrainingAuditor(PARAMS, precision="bfloat16", share=1.0)
    rollout = make_rollout(tokens=(5, 6), drafted=(0,), accepted=(0,), finish=Finish.LENGTH)
    auditor.observe(rollout, torch.zeros(2, 16))
    with pytest.raises(AuditError, match="ended by length after 2 tokens, 40 were asked for"):
        auditor.finish_step()


def test_only_every_nth_step_is_looked_at():
    auditor = TrainingAuditor(PARAMS, precision="float64", share=1.0, every=3)
    seen = []
    for _ in range(7):
        seen.append(auditor.select(make_rollout()))
        auditor.finish_step()
    assert seen == [True, False, False, True, False, False, True]
