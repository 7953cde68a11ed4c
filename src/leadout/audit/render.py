"""The verdict on a console, for a reader who has not read the code: the answer, why, and what it rests on."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from leadout.audit.verdict import Outcome, TestResult, Verdict

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.COULD_NOT_JUDGE: "yellow"}


def render(verdict: Verdict) -> RenderableType:
    """A page for `rich.console.Console.print`."""
    parts: list[RenderableType] = [_headline(verdict), _sample(verdict), _tests(verdict), _detectable(verdict)]
    if verdict.unseen:
        parts.append(Text("\nNot shown by this sample", style="bold"))
        parts += [Text(f"  - {line}") for line in verdict.unseen]
    if verdict.shortages:
        parts.append(Text("\nNeeded for a verdict", style="bold"))
        parts += [
            Text(f"  - {short.class_name}: {short.needed - short.tokens:,} more tokens (has {short.tokens:,})")
            for short in verdict.shortages
        ]
    return Group(*parts)


def _headline(verdict: Verdict) -> Text:
    text = Text()
    text.append(f"{verdict.outcome.value.upper()}", style=_STYLES[verdict.outcome])
    text.append(f"  {verdict.generator}: {verdict.reason}")
    return text


def _sample(verdict: Verdict) -> Text:
    classes = ", ".join(f"{name} {count:,}" for name, count in verdict.class_tokens.items())
    settings = ", ".join(f"{name} {value}" for name, value in verdict.settings.items())
    left_out = f"; {verdict.ambiguous_share:.1%} left out at the filters' edge" if verdict.ambiguous_share else ""
    return Text(
        f"{settings}\n{verdict.tokens:,} tokens of {verdict.rollouts:,} rollouts{left_out}\nby class: {classes}\n"
    )


def _tests(verdict: Verdict) -> Table:
    """One row per claim, showing its worst class; every failed class has its own row."""
    table = Table(title=None, box=None, pad_edge=False)
    for column, justify in (
        ("test", "left"),
        ("claim", "left"),
        ("worst class", "left"),
        ("tokens", "right"),
        ("deviation (99.9 % interval)", "right"),
        ("used of limit", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    claims: dict[tuple[str, str], list[TestResult]] = defaultdict(list)
    for result in verdict.results:
        claims[result.test, result.name].append(result)
    for results in claims.values():
        failed = [result for result in results if result.outcome is Outcome.FAIL]
        for result in failed or [max(results, key=lambda r: r.load)]:
            table.add_row(*_row(result))
    return table


def _row(result: TestResult) -> tuple[str | Text, ...]:
    effect = result.effect
    deviation = f"{effect.value:+.4g} ({effect.low:+.3g} .. {effect.high:+.3g}) {effect.unit}"
    used = f"{min(max(result.load, 0.0), 99.0):.0%}"
    outcome = Text(result.outcome.value, style=_STYLES[result.outcome])
    return result.test, result.name, result.class_name, f"{result.tokens:,}", deviation, used, outcome


def _detectable(verdict: Verdict) -> RenderableType:
    if not verdict.detectable:
        return Text("")
    table = Table(title="\nSmallest bias this sample finds (19 of 20 times)", box=None, pad_edge=False)
    table.title_justify = "left"
    table.title_style = "bold"
    for column in ("kind", "size", "of", "by"):
        table.add_column(column)
    for row in verdict.detectable:
        table.add_row(row.kind, f"{row.smallest:.3g}", row.unit, row.test)
    return table
