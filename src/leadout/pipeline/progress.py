"""What the user sees while a run goes on: a line per step and, on a terminal, a live line with stage times as bars."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from leadout.records import Stage, StepReport

COLOURS: Mapping[Stage, str] = {
    Stage.DATA: "white",
    Stage.REFIT: "yellow",
    Stage.ROLLOUT: "green",
    Stage.REWARD: "magenta",
    Stage.LOGPROB: "cyan",
    Stage.TRAIN: "blue",
}
"""Colour of each stage's bar."""

_SHOWN = (
    ("reward", "reward", ".3f"),
    ("spec/acceptance_length", "accept", ".2f"),
    ("draft/expected_acceptance_length", "expected", ".2f"),
    ("spec/k_mean", "k", ".1f"),
    ("completions/mean_length", "length", ".0f"),
    ("rollout/tokens_per_second", "tok/s", ".0f"),
    ("eval/pass@1", "pass@1", ".3f"),
)
"""(metric, label, format) of the line of a step."""


def describe_step(report: StepReport, max_steps: int) -> str:
    """One line: step, reward, acceptance, tokens per second, seconds per stage; absent quantities left out."""
    parts = [f"step {report.step:>{len(str(max_steps))}}/{max_steps}"]
    for name, label, shape in _SHOWN:
        value = report.metrics.get(name)
        if value is not None and not isinstance(value, str):
            parts.append(f"{label} {value:{shape}}")
    total = sum(report.wall.values())
    longest = sorted(report.wall.items(), key=lambda item: -item[1])[:2]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in longest)
    return "  ".join([*parts, f"{total:.1f} s ({stages})"])


def stage_bars(seconds: Mapping[Stage, float], width: int = 40) -> Text:
    """The stages of a step as one bar of `width` characters, each stage its share, followed by a legend in seconds.

    Example: 3 s of rollout and 1 s of train at width 8 give six green blocks, two blue ones, "rollout 3.0 train 1.0".
    """
    total = sum(seconds.values())
    text = Text()
    if total <= 0.0:
        return text
    begin, legend = 0.0, Text()
    for stage in Stage:
        end = begin + seconds.get(stage, 0.0)
        blocks = round(end / total * width) - round(begin / total * width)
        text.append("█" * blocks, style=COLOURS[stage])
        if blocks:
            legend.append(f"  {stage} {seconds[stage]:.1f}", style=COLOURS[stage])
        begin = end
    return text + legend


class Progress:
    """Shows a run on a rich console; give a `Console(quiet=True)` to show nothing.

    Args:
        console: where to; not a terminal means plain lines without a live display.
        max_steps: steps of the whole run.

    """

    def __init__(self, console: Console, max_steps: int) -> None:
        self.console = console
        self._max_steps = max_steps
        self._live: Live | None = None
        self._bars = Text()
        self._next_step = 1
        self._alarmed = False

    def start(self, first_step: int) -> None:
        """The run begins with this step."""
        self._next_step = first_step
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(Text(), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def enter_stage(self, stage: Stage) -> None:
        """A stage begins; made for `Clock(on_enter=...)`."""
        if self._live is not None:
            head = Text(f"step {self._next_step}/{self._max_steps}  {stage:<8}", style=COLOURS[stage])
            self._live.update(head + Text("  ") + self._bars)

    def finish_step(self, report: StepReport) -> None:
        """A step is over and recorded."""
        self._next_step = report.step + 1
        self._bars = stage_bars(report.wall)
        self.message(describe_step(report, self._max_steps))
        alarm = report.metrics.get("spec/alarm")
        if alarm is not None and not self._alarmed:
            self.message(f"warning: {alarm}")
        self._alarmed = alarm is not None

    def message(self, text: str) -> None:
        """Print a line as it is, above the live line if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
