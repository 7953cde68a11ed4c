"""``leadout simulate`` and ``leadout plan``: what a step costs elsewhere, before renting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leadout.errors import ConfigError

if TYPE_CHECKING:
    from leadout.sim.baseline import Fitted
    from leadout.sim.scenario import Scenario

WIDTH = 150


def simulate(
    scenario: Annotated[Path | None, typer.Argument(metavar="[SCENARIO.yaml]", help="What to project.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Changed fields.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML report with pictures.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The reference paper's tables beside ours.")] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Kernel gates, published inter-token times and NeMo RL rows.")
    ] = False,
    baseline: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Fit host time, MFU and refit to a plain run's log first.")
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Replay a finished run's folder.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration profile of the machine of the run or scenario.")
    ] = None,
    validate: Annotated[bool, typer.Option("--validate", help="With --run: judge RUN/cells.jsonl.")] = False,
    save_run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Write the projected step as a run folder.")
    ] = None,
    second_opinion: Annotated[
        str | None, typer.Option(metavar="aic", help="Another engine model's step time beside ours.")
    ] = None,
) -> None:
    """Project the seconds of a step of reinforcement learning, stage by stage, with ranges.

    Example: leadout simulate recipes/scenarios/qwen3-8b-h100.yaml speculation.num_speculative_tokens=3
    """
    modes = {"--paper": paper, "--published": published, "--run": run is not None}
    projecting = {
        "a scenario": scenario is not None,
        "--html": html is not None,
        "--baseline": baseline is not None,
        "--save-run": save_run is not None,
        "--second-opinion": second_opinion is not None,
    }
    _refuse_ignored(modes, projecting, profile=profile is not None, validate=validate)
    if paper:
        _paper(json_file)
    elif published:
        _published(json_file)
    elif run is not None:
        _run(run, profile, validate, json_file)
    elif scenario is None:
        raise ConfigError("expected a scenario file, --paper, --published or --run RUN")
    else:
        _scenario(scenario, overrides or [], profile, json_file, html, baseline, save_run, second_opinion)


def _refuse_ignored(modes: dict[str, bool], projecting: dict[str, bool], *, profile: bool, validate: bool) -> None:
    """Raise ConfigError when something given would be ignored by what else is given."""
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"expected one of {', '.join(modes)}, got {' and '.join(chosen)}; give them one by one")
    if validate and "--run" not in chosen:
        raise ConfigError("--validate needs --run RUN: it judges RUN/cells.jsonl")
    ignored = [name for name, given in projecting.items() if given] if chosen else []
    if profile and chosen and chosen != ["--run"]:
        ignored.append("--profile")
    if ignored:
        raise ConfigError(f"{chosen[0]} does not use {', '.join(ignored)}; leave out one or the other")


def plan(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="Model, GPUs and workload.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Changed fields.")] = None,
    max_lag: Annotated[int, typer.Option(min=0, max=8, help="Largest policy lag to consider.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
) -> None:
    """Recommend placement, draft length and lag for a workload, with reasons and the runner-up.

    Example: leadout plan recipes/scenarios/qwen3-8b-h100.yaml gpus=32
    """
    from leadout.sim.plan import plan as search
    from leadout.sim.plan_report import plan_json, render_plan
    from leadout.sim.scenario import load

    found = search(load(scenario, overrides or []), max_lag)
    _print(render_plan(found))
    _write_json(json_file, plan_json(found))


def _scenario(
    path: Path,
    overrides: list[str],
    profile: Path | None,
    json_file: Path | None,
    html: Path | None,
    baseline: Path | None,
    save_run: Path | None,
    second_opinion: str | None,
) -> None:
    from leadout.sim.present import render, to_json
    from leadout.sim.runs import check_can_be_saved, write_run
    from leadout.sim.scenario import load
    from leadout.sim.setup import Workbench
    from leadout.sim.simulate import simulate as project

    scenario, bench = load(path, overrides), Workbench()
    if profile is not None:
        scenario = scenario.model_copy(update={"profile": profile})
    if scenario.profile is not None and second_opinion is not None:
        raise ConfigError("--second-opinion compares kernel tables; the rounds of this scenario come from a profile")
    if save_run is not None:
        check_can_be_saved(scenario)
    fitted = _fit(scenario, baseline)
    scenario = fitted.scenario if fitted is not None else scenario
    outcome = project(scenario, bench)
    _print(render(outcome))
    data = to_json(outcome)
    if second_opinion is not None:
        from leadout.sim.second_opinion import second_opinion as ask

        line, data["second_opinion"] = ask(second_opinion, outcome.plain)
        _print(line)
    if html is not None:
        from leadout.sim.charts import write_html

        write_html(outcome, html, bench)
        _print(f"wrote {html}")
    if save_run is not None:
        write_run(scenario, save_run)
        _print(f"wrote {save_run}")
    _write_json(json_file, data)


def _fit(scenario: Scenario, log: Path | None) -> Fitted | None:
    """Fit to --baseline or the scenario's own block; prints the residuals."""
    from leadout.sim.baseline import fit_baseline, read_baseline, render_fit

    block = read_baseline(log) if log is not None else scenario.baseline
    if block is None:
        return None
    if scenario.profile is not None:
        raise ConfigError("a baseline fits constants that a profile takes the place of; leave out one of the two")
    fitted = fit_baseline(scenario, block)
    _print(render_fit(fitted))
    return fitted


def _paper(json_file: Path | None) -> None:
    from leadout.sim.paper_report import paper_report

    shown, data = paper_report()
    _print(shown)
    _write_json(json_file, data)


def _published(json_file: Path | None) -> None:
    from leadout.sim.published import published_report

    shown, data = published_report()
    _print(shown)
    _write_json(json_file, data)


def _run(folder: Path, profile: Path | None, validate: bool, json_file: Path | None) -> None:
    from leadout.sim.replay_report import replay_report, validate_report

    if profile is not None and not validate and (folder / "scenario.yaml").is_file():
        raise ConfigError(f"{folder} is a simulated run: its scenario.yaml says on what; leave out --profile")
    shown, data = validate_report(folder, profile) if validate else replay_report(folder, profile)
    _print(shown)
    _write_json(json_file, data)
    if validate and not data["passed"]:
        raise typer.Exit(1)


def _print(what: object) -> None:
    from rich.console import Console

    Console(width=WIDTH, soft_wrap=False).print(what)


def _write_json(path: Path | None, data: object) -> None:
    if path is None:
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    temporary.replace(path)
