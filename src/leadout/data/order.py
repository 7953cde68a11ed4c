"""Stage data, last part: in which order prompts are drawn.

An epoch is a permutation made from (seed, epoch) alone, so a run is reproducible and a resumed run goes on with the
very prompt that would have come next.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from leadout.errors import CheckpointError, DataError
from leadout.records import Prompt


class ShuffledPrompts:
    """A `PromptSource` over a fixed set of prompts: epochs follow one another, each shuffled afresh.

    Example: ``ShuffledPrompts(prompts, seed=1).take(8)``
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("expected at least one prompt, got none")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` prompts; may cross into the next epoch, even several times."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            if self._position == len(self._prompts):
                self._epoch += 1
                self._position = 0
                self._order = self._permutation(self._epoch)
            taken.append(self._prompts[self._order[self._position]])
            self._position += 1
        return taken

    def state_dict(self) -> dict[str, object]:
        """Where in which epoch, and of which data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "data": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: the data, the seed or the shuffling are not those of the checkpoint.

        """
        for name, own in (("data", self._fingerprint()), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state.get(name) != own:
                raise CheckpointError(
                    f"cannot resume: the training {name} changed, expected {state.get(name)} as saved, got {own}"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or not 0 <= position <= len(self._prompts):
            raise CheckpointError(f"cannot resume: broken data position, got epoch {epoch!r}, position {position!r}")
        self._epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> list[int]:
        size = len(self._prompts)
        if not self._shuffle:
            return list(range(size))
        generator = np.random.default_rng(np.random.SeedSequence((self._seed, epoch)))
        return [int(index) for index in generator.permutation(size)]

    def _fingerprint(self) -> str:
        """Number of prompts and a checksum of their ids and tokens."""
        crc = 0
        for prompt in self._prompts:
            crc = zlib.crc32(prompt.token_ids.tobytes(), zlib.crc32(prompt.id.encode(), crc))
        return f"{len(self._prompts)} prompts, crc32 {crc:08x}"
