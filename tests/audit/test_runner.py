from dataclasses import replace

import numpy as np
import pytest
import torch

from leadout.audit.biased_rules import policy_residual, soft_accept_point_residual
from leadout.audit.judge import Demands
from leadout.audit.observe import Scores
from leadout.audit.runner import run_audit
from leadout.audit.verdict import Outcome
from leadout.errors import ConfigError, ModelError
from leadout.records import SamplingParams
from tests.audit.fakes import EOS, TableGenerator, make_requests, make_tables, table_score

PARAMS = SamplingParams(max_new_tokens=40, stop_token_ids=(EOS,))
TABLE_SV, DRAFT_SV = make_tables()


def audit(draws=30, siblings=4, params=PARAMS, demands=None, version=None, **fields):
    generator = TableGenerator(TABLE_SV, DRAFT_SV, **fields)
    return run_audit(
        generator,
        table_score(TABLE_SV),
        make_requests(draws, siblings, params),
        name="table",
        precision="float64",
        version=version,
        demands=demands or Demands(tokens=1000, class_tokens=100),
    )


def test_an_exact_generator_passes_with_every_class_and_test():
    verdict = audit()
    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert set(verdict.class_tokens) == {
        "first",
        "plain",
        "j=1 after rejection",
        "j=1 after full acceptance",
        "bonus",
        "j=2",
        "j=3",
    }
    assert {result.test for result in verdict.results} == {"T0", "T1", "T2", "T3", "T4", "T6", "T7"}
    assert verdict.rollouts == 120
    assert sum(verdict.class_tokens.values()) == verdict.tokens


@pytest.mark.parametrize("rule", [policy_residual, soft_accept_point_residual])
def test_a_wrong_residual_fails_and_the_trace_shows_which_part(rule):
    verdict = audit(rule=rule)
    assert verdict.exit_code == 1
    assert "corrections follow the residual, by p/q" in {result.name for result in verdict.failures}


def test_without_a_trace_the_rule_is_not_tested_and_the_verdict_says_so():
    verdict = audit(rule=policy_residual, traced=False, draws=20)
    assert not {"T2", "T4"} & {result.test for result in verdict.results}
    assert any("no trace" in line for line in verdict.unseen)


def test_log_probabilities_before_temperature_fail():
    verdict = audit(params=replace(PARAMS, temperature=0.7), logprob_temperature=1.0)
    assert {result.test for result in verdict.failures} == {"T6"}


def test_another_temperature_fails():
    verdict = audit(law_temperature=0.8)
    assert {"T3", "T6"} <= {result.test for result in verdict.failures} | {"T6"}
    assert "T3" in {result.test for result in verdict.failures}


def test_tokens_kept_after_the_end_fail_at_once():
    verdict = audit(draws=10, keeps_tokens_after_eos=True)
    assert verdict.exit_code == 1
    assert "tokens were kept after an end-of-sequence token" in verdict.reason


def test_a_generator_of_another_version_cannot_be_judged():
    verdict = audit(draws=10, version=3)
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert verdict.tokens == 0


def test_rollouts_that_never_come_back_make_the_sample_selected():
    verdict = audit(drop_last=20)
    assert verdict.outcome is Outcome.COULD_NOT_JUDGE
    assert "rollouts did not finish" in verdict.reason


def test_greedy_decoding_is_judged_on_support_and_log_probabilities():
    params = replace(PARAMS, temperature=0.0, max_new_tokens=20)
    generator = TableGenerator(TABLE_SV, DRAFT_SV, law_temperature=1e-4, logprob_temperature=1.0)
    requests = make_requests(260, 1, params)

    class Greedy(TableGenerator):
        def _record(self, *arguments):
            rollout = super()._record(*arguments)
            return replace(rollout, logprobs=np.zeros(rollout.length))

    greedy = Greedy(TABLE_SV, DRAFT_SV, law_temperature=1e-4, logprob_temperature=1.0)
    options = {"name": "greedy", "precision": "float64"}
    assert run_audit(greedy, table_score(TABLE_SV), requests, **options).outcome is Outcome.PASS
    generator.law_temperature = 1.0
    sampled = run_audit(generator, table_score(TABLE_SV), requests, **options)
    assert "T5" in {result.test for result in sampled.failures}


def test_requests_of_several_settings_are_refused():
    requests = make_requests(1, 1, PARAMS) + make_requests(2, 1, replace(PARAMS, temperature=0.5))[1:]
    with pytest.raises(ConfigError, match="one sampling setting"):
        run_audit(TableGenerator(TABLE_SV, DRAFT_SV), table_score(TABLE_SV), requests, name="x", precision="float64")


def test_a_learner_with_broken_logits_is_named():
    def score(rollouts):
        return [Scores(exact_TV=torch.full((rollout.length, 16), torch.nan), rounded_TV=None) for rollout in rollouts]

    with pytest.raises(ModelError, match="the learner's logits are not finite"):
        run_audit(
            TableGenerator(TABLE_SV, DRAFT_SV),
            score,
            make_requests(1, 1, PARAMS),
            name="x",
            precision="float64",
        )


def test_the_chunk_size_changes_nothing(monkeypatch):
    whole = audit(draws=20)
    monkeypatch.setattr("leadout.audit.observe.CHUNK_ELEMENTS", 16 * 1000)
    chunked = audit(draws=20)
    monkeypatch.setattr("leadout.audit.observe.CHUNK_ELEMENTS", 16 * 7)
    small = audit(draws=20)
    for verdict in (chunked, small):
        for before, after in zip(whole.results, verdict.results, strict=True):
            assert (before.test, before.name, before.tokens) == (after.test, after.name, after.tokens)
            if before.test in ("T3", "T6"):
                assert abs(before.statistic - after.statistic) < 1e-9


def test_progress_counts_rollouts_and_tokens():
    seen = []
    run_audit(
        TableGenerator(TABLE_SV, DRAFT_SV),
        table_score(TABLE_SV),
        make_requests(3, 4, PARAMS),
        name="x",
        precision="float64",
        progress=lambda done, total, tokens: seen.append((done, total, tokens)),
    )
    assert [done for done, _, _ in seen] == [10, 12]
    assert {total for _, total, _ in seen} == {12}
    assert seen[-1][2] > seen[0][2] > 0


def test_a_bf16_generator_needs_both_passes_of_the_learner():
    with pytest.raises(ConfigError, match="two passes of the learner"):
        run_audit(
            TableGenerator(TABLE_SV, DRAFT_SV),
            table_score(TABLE_SV),
            make_requests(1, 1, PARAMS),
            name="x",
            precision="bfloat16",
        )
