"""A run on fakes as a process of its own, which can kill itself.

`python -m tests.pipeline.fake_run FOLDER STALENESS [WHERE N]`: STALENESS is `sync` or that of an asynchronous run.
WHERE is `rollout` (while generating the N-th rollout of this process), `save` (inside the N-th checkpoint, half
written), `row` (after half of the row of step N) or `never`.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from leadout.metrics import JsonLines
from tests.fakes import FakeGenerator, FakeLearner
from tests.pipeline.builders import make_pipeline, make_run

STEPS = 11


def die() -> None:
    """As if the machine's memory killer came."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class MortalGenerator(FakeGenerator):
    """Dies after `left` rollouts."""

    left: int = 10**9

    def collect(self, timeout=None):
        self.left -= 1
        if self.left == 0:
            die()
        return super().collect(timeout)


@dataclass
class MortalLearner(FakeLearner):
    """Dies with its `left`-th checkpoint half written."""

    left: int = 10**9

    def save(self, folder):
        super().save(folder)
        self.left -= 1
        if self.left == 0:
            die()


class MortalLines(JsonLines):
    """Dies when half of a step's row is written."""

    step = 0

    def append(self, rows):
        if rows[0]["step"] == self.step and "version" in rows[0]:
            self._file.write(b'{"step": ')
            die()
        super().append(rows)


def main(folder: str, staleness: str, where: str = "never", count: str = "0") -> None:
    """Run to the end or to the death."""
    number = int(count)
    generator = MortalGenerator(k=None, left=number if where == "rollout" else 10**9)
    learner = MortalLearner(left=number if where == "save" else 10**9)
    if where == "row":
        import leadout.pipeline.run

        MortalLines.step = number
        leadout.pipeline.run.JsonLines = MortalLines
    ahead = {} if staleness == "sync" else {"staleness": int(staleness), "last_step": STEPS}
    pipeline = make_pipeline(generator=generator, learner=learner, **ahead)
    make_run(Path(folder), pipeline, max_steps=STEPS, console=Console(file=sys.stdout, width=200)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
