"""A draft head inside the engine: cached, batched, sampled with its q kept.

Per row it keeps a cache of true entries (feature of the token before, token) and a backlog of entries not yet run.
`observe` only appends to the backlog, so while speculation is off the drafter notes a step and copies many at once;
`propose` first runs the backlog, which overwrites whatever earlier drafts left in the cache, then drafts one by one;
a parallel head drafts in the pass that runs the backlog. Siblings admitted together share the run over their prompt.

Axes: B rows, K drafts, M backlog entries, F tapped width, H head width, G key-value heads, D head dimension, V draft
vocabulary, S slots, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from leadout.drafters.head_cache import HeadCache
from leadout.drafters.waiting import WaitingEntries
from leadout.errors import ModelError, RefitError
from leadout.interfaces import Draft, DraftProbs, Noise
from leadout.models.draft_head import DraftHead, DraftHeadSpec
from leadout.models.sampling import Law, ParamsBatch, filter_weights, tempered_weights
from leadout.records import Request, SamplingParams

_NOT_FINITE = (
    "the draft head gives logits that are not finite: its weights are broken; start it anew or from "
    "another checkpoint, or set rollout.speculative_config: null"
)


@dataclass(slots=True, eq=False)
class _Prompt:
    """Entries of a prompt that several rows share and none has run yet."""

    tokens_M: torch.Tensor
    taps_MF: torch.Tensor
    slots: set[int]


class HeadDrafter:
    """Implements `leadout.interfaces.Drafter`."""

    def __init__(
        self,
        head: DraftHead,
        *,
        policy_embedding: Callable[[], torch.Tensor],
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        greedy: bool = False,
        temperature: float = 1.0,
        policy_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`temperature` is relative to each row's own; `greedy` proposes argmax drafts as point masses.

        `policy_embedding` and `policy_logits` serve heads without embeddings or output matrix of their own.
        """
        self._head = head.to(device=device, dtype=dtype).requires_grad_(False).eval()
        self._policy_embedding = policy_embedding
        self._cache = HeadCache(
            self._head,
            num_slots=num_slots,
            max_len=max_len,
            dtype=dtype,
            device=device,
            policy_logits=policy_logits,
        )
        self._greedy = greedy
        self._temperature = temperature
        self._device = device
        self._token_ids_V = self._head.draft_token_ids()
        self._params: dict[int, SamplingParams] = {}
        self._batch: tuple[list[int], ParamsBatch] | None = None
        self._prompts: list[_Prompt] = []
        self._waiting = WaitingEntries(num_slots, max_len, self._head.spec.fused_size, dtype=dtype, device=device)
        self.version = 0

    @staticmethod
    def bytes_per_slot(spec: DraftHeadSpec, max_len: int, dtype: torch.dtype) -> int:
        """Memory of one slot in bytes: cached keys and values, and a row's states where none of them has been run."""
        waiting = WaitingEntries.bytes_per_slot(spec.fused_size, max_len, dtype)
        return HeadCache.bytes_per_slot(spec, max_len, dtype) + waiting

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's layers."""
        return self._head.spec.layer_ids

    @property
    def runs_context(self) -> bool:
        """The head."""
        return True

    @property
    def point_mass(self) -> bool:
        """Whether drafts are greedy."""
        return self._greedy

    @property
    def backlog_bytes(self) -> int:
        """Memory of entries waiting to be run."""
        return self._waiting.nbytes

    def admit(self, slots: Sequence[int], requests: Sequence[Request], prompt_taps_PF: torch.Tensor | None) -> None:
        """Remember the prompt's entries; nothing runs before the first draft."""
        assert prompt_taps_PF is not None, "the engine taps what `taps` asks for"
        context = [requests[0].prompt.token_ids]
        if requests[0].given is not None:
            context.append(requests[0].given.token_ids)
        tokens_P = torch.from_numpy(np.concatenate(context).astype(np.int64)).to(self._device)
        self._batch = None
        for slot, request in zip(slots, requests, strict=True):
            self._params[slot] = request.params
        self._waiting.open(slots, prompt_taps_PF[-1])
        self._cache.lengths[list(slots)] = 0
        if tokens_P.numel() > 1:
            # The last prompt state pairs with the first generated token, which siblings do not share.
            self._prompts.append(_Prompt(tokens_P[1:], prompt_taps_PF[:-1].clone(), set(slots)))

    def observe(
        self,
        slots: Sequence[int],
        tokens_BN: torch.Tensor,
        counts_B: npt.NDArray[np.int64],
        taps_BNF: torch.Tensor | None,
    ) -> None:
        """Append entries to the backlog."""
        self._waiting.add(slots, tokens_BN, counts_B, taps_BNF)

    def propose(self, slots: Sequence[int], lengths_B: npt.NDArray[np.int64], noise: Noise) -> Draft:
        """Run the backlog, then draft."""
        self._run_prompts(slots)
        params = self._draft_params(slots)
        num_drafts = int(lengths_B.max())
        if self._cache.drafts_at_once and not (self._greedy or params.any_filters or params.any_greedy):
            columns_BK, tokens_BK, values_BKV = self._draft_at_once(slots, params, noise, num_drafts)
        else:
            columns_BK, values_BKV = self._draft_one_by_one(slots, params, noise, num_drafts)
            tokens_BK = columns_BK if self._token_ids_V is None else self._token_ids_V[columns_BK]
        probs = None
        if not self._greedy:
            probs = DraftProbs(values_BKV=values_BKV, columns_BK=columns_BK, token_ids_V=self._token_ids_V)
        return Draft(tokens_BK=tokens_BK, counts_B=lengths_B.copy(), probs=probs)

    def _draft_at_once(
        self, slots: Sequence[int], params: ParamsBatch, noise: Noise, num_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns and tokens, i64[B, K], and laws, f32[B, K, V], of all drafts from one native call."""
        uniforms_BK = torch.stack([noise.draft_uniforms(depth) for depth in range(num_drafts)], 1)
        counts_B = self._waiting.take(slots)
        drafts = self._cache.draft(
            slots,
            self._waiting.tokens_SM,
            self._waiting.taps_SMF,
            counts_B,
            self._head.embedding_table(self._policy_embedding()),
            uniforms_BK,
            params.temperature_X,
            self._token_ids_V,
        )
        if drafts is None:
            raise ModelError(_NOT_FINITE)
        return drafts

    def _draft_one_by_one(
        self, slots: Sequence[int], params: ParamsBatch, noise: Noise, num_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns, i64[B, K], and laws, [B, K, V]."""
        known = self._run_backlog(slots, num_drafts)
        columns, values = [], []
        for depth in range(num_drafts):
            if depth < len(known):
                hidden_BH = known[depth]
            column_B, probs_BV = self._choose(self._cache.logits(hidden_BH), params, noise, depth)
            columns.append(column_B)
            values.append(probs_BV)
            if len(known) <= depth + 1 < num_drafts:
                tokens_B = column_B if self._token_ids_V is None else self._token_ids_V[column_B]
                hidden_BH = self._cache.extend(slots, hidden_BH, self._embed(tokens_B), depth)
        return torch.stack(columns, 1), torch.stack(values, 1)

    def _choose(
        self, logits_BV: torch.Tensor, params: ParamsBatch, noise: Noise, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft per row and the law it was drawn from (empty when greedy)."""
        if not bool(torch.isfinite(logits_BV.sum())):
            raise ModelError(_NOT_FINITE)
        if self._greedy:
            return logits_BV.argmax(-1), logits_BV[:, :0]
        if params.any_filters or params.any_greedy:
            # q may be any known law; filtering it like p wastes fewer drafts on tokens p cannot emit.
            law = Law.from_weights(filter_weights(tempered_weights(logits_BV, params), params))
        else:
            law = Law.from_logits(logits_BV, params)
        return law.draw(noise.draft_uniforms(depth)), law.probs(logits_BV.shape[-1])

    def _draft_params(self, slots: Sequence[int]) -> ParamsBatch:
        """The rows' sampling with the draft's relative temperature; made anew only when the rows change."""
        if self._batch is not None and self._batch[0] == list(slots):
            return self._batch[1]
        rows = [self._params[slot] for slot in slots]
        if self._temperature != 1.0:
            rows = [replace(row, temperature=row.temperature * self._temperature) for row in rows]
        batch = ParamsBatch.of(rows, self._device)
        self._batch = (list(slots), batch)
        return batch

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._head.embed(tokens, self._policy_embedding())

    def _run_prompts(self, slots: Sequence[int]) -> None:
        """Run the shared prompts of these rows once each and copy the cache to the siblings."""
        wanted = set(slots)
        for prompt in [p for p in self._prompts if p.slots & wanted]:
            owner, *others = sorted(prompt.slots)
            counts = np.array([prompt.tokens_M.numel()], np.int64)
            self._cache.run([owner], prompt.taps_MF[None], self._embed(prompt.tokens_M)[None], counts)
            self._cache.copy(owner, others)
            self._prompts.remove(prompt)

    def _run_backlog(self, slots: Sequence[int], num_drafts: int) -> list[torch.Tensor]:
        """Run what was observed since the last draft; outputs [B, H] by depth: the newest entry's, or all at once."""
        index_B = torch.as_tensor(list(slots), device=self._device)
        counts_B = self._waiting.take(slots)
        width = int(counts_B.max())
        taps_BMF = self._waiting.taps_SMF[index_B, :width]
        embeddings_BMH = self._embed(self._waiting.tokens_SM[index_B, :width])
        if self._head.parallel:
            hidden_BKH = self._cache.run_parallel(slots, taps_BMF, embeddings_BMH, counts_B, num_drafts)
            return list(hidden_BKH.unbind(1))
        return [self._cache.run(slots, taps_BMF, embeddings_BMH, counts_B)]

    def release(self, slots: Sequence[int]) -> None:
        """Forget the rows."""
        for slot in slots:
            self._params.pop(slot, None)
        for prompt in self._prompts:
            prompt.slots.difference_update(slots)
        self._prompts = [prompt for prompt in self._prompts if prompt.slots]
        self._waiting.release(slots)

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights. Raises RefitError, before anything changed, when names or shapes differ."""
        own = self._head.state_dict()
        wrong = sorted(set(own) ^ set(weights))
        wrong += sorted(n for n in set(own) & set(weights) if own[n].shape != weights[n].shape)
        if wrong:
            raise RefitError(f"draft weights do not fit this drafter: {', '.join(wrong[:5])}")
        self._head.load_state_dict(dict(weights))
        self._token_ids_V = self._head.draft_token_ids()
        self._cache.pack()
        self.version = version
