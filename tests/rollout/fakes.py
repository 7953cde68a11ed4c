"""Scripted policies and drafters for exact tests of the engine.

`MarkovDecoder` is a policy over a tiny vocabulary whose law depends on the last two tokens only, so that whole-sequence
probabilities have closed forms. It keeps its own token memory by slot, written at the positions the engine claims, so a
wrong position, a stale cache or a swapped row changes what it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from leadout.draft_length.controller import DraftLength, FixedLength
from leadout.interfaces import Draft, DraftProbs, Noise
from leadout.models.kv import KVSlots
from leadout.models.sampling import Law
from leadout.models.spec import DecoderSpec
from leadout.models.states import DecoderStates, keep_newest
from leadout.records import Prompt, RefitReport, Request, Rollout, RolloutId, SamplingParams, WeightUpdate
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class MarkovDecoder:
    """logits = table[token before, token]; taps are the pair, one-hot."""

    def __init__(self, table_VVV: torch.Tensor, num_slots: int, max_len: int) -> None:
        self.table_VVV = table_VVV
        self.vocab_size = table_VVV.shape[0]
        self._memory_SL = torch.full((num_slots, max_len + 2), -1)
        self.forward_widths: list[tuple[int, int]] = []

    def forward(
        self,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...] = (),
        counts_B: np.ndarray | None = None,
        *,
        newest: bool = False,
    ) -> DecoderStates:
        batch, width = tokens_BN.shape
        self.forward_widths.append((batch, width))
        counts = np.full(batch, width) if counts_B is None else counts_B
        slots_B1 = torch.as_tensor(list(slots))[:, None]
        position_BN = torch.from_numpy(kv.lengths[list(slots)])[:, None] + torch.arange(width)
        real_BN = torch.arange(width) < torch.from_numpy(np.asarray(counts))[:, None]
        self._memory_SL[slots_B1.expand(-1, width)[real_BN], position_BN[real_BN]] = tokens_BN[real_BN]
        before_BN = self._memory_SL[slots_B1, (position_BN - 1).clamp_min(0)]
        before_BN = torch.where(position_BN > 0, before_BN, 0).clamp_min(0)
        one_hot = torch.nn.functional.one_hot
        pair = torch.cat([one_hot(before_BN, self.vocab_size), one_hot(tokens_BN, self.vocab_size)], -1)
        hidden = pair.double() * real_BN[..., None]
        states = DecoderStates(hidden_BNH=hidden, taps_BNF=hidden.clone() if taps else None)
        return keep_newest(states, counts_B) if newest else states

    def logits(self, hidden_XH: torch.Tensor) -> torch.Tensor:
        before_X = hidden_XH[:, : self.vocab_size].argmax(-1)
        token_X = hidden_XH[:, self.vocab_size :].argmax(-1)
        return self.table_VVV[before_X, token_X].clone()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.table_VVV = tensors["table"]

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"table": tuple(self.table_VVV.shape)}


class SharedMemoryKV(KVSlots):
    """KVSlots that also carries the Markov decoder's memory through prefix copies."""

    def __init__(self, decoder: MarkovDecoder, spec: DecoderSpec, num_slots: int, max_len: int) -> None:
        super().__init__(spec, num_slots, max_len, torch.float64)
        self._decoder = decoder

    def copy_prefix(self, source_slot: int, target_slots: Sequence[int], length: int) -> None:
        super().copy_prefix(source_slot, target_slots, length)
        memory = self._decoder._memory_SL
        memory[list(target_slots), :length] = memory[source_slot, :length]

    def _copy_rows(self, source: int, rows: slice | torch.Tensor, length: int) -> None:
        """The Markov decoder keeps its memory by slot, so nothing moves."""


