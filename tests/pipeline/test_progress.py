import io

from rich.console import Console

from leadout.pipeline.progress import Progress, describe_step, stage_bars
from leadout.records import Stage, StepReport


def report(step=3, **metrics):
    seconds = dict.fromkeys(Stage, 0.0) | {Stage.ROLLOUT: 3.0, Stage.TRAIN: 1.0}
    return StepReport(step=step, version=step - 1, seconds=seconds, metrics=metrics)


def test_the_line_of_a_step_leaves_out_what_does_not_exist():
    line = describe_step(report(**{"reward": 0.5, "spec/k_mean": 0.0}), 20)
    assert line == "step  3/20  reward 0.500  k 0.0  4.0 s (rollout 3.0, train 1.0)"


def test_the_line_of_a_step_shows_acceptance_and_speed():
    metrics = {"spec/acceptance_length": 1.837, "rollout/tokens_per_second": 311.6}
    assert "accept 1.84  tok/s 312" in describe_step(report(**metrics), 20)


def test_bars_share_the_width_by_seconds():
    text = stage_bars(report().seconds, width=8)
    assert text.plain == "████████  rollout 3.0  train 1.0"
    lengths = {span.style: span.end - span.start for span in text.spans[:2]}
    assert lengths == {"green": 6, "blue": 2}


def test_a_step_without_time_has_no_bars():
    assert stage_bars(dict.fromkeys(Stage, 0.0)).plain == ""


def test_what_is_not_a_terminal_gets_one_plain_line_per_step():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, width=20), max_steps=20)
    progress.start(3)
    progress.enter_stage(Stage.ROLLOUT)
    progress.finish_step(report(reward=0.25))
    progress.message("[not markup] a long line that is not wrapped")
    progress.stop()
    assert screen.getvalue() == (
        "step  3/20  reward 0.250  4.0 s (rollout 3.0, train 1.0)\n[not markup] a long line that is not wrapped\n"
    )


def test_a_terminal_shows_the_stage_at_work():
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True, color_system=None)
    progress = Progress(console, max_steps=20)
    progress.start(1)
    progress.finish_step(report())
    progress.enter_stage(Stage.LOGPROB)
    progress.stop()
    assert "step 4/20  logprob" in screen.getvalue()
    assert "█" in screen.getvalue()


def test_a_quiet_console_shows_nothing():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, quiet=True, force_terminal=True), max_steps=20)
    progress.start(1)
    progress.enter_stage(Stage.DATA)
    progress.finish_step(report())
    progress.stop()
    assert screen.getvalue() == ""
