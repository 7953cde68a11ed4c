"""What reward functions see: one decoded completion, and the shape of a reward function.

The scorer decodes each rollout once into a `Completion`; every term of the reward judges the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leadout.errors import DataError
from leadout.records import IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A rollout as text. Example: ``Completion(prompt=p, text="42", token_ids=ids, version=3)``."""

    prompt: Prompt
    """What was completed."""
    text: str
    """Decoded, special tokens left out, cut before the stop string."""
    token_ids: IntArray
    """All generated tokens, i32[T], the end token included."""
    version: int
    """Newest weights that made a token of it: the number of finished train stages."""

    @property
    def length(self) -> int:
        """Generated tokens."""
        return int(self.token_ids.shape[0])

    def require_answer(self, function: str) -> str:
        """The ground truth.

        Raises:
            DataError: the row has none.

        """
        if self.prompt.answer is None:
            raise DataError(
                f"reward function {function} needs a ground truth, {self.prompt.id} has none; set data.train.answer_key"
            )
        return self.prompt.answer


RewardFunction = Callable[[Sequence[Completion]], "list[float | None]"]
"""One number per completion, None where it cannot be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One term of the reward. Example: ``RewardTerm(name="exact", function=exact, weight=1.0)``."""

    name: str
    """As in the recipe; also the name in `Score.parts`."""
    function: RewardFunction
    """Judges completions."""
    weight: float = 1.0
    """Factor in the sum."""