class TableDrafter:
    """Sampled drafts with q = table[last token]; optionally over a reduced vocabulary, or as argmax point masses."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, q_VD: torch.Tensor, num_slots: int, token_ids_D: torch.Tensor | None = None, *, greedy: bool = False
    ) -> None:
        self.q_VD = q_VD
        self.token_ids_D = token_ids_D
        self.greedy = greedy
        self.last_S = np.zeros(num_slots, np.int64)
        self.calls = 0

    @property
    def point_mass(self) -> bool:
        return self.greedy

    @property
    def runs_context(self) -> bool:
        """Where it taps the policy."""
        return bool(self.taps)

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        for slot, request in zip(slots, requests, strict=True):
            self.last_S[slot] = request.prompt.token_ids[-1]

    def propose(self, slots: Sequence[int], lengths_B: np.ndarray, noise: Noise) -> Draft:
        self.calls += 1
        last_B = torch.from_numpy(self.last_S[list(slots)])
        columns, tokens, values = [], [], []
        for depth in range(int(lengths_B.max())):
            q_BD = self.q_VD[last_B]
            if self.greedy:
                column_B = q_BD.argmax(-1)
            else:
                column_B = Law.from_weights(q_BD).draw(noise.draft_uniforms(depth))
            last_B = column_B if self.token_ids_D is None else self.token_ids_D[column_B]
            columns.append(column_B)
            tokens.append(last_B)
            values.append(q_BD)
        probs = DraftProbs(
            values_BKV=torch.stack(values, 1), columns_BK=torch.stack(columns, 1), token_ids_V=self.token_ids_D
        )
        return Draft(tokens_BK=torch.stack(tokens, 1), counts_B=lengths_B.copy(), probs=None if self.greedy else probs)

    def observe(
        self, slots: Sequence[int], tokens_BN: torch.Tensor, counts_B: np.ndarray, taps_BNF: torch.Tensor | None
    ) -> None:
        self.last_S[list(slots)] = tokens_BN.numpy()[np.arange(len(slots)), counts_B - 1]

    def release(self, slots: Sequence[int]) -> None:
        self.last_S[list(slots)] = 0

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.q_VD = weights["q"]


class OracleDrafter(TableDrafter):
    """Point-mass drafts read from a script: what the rollout with this id will emit, or always something else."""

    def __init__(self, script: Callable[[RolloutId, int], int], num_slots: int) -> None:
        super().__init__(torch.zeros(1, 1), num_slots, greedy=True)
        self.script = script
        self.ids: dict[int, RolloutId] = {}
        self.made_S = np.zeros(num_slots, np.int64)

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        for slot, request in zip(slots, requests, strict=True):
            self.ids[slot] = request.rollout_id
            self.made_S[slot] = 0 if request.given is None else request.given.length

    def propose(self, slots: Sequence[int], lengths_B: np.ndarray, noise: Noise) -> Draft:
        self.calls += 1
        tokens = torch.zeros(len(slots), int(lengths_B.max()), dtype=torch.int64)
        for b, slot in enumerate(slots):
            for depth in range(int(lengths_B[b])):
                tokens[b, depth] = self.script(self.ids[slot], int(self.made_S[slot]) + depth)
        return Draft(tokens_BK=tokens, counts_B=lengths_B.copy(), probs=None)

    def observe(
        self, slots: Sequence[int], tokens_BN: torch.Tensor, counts_B: np.ndarray, taps_BNF: torch.Tensor | None
    ) -> None:
        self.made_S[list(slots)] += counts_B


def markov_table(vocab_size: int = 6, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random logits for every pair of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, dtype=torch.float64, generator=generator) * scale


class TextWatch:
    """Stop strings over an alphabet where token i is the letter chr(97 + i)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.text = ""

    def push(self, token_id: int) -> str | None:
        self.text += chr(97 + token_id)
        return next((stop for stop in self.stops if self.text.endswith(stop)), None)


def make_engine(
    table: torch.Tensor,
    *,
    num_slots: int = 8,
    max_len: int = 64,
    drafter: object | None = None,
    draft_length: DraftLength | int = 0,
    **parts: object,
) -> tuple[NativeGenerator, MarkovDecoder]:
    decoder = MarkovDecoder(table, num_slots, max_len)
    spec = DecoderSpec.from_config({**TINY, "vocab_size": table.shape[0]})

    def apply_update(update: WeightUpdate) -> RefitReport:
        decoder.load(dict(update.chunks))
        return RefitReport(version=update.version, draft_version=0, checksum="0" * 8, draft_checksum=None)

    engine = NativeGenerator(
        EngineParts(
            decoder=decoder,
            kv=SharedMemoryKV(decoder, spec, num_slots, max_len),
            vocab_size=table.shape[0],
            max_len=max_len,
            device=torch.device("cpu"),
            dtype=torch.float64,
            drafter=drafter,  # type: ignore[arg-type]
            draft_length=FixedLength(draft_length) if isinstance(draft_length, int) else draft_length,
            stop_watch=TextWatch,
            **parts,  # type: ignore[arg-type]
        ),
        num_slots=num_slots,
        apply_update=apply_update,
    )
    return engine, decoder


def make_requests(
    num_draws: int,
    num_siblings: int = 1,
    *,
    prompt: Sequence[int] = (0, 1),
    first_draw: int = 0,
    **params: object,
) -> list[Request]:
    sampling = SamplingParams(**{"max_new_tokens": 6, **params})  # type: ignore[arg-type]
    requests = []
    for draw in range(first_draw, first_draw + num_draws):
        made = Prompt(id=f"row/{draw}", token_ids=np.array(prompt, np.int32), text="")
        requests += [
            Request(rollout_id=RolloutId(draw, sibling), prompt=made, params=sampling)
            for sibling in range(num_siblings)
        ]
    return requests


def generate(engine: NativeGenerator, requests: Sequence[Request]) -> dict[RolloutId, Rollout]:
    engine.submit(requests)
    done: dict[RolloutId, Rollout] = {}
    while rollouts := engine.collect():
        done.update({rollout.request_id: rollout for rollout in rollouts})
    return done


def sequences(rollouts: Mapping[RolloutId, Rollout]) -> dict[RolloutId, list[int]]:
    return {key: rollout.token_ids.tolist() for key, rollout in sorted(rollouts.items())}
