"""What a cell generates: one prompt and one exact length per row, the same for every contender."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from leadout.errors import ConfigError
from leadout.records import IntArray, Prompt

LONG_TAIL_ROWS, LONG_TAIL_SIBLINGS = 64, 8
_TAIL_MEDIAN, _TAIL_SIGMA, _TAIL_MOST = 32.0, 0.8, 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Rows to generate at once. End-of-sequence tokens are ignored, so every row has exactly its length."""

    name: str
    prompts: tuple[Prompt, ...]
    lengths: tuple[int, ...]
    """New tokens of each row."""

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.lengths), "one length per prompt"

    @property
    def rows(self) -> int:
        """Rows at once."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt included."""
        return max(len(prompt.token_ids) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))


def make_prompt(token_ids: Sequence[int], index: int) -> Prompt:
    """A prompt of token ids, named by its place."""
    return Prompt(id=f"bench/{index}", token_ids=np.asarray(token_ids, np.int32), text="")


def cut_prompts(texts: Sequence[IntArray], count: int, length: int) -> tuple[Prompt, ...]:
    """`count` different prompts of exactly `length` (>= 1) tokens, each ending where a text ends.

    Texts are strung together in turn, starting one further on for each prompt. Where that gives a prompt again, its
    first tokens are other ones, so that no two are the same and no engine can share their prefill. Raises ConfigError
    where so few tokens do not give so many different prompts.
    """
    words = list(dict.fromkeys(token for text in texts for token in text.tolist()))
    found: set[tuple[int, ...]] = set()
    prompts = []
    for index in range(count):
        at = index % len(texts)
        ids: list[int] = []
        while len(ids) < length:
            ids = [*texts[at].tolist(), *ids]
            at = (at - 1) % len(texts)
        fresh = next((other for other in _variants(ids[-length:], words) if other not in found), None)
        if fresh is None:
            raise ConfigError(f"--context: {length} tokens do not give {count} different prompts; raise it")
        found.add(fresh)
        prompts.append(make_prompt(fresh, index))
    return tuple(prompts)


def _variants(ids: Sequence[int], words: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The ids themselves, then others with another first token, then with other two first ones."""
    yield tuple(ids)
    for first in words:
        yield first, *ids[1:]
    if len(ids) > 1:
        for second, first in product(words, words):
            yield first, second, *ids[2:]


def long_tail(prompts: Sequence[Prompt]) -> Workload:
    """A step of GRPO: `LONG_TAIL_SIBLINGS` rollouts of each prompt, lengths drawn."""
    rows = tuple(prompt for prompt in prompts for _ in range(LONG_TAIL_SIBLINGS))
    return Workload(name="long tail", prompts=rows, lengths=long_tail_lengths(rows=len(rows)))


def long_tail_lengths(*, rows: int = LONG_TAIL_ROWS, seed: int = 0, most: int = _TAIL_MOST) -> tuple[int, ...]:
    """Log-normal lengths (median 32, sigma 0.8, at most 256): most rows are short, a few hold up the batch."""
    drawn = np.random.default_rng(seed).lognormal(np.log(_TAIL_MEDIAN), _TAIL_SIGMA, rows)
    return tuple(int(length) for length in np.clip(np.round(drawn), 2, most))
