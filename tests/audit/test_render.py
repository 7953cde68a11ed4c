import json

from rich.console import Console

from leadout.audit.biased_rules import policy_residual
from leadout.audit.judge import Demands, judge
from leadout.audit.render import render
from leadout.audit.synthetic import Setup
from leadout.audit.synthetic_audits import samples


def page(setup, demands):
    (sample,) = samples(setup, 1, seed=3)
    verdict = judge(sample, "native, noisy draft", "bfloat16", demands)
    console = Console(width=200, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(render(verdict))
    return verdict, captured.get()


def test_a_pass_fits_on_a_page_and_begins_with_the_answer():
    _, text = page(Setup(num_rollouts=400), Demands(tokens=1000, class_tokens=100))
    assert text.startswith("PASS  native, noisy draft: the tokens are the policy's")
    assert len(text.splitlines()) < 50
    assert "Smallest bias this sample finds" in text


def test_a_failure_names_the_test_the_claim_and_the_class():
    _, text = page(Setup(num_rollouts=400, rule=policy_residual), Demands())
    assert text.startswith("FAIL")
    (row,) = [line for line in text.splitlines() if "corrections follow the residual, by p/q" in line and "%" in line]
    assert row.split()[0] == "T4" and row.rstrip().endswith("fail")


def test_a_short_sample_says_what_to_add():
    verdict, text = page(Setup(num_rollouts=20), Demands())
    assert text.startswith("COULD NOT JUDGE")
    for short in verdict.shortages:
        assert f"{short.class_name}: {short.needed - short.tokens:,} more tokens" in text


def test_the_json_holds_every_test_and_reads_back():
    verdict, _ = page(Setup(num_rollouts=100), Demands())
    read = json.loads(verdict.to_json())
    assert read["outcome"] == verdict.outcome.value
    assert len(read["results"]) == len(verdict.results)
    assert read["results"][1]["effect"]["unit"] == "KS distance"
    assert read["class_tokens"] == dict(verdict.class_tokens)
