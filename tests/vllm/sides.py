"""The two sides of a comparison: the same prompts, greedily, with the same head, here and in vLLM.

What is compared. Row ends differ: this engine drafts no more than the row still needs and counts no accepted draft
past its end, vLLM drafts in full and counts all of them. So both sides are cut alike: a round counts when it began with
room for all its drafts and one more token. Everything else is the same on both sides, round by round.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leadout.bench.peers.contender import peer_environment
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import DraftHead
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.equivalence.tiny_engines import eagle3_drafter, engine, generate

PEER = Path(__file__).with_name("peer.py")
DRAFTS = 3
_ROOM = 16
"""Tokens of context beyond the longest row: vLLM drafts past the end."""


@dataclass(frozen=True)
class Side:
    """What one engine did, row by row."""

    tokens: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    """Drafted and accepted in each whole round."""

    @property
    def num_rounds(self) -> int:
        """Whole rounds."""
        return sum(map(len, self.rounds))

    @property
    def accepted(self) -> list[int]:
        """Whole rounds in which the draft at each position was accepted."""
        return [sum(got > position for row in self.rounds for _, got in row) for position in range(DRAFTS)]

    def __str__(self) -> str:
        return f"{self.num_rounds} rounds, accepted by position {self.accepted}"


def side(rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], new_tokens: int) -> Side:
    """Cut rows of (tokens, drafted, accepted) to the rounds that count."""
    kept = []
    for _, drafted, accepted in rows:
        began = 1 + np.concatenate([[0], np.cumsum(np.add(accepted, 1))[:-1]])
        whole = int((began + DRAFTS + 1 <= new_tokens).sum())
        kept.append(list(zip(map(int, drafted[:whole]), map(int, accepted[:whole]))))
    return Side(tokens=[list(map(int, tokens)) for tokens, _, _ in rows], rounds=kept)


def prompt(token_ids: Sequence[int], number: int) -> Prompt:
    """Token ids as a prompt."""
    return Prompt(id=f"p/{number}", token_ids=np.asarray(token_ids, np.int32), text="")


def longest(prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Context that both engines get."""
    return max(len(each.token_ids) for each in prompts) + new_tokens + _ROOM


def requests(prompts: Sequence[Prompt], new_tokens: int) -> list[Request]:
    """Greedy, without an end."""
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
    return [Request(rollout_id=RolloutId(i, 0), prompt=each, params=params) for i, each in enumerate(prompts)]


def here(fused: FusedDecoder, head: DraftHead, prompts: Sequence[Prompt], new_tokens: int) -> Side:
    """This project's engine with greedy drafts."""
    length, slots = longest(prompts, new_tokens), len(prompts)
    drafter = eagle3_drafter(head, fused, slots, greedy=True, max_len=length)
    generator = engine(fused, drafter, DRAFTS, num_slots=slots, max_len=length)
    rollouts = generate(generator, requests(prompts, new_tokens)).values()
    rows = [(r.token_ids.tolist(), r.rounds.drafted.tolist(), r.rounds.accepted.tolist()) for r in rollouts]
    return side(rows, new_tokens)


def job(model: Path, head: Path, prompts: Sequence[Prompt], new_tokens: int, **speculation: Any) -> dict[str, Any]:
    """The same for vLLM."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS, **speculation}
    return {
        "model": str(model),
        "speculation": config,
        "prompts": [each.token_ids.tolist() for each in prompts],
        "new_tokens": new_tokens,
        "max_len": longest(prompts, new_tokens),
        "kv_bytes": 1 << 30,
    }


def there(python: Path, jobs: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """vLLM's answers, from one process for all jobs; what it printed stays in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ask, answer, log = folder / "ask.json", folder / "answer.json", folder / "vllm.log"
    ask.write_text(json.dumps({"jobs": list(jobs)}))
    # In one process an engine's own error is what is raised.
    env = peer_environment("vllm", 2, python) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as out:
        command = [str(python), "-I", str(PEER), str(ask), str(answer)]
        done = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=900, check=False)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    assert done.returncode == 0, f"vLLM's process ended with {done.returncode}: {said[-1]}"
    answers: list[dict[str, Any]] = json.loads(answer.read_text())
    return answers


def side_of(answer: dict[str, Any], new_tokens: int) -> Side:
    """vLLM's answer, cut."""
    assert "error" not in answer, answer["error"]
    return side([(row["tokens"], row["drafted"], row["accepted"]) for row in answer["rows"]], new_tokens)
