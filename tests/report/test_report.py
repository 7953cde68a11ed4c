import base64
import json
import re

import pytest

from leadout.errors import CheckpointError, DataError
from leadout.pipeline.closing import Case, close_run
from leadout.pipeline.folder import RunFolder, write_json
from leadout.records import Stage
from leadout.report import write_report
from leadout.report.charts import CHARTS, draft_length_chart, line_chart, stage_chart
from leadout.report.health_charts import age_chart, entropy_chart, mean_by_class
from leadout.report.page import highlights, pick_samples
from tests.fakes import FakeGenerator
from tests.pipeline.builders import make_run


def svg_of(picture):
    return base64.b64decode(picture.uri.removeprefix("data:image/svg+xml;base64,")).decode()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "first", max_steps=8)
    last = run.train()
    closing = close_run(
        variants={"plain": FakeGenerator(k=0), "k=3": FakeGenerator(k=3)},
        requests=last.requests,
        rows=[],
        run_variant="plain",
        cases=[Case(name="1 row, k=3", variant="k=3", rows=1)],
    )
    write_json(run.folder.closing, closing.to_json())
    return run.folder.path


def test_the_page_of_a_run_needs_nothing_from_outside(finished, tmp_path):
    text = write_report([finished], tmp_path / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', text) == []
    assert "<script" not in text and "@import" not in text
    for title in ("Reward", "Acceptance length", "Seconds per stage", "Completion length", "Policy loss"):
        assert f"<figcaption>{title}</figcaption>" in text


def test_charts_without_data_are_left_out(finished, tmp_path):
    assert "Draft loss" not in write_report([finished], tmp_path / "report.html").read_text()


def test_the_page_shows_closing_table_recipe_and_rollouts(finished, tmp_path):
    text = write_report([finished], tmp_path / "report.html").read_text()
    assert "1 row, k=3" in text
    assert "name: fake" in text
    assert text.count('class="rollout"') == 6


def test_what_models_and_data_wrote_is_escaped(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "name: <b>bold</b>\n")
    line = {
        "step": 1,
        "reward": 1.0,
        "prompt": "<script>alert(1)</script>",
        "completion": "</pre><img src=x>",
        "answer": "<5>",
        "token_ids": [1],
        "finish": "eos",
    }
    folder.rollouts.write_text(json.dumps(line) + "\n")
    text = write_report([folder.path], folder.report).read_text()
    assert "<script>" not in text and "<img src=x>" not in text and "<b>bold" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "&lt;5&gt;" in text


def test_a_comparison_shows_every_run_in_every_chart(finished, tmp_path):
    other = make_run(tmp_path / "second", max_steps=4)
    other.train()
    text = write_report([finished, other.folder.path], tmp_path / "report.html").read_text()
    assert "<h1>first · second</h1>" in text
    assert "Recipe: first" in text and "Recipe: second" in text
    assert text.count("<figcaption>Seconds per stage</figcaption>") == 1


def test_runs_of_the_same_name_are_told_apart(finished, tmp_path):
    other = make_run(tmp_path / "first", max_steps=1)
    other.train()
    text = write_report([finished, other.folder.path], tmp_path / "report.html").read_text()
    assert f"<h1>{finished} · {other.folder.path}</h1>" in text


def test_a_run_without_a_finished_step_is_reported_as_such(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    assert "No step is finished yet." in write_report([folder.path], folder.report).read_text()


def test_a_torn_last_row_is_passed_over(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    folder.metrics.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    assert '<td>steps</td><td class="number">1</td>' in write_report([folder.path], folder.report).read_text()


def test_damaged_files_are_named(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    folder.metrics.write_text("not json\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: expected one JSON object per line"):
        write_report([folder.path], folder.report)
    folder.metrics.write_text("")
    folder.closing.write_text("[1]")
    with pytest.raises(DataError, match=r"closing\.json: expected a JSON object"):
        write_report([folder.path], folder.report)


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="expected the folder of a run"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(DataError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")


def test_highlights_compare_the_first_quarter_with_the_last():
    rows = [{"step": step, "reward": step / 10, "seconds/total": 2.0, "seconds/rollout": 1.0} for step in range(1, 9)]
    assert highlights(rows) == [
        ("steps", "8"),
        ("reward, first to last quarter", "0.150 → 0.750"),
        ("seconds per step", "2.00, of which rollout 50%"),
    ]


def test_samples_are_best_median_and_worst_of_first_and_last_step():
    lines = [{"step": step, "reward": reward} for step in (1, 2, 3) for reward in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert [(line["step"], line["reward"]) for line in pick_samples(lines)] == [
        (1, 1.0),
        (1, 0.5),
        (1, 0.0),
        (3, 1.0),
        (3, 0.5),
        (3, 0.0),
    ]


def test_samples_of_a_single_rollout_are_that_rollout():
    assert pick_samples([{"step": 1, "reward": 0.0}]) == [{"step": 1, "reward": 0.0}]
    assert pick_samples([]) == []


def test_a_chart_without_its_quantity_is_none():
    assert line_chart(CHARTS[0], {"a": [{"step": 1, "loss": 0.5}]}) is None
    assert stage_chart([]) is None


def test_draft_lengths_are_stacked_by_k_and_left_out_where_nothing_was_drafted():
    assert draft_length_chart([{"step": 1, "spec/k_share_0": 1.0}]) is None
    svg = svg_of(draft_length_chart([{"step": 1, "spec/k_share_0": 0.5, "spec/k_share_1": 0.0, "spec/k_share_2": 0.5}]))
    assert all(label in svg for label in ("off", "k = 1", "k = 2"))


def test_the_same_rows_give_the_same_picture():
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}]
    first, second = (svg_of(line_chart(CHARTS[0], {"a": rows})) for _ in range(2))
    assert first.startswith("<?xml") and "Reward" in first
    assert re.sub(r"#?\b[mp][0-9a-f]{10}\b", "", first) == re.sub(r"#?\b[mp][0-9a-f]{10}\b", "", second)


def test_every_stage_has_a_colour_in_the_stacked_chart():
    svg = svg_of(stage_chart([{"step": 1, **{f"seconds/{stage}": 1.0 for stage in Stage}}]))
    for colour in ("#999999", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#0072b2"):
        assert colour in svg


def test_acceptance_by_age_and_entropy_are_drawn_and_an_alarm_is_told():
    rows = [
        {"step": 1, "spec/acceptance_rate_age_0": 0.5, "draft/expected_acceptance_rate_entropy_0.3": 0.4},
        {"step": 2, "spec/acceptance_rate_age_1": 0.2, "draft/expected_acceptance_rate_entropy_0.3": 0.6},
        {"step": 3, "spec/acceptance_rate_age_0": 0.7, "spec/alarm": "wrong vocabulary map"},
    ]
    assert mean_by_class(rows, "spec/acceptance_rate_age_") == {0.0: pytest.approx(0.6), 1.0: 0.2}
    assert mean_by_class(rows, "draft/expected_acceptance_rate_entropy_") == {0.3: 0.5}
    assert age_chart({"run": rows}).title == "Acceptance by the drafter's age"
    assert "entropy" in svg_of(entropy_chart({"run": rows}))
    assert ("drafter, steps 3 to 3", "wrong vocabulary map") in highlights(rows)


def test_one_age_alone_is_no_curve():
    assert age_chart({"run": [{"step": 1, "spec/acceptance_rate_age_0": 0.5}]}) is None
