"""Checkpoints of a run, each a folder that is there whole or not at all.

checkpoints/step_000010/
  learner/     written by `Learner.save`
  state.json   a `RunState`: the step, the draw counter, how long the logs were, every `Stateful` part

Everything is written under a temporary name and renamed last, so a killed process leaves at most a temporary folder,
which the next start removes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadout.errors import CapacityError, CheckpointError
from leadout.interfaces import Learner
from leadout.metrics import is_disk_full
from leadout.pipeline.folder import write_json

FORMAT = 1
"""Layout of state.json; other numbers are refused."""

_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".partial"
_FULL_DISK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All of a run but the learner, as it was right after a finished step."""

    step: int
    """The last finished step."""
    next_draw: int
    """State of the draw counter."""
    seed: int
    """The run's seed; a run cannot go on under another."""
    metrics_bytes: int
    """Length of metrics.jsonl."""
    rollouts_bytes: int
    """Length of rollouts.jsonl."""
    parts: Mapping[str, Mapping[str, object]]
    """`Stateful.state_dict()` of the prompt source, the generator, …, by name."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run folder; made with the first checkpoint.
        keep: how many of the newest are kept.

    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        assert keep >= 1, f"at least one checkpoint must be kept, got {keep}"
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending; folders of other names or without state.json are passed over."""
        if not self._folder.is_dir():
            return []
        matches = ((path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir())
        return sorted(int(match[1]) for path, match in matches if match and (path / "state.json").is_file())

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self._folder / f"step_{step:06d}"

    def save(self, state: RunState, learner: Learner) -> Path:
        """Write a checkpoint, then delete those beyond `keep`.

        Raises:
            CapacityError: the disk is full; older checkpoints are untouched and nothing of the new one remains.

        """
        final = self.path(state.step)
        temporary = final.with_name(final.name + _TEMPORARY)
        self.remove_partial()
        try:
            (temporary / "learner").mkdir(parents=True)
            learner.save(temporary / "learner")
            write_json(temporary / "state.json", {"format": FORMAT, **dataclasses.asdict(state)})
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
        except (OSError, RuntimeError) as error:
            # Libraries report a full disk under classes of their own; the disk itself says what happened.
            full = shutil.disk_usage(self._folder.parent).free < _FULL_DISK
            if full or (isinstance(error, OSError) and is_disk_full(error)):
                raise CapacityError(
                    f"disk full: expected room for a checkpoint in {final}; free some space, then resume the run"
                ) from error
            raise
        finally:
            self.remove_partial()
        for step in self.steps()[: -self._keep]:
            self._delete(step)
        return final

    def newest(self) -> RunState | None:
        """State of the newest whole checkpoint; None if there is none.

        Raises:
            CheckpointError: its state.json is not one this version wrote.

        """
        steps = self.steps()
        return self._read(steps[-1]) if steps else None

    def load_learner(self, state: RunState, learner: Learner) -> None:
        """Restore the learner of the checkpoint that `state` was read from."""
        learner.load(self.path(state.step) / "learner")

    def remove_partial(self) -> None:
        """Remove what a killed process left behind."""
        for path in self._folder.glob(f"*{_TEMPORARY}"):
            shutil.rmtree(path)

    def _delete(self, step: int) -> None:
        """Rename first: a process killed in between leaves no checkpoint with half of its files."""
        doomed = self.path(step).with_name(self.path(step).name + _TEMPORARY)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed)

    def _read(self, step: int) -> RunState:
        path = self.path(step) / "state.json"
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = values.pop("format")
            state = RunState(**values) if found == FORMAT else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: expected the state of a run, got something else ({error}); "
                f"remove {path.parent} to resume from an older checkpoint"
            ) from error
        if state is None:
            raise CheckpointError(
                f"{path}: expected format {FORMAT}, got {found}; resume with the version that wrote it"
            )
        if state.step != step:
            raise CheckpointError(f"{path}: expected step {step}, got {state.step}; remove {path.parent}")
        return state
