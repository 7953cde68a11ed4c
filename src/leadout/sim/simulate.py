"""The door of the simulator: a scenario in, an outcome with ranges out."""

from __future__ import annotations

from leadout.sim.present import Outcome
from leadout.sim.project import project
from leadout.sim.ranges import headline_ranges, plain_twin
from leadout.sim.scenario import Scenario
from leadout.sim.setup import Workbench


def simulate(scenario: Scenario, bench: Workbench | None = None) -> Outcome:
    """Project a scenario and its plain twin, with the 5-95 % ranges of the headlines."""
    bench = bench or Workbench()
    projection = project(scenario, bench)
    plain = project(plain_twin(scenario), bench) if scenario.speculation is not None else projection
    return Outcome(projection=projection, plain=plain, ranges=headline_ranges(scenario, bench))
