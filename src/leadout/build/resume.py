"""What a resumed run may change: its length and how it is watched, nothing that decides what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from leadout.config import RunConfig
from leadout.errors import CheckpointError
from leadout.pipeline.folder import RunFolder, write_text
from leadout.recipe import dump, load_recipe

_FREE = ("name", "output_dir", "pipeline.max_steps", "checkpoint.", "log.", "eval.", "audit.", "threads", "device")
"""Keys, and sections with a final dot, that may differ."""


def accept_changes(folder: RunFolder, config: RunConfig) -> None:
    """Refuse settings that would make another run of it; write those that may change into the folder.

    Raises CheckpointError naming the keys that differ from the folder's own config.yaml.
    """
    before = load_recipe(folder.config, [])
    old, new = dict(_flat(before.model_dump(mode="json"))), dict(_flat(config.model_dump(mode="json")))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    fixed = [key for key in changed if not key.startswith(_FREE)]
    if fixed:
        raise CheckpointError(
            f"{folder.path}: a resumed run keeps its settings, expected {fixed[0]}: {old.get(fixed[0])!r}, got "
            f"{new.get(fixed[0])!r}{f' (and {len(fixed) - 1} more)' if len(fixed) > 1 else ''}; start a new run for it"
        )
    if changed:
        own = config.model_copy(update={"name": before.name, "output_dir": before.output_dir})
        write_text(folder.config, dump(own))


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
