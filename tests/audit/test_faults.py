"""The native engine over a tiny model: every fault fails the audit, the harmless changes pass."""

from dataclasses import replace

import pytest

from leadout.audit.faults import fault_named, faults
from leadout.audit.judge import Demands
from leadout.audit.runner import run_audit
from leadout.audit.verdict import Outcome
from leadout.errors import ConfigError
from leadout.records import SamplingParams
from tests.audit.tiny_engine import EOS, make_decoder, make_generator, make_parts, make_requests, make_score

DEMANDS = Demands(tokens=800, class_tokens=20, temperature_error=0.5)
TESTS = {
    "shared-uniform": "T4",
    "draft-noise-reused": "T4",
    "point-accept-soft-residual": "T2",
    "soft-accept-point-residual": "T2",
    "greedy-draft-soft-q": "T1",
    "one-token-residual": "T2",
    "policy-residual": "T2",
    "temperature-in-accept-only": "T3",
    "top-p-after-acceptance": "T5",
    "min-p-on-bonus-only": "T5",
    "penalty-ignores-drafts": "T6",
    "stale-cache": "T1",
    "position-off-by-one": "T1",
    "unmapped-q": "T4",
    "mixed-rows": "T1",
    "bonus-wrong-position": "T1",
    "logprobs-before-temperature": "T6",
    "own-confidence": "T1",
    "sibling-noise": "T7",
    "late-stop": "T0",
}


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


def audit(decoder, fault, num_draws, params=None):
    chosen = params or (fault.setting if fault else SamplingParams())
    chosen = replace(chosen, max_new_tokens=32, stop_token_ids=(EOS,), seed=3)
    return run_audit(
        make_generator(decoder, fault, chosen),
        make_score(decoder),
        make_requests(chosen, num_draws),
        name="tiny",
        precision="float32",
        demands=DEMANDS,
    )


def test_the_list_names_every_fault_once_with_its_setting():
    lines = [fault.line for fault in faults()]
    assert len({fault.name for fault in faults()}) == len(lines) == 24
    assert sum(fault.harmless for fault in faults()) == 4
    assert all("\n" not in line for line in lines)
    assert "temperature=0.7, top_p=0.9; noisy_policy" in fault_named("top-p-after-acceptance").line
    assert {fault.name for fault in faults() if not fault.harmless} == set(TESTS)


def test_an_unknown_fault_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="got 'stale'; known: shared-uniform"):
        fault_named("stale")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=8, repetition_penalty=1.2),
        SamplingParams(min_p=0.05, presence_penalty=0.3, frequency_penalty=0.2),
    ],
    ids=["plain law", "temperature and top-p", "top-k and repetition", "min-p and penalties"],
)
def test_the_engine_passes(decoder, params):
    verdict = audit(decoder, None, 24, params)
    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert {"j=1 after rejection", "j=1 after full acceptance", "j=2", "j=3", "bonus"} <= set(verdict.class_tokens)


@pytest.mark.parametrize("name", TESTS)
def test_a_fault_fails_and_the_output_names_the_test_that_caught_it(decoder, name):
    verdict = audit(decoder, fault_named(name), 14)
    assert verdict.exit_code == 1
    assert TESTS[name] in {result.test for result in verdict.failures}


@pytest.mark.parametrize("name", [fault.name for fault in faults() if fault.harmless])
def test_a_harmless_change_passes(decoder, name):
    verdict = audit(decoder, fault_named(name), 14)
    assert verdict.outcome is Outcome.PASS, verdict.reason


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("top-p-after-acceptance", "--temperature 0.7, --top-p 0.9"),
        ("penalty-ignores-drafts", "--repetition-penalty 1.5"),
        ("logprobs-before-temperature", "--temperature 0.7"),
    ],
)
def test_a_setting_under_which_a_fault_is_a_no_op_is_refused(name, option):
    with pytest.raises(ConfigError, match=f"fault {name} acts only with {option} or the like"):
        fault_named(name).check(SamplingParams())
    fault_named(name).check(fault_named(name).setting)


def test_a_rule_fault_without_a_drafter_that_samples_is_refused(decoder):
    for name in ("policy-residual", "bonus-wrong-position", "temperature-in-accept-only", "min-p-on-bonus-only"):
        fault = fault_named(name)
        parts = replace(make_parts(decoder), drafter=None)
        with pytest.raises(ConfigError, match="expected a drafter that samples"):
            fault.install(parts, fault.setting)
