"""One loaded policy, and generators over it for the bench: any drafter, any number of rows, any accept rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from leadout.audit.plan import DEFAULT_PROMPTS
from leadout.bench.full_drafts import FullDrafts
from leadout.bench.workload import cut_prompts, make_prompt
from leadout.build.drafter import drafter_bytes_per_slot, load_head, make_drafter, new_head
from leadout.build.generator import DTYPES, GIB, make_decoder
from leadout.build.process import prepare_process
from leadout.config import BenchMethod, Draft, HeadMethod, SpeculativeConfig, head_of
from leadout.data.prompts import PromptFormat
from leadout.data.prompts import make_prompt as render_prompt
from leadout.data.rows import Row
from leadout.draft_length.controller import FixedLength
from leadout.drafters.combined import CombinedDrafter
from leadout.drafters.history import HistoryDrafter
from leadout.drafters.noisy_policy import NoisyPolicyDrafter
from leadout.errors import CapacityError, ConfigError, ModelError
from leadout.interfaces import Drafter
from leadout.models.draft_head import DraftHead
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, read_spec, resolve
from leadout.records import IntArray, Prompt, RefitReport, WeightUpdate
from leadout.rollout.accept import AcceptRule, verify
from leadout.rollout.engine import NativeGenerator
from leadout.rollout.parts import EngineParts
from leadout.text import TextCodec

DRAFT_VOCABULARY = 8192
"""Of an untrained head, where the policy's is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterChoice:
    """A drafter of the bench."""

    method: BenchMethod
    draft: str | None = None
    """Folder of a head (None: an untrained one), or of a small model."""
    rule: AcceptRule = verify
    """Another rule than the exact one only to set the acceptance."""
    full: bool = False
    """Fill looked-up drafts up to the length asked for, so that every round has exactly k."""

    @property
    def head(self) -> HeadMethod | None:
        """The kind of draft head, if one drafts."""
        return head_of(self.method)


class BenchMachine:
    """The policy, loaded once for every cell."""

    def __init__(self, model: str, *, max_len: int, dtype: str = "bfloat16", threads: int | None = None) -> None:
        """`max_len`: tokens of the longest row of any cell. Raises ModelError or ConfigError with one line."""
        self.threads = threads or len(os.sched_getaffinity(0))
        prepare_process(self.threads)
        self.path: Path = resolve(model)
        self.spec = read_spec(self.path)
        if max_len > self.spec.max_position_embeddings:
            raise ConfigError(
                f"--context and --new-tokens: expected at most {self.spec.max_position_embeddings} tokens in a row, "
                f"the model's context, got {max_len}"
            )
        self.codec = TextCodec.from_pretrained(self.path)
        self.weights = dict(iter_weights(self.path))
        self.decoder = make_decoder(self.spec, self.weights, dtype=dtype, max_len=max_len, device=torch.device("cpu"))
        self._texts: list[IntArray] | None = None
        self._heads: dict[tuple[HeadMethod, str | None], DraftHead] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the policy's weights in the generator's type."""
        size = DTYPES["bfloat16"].itemsize if self.decoder.dtype is torch.bfloat16 else self.decoder.dtype.itemsize
        return size * sum(tensor.numel() for tensor in self.weights.values())

    def texts(self) -> list[IntArray]:
        """Token ids of the built-in prompts, rendered."""
        if self._texts is None:
            rows = [
                Row(id=f"bench/{i}", where=f"prompt {i}", columns={"prompt": t}) for i, t in enumerate(DEFAULT_PROMPTS)
            ]
            form = PromptFormat(answer_key=None)
            self._texts = [render_prompt(row, self.codec, form).token_ids for row in rows]
        return self._texts

    def prompts(self, count: int, length: int) -> tuple[Prompt, ...]:
        """Different prompts of exactly this length."""
        return cut_prompts(self.texts(), count, length)

    def head(self, folder: str | None, method: HeadMethod = "eagle3") -> DraftHead:
        """A trained head from its folder, or an untrained one."""
        key = method, folder
        if key not in self._heads:
            self._heads[key] = (
                self._untrained_head(method)
                if folder is None
                else load_head(folder, self.weights, method, rope=self.spec.rope, option="--draft")
            )
        return self._heads[key]

    def _untrained_head(self, method: HeadMethod) -> DraftHead:
        vocab = self.spec.vocab_size
        room = self.decoder.max_len - 1
        prompts = [make_prompt(ids[-room:].tolist(), i) for i, ids in enumerate(self.texts())]
        section = Draft(vocab_size=DRAFT_VOCABULARY if vocab > DRAFT_VOCABULARY else None)
        return new_head(section, self.decoder, self.weights, prompts, seed=0, temperature=1.0, keep=(), method=method)

    def check_room(self, choice: DrafterChoice, *, rows: int, max_len: int, width: int = 1) -> None:
        """Before memory is taken: raises CapacityError when caches, and logits of `width` tokens a row, do not fit."""
        each = KVSlots.bytes_per_slot(self.spec, max_len, self.decoder.dtype)
        if choice.method == "noisy_policy":
            each *= 2
        elif choice.method != "none":
            each += drafter_bytes_per_slot(self._speculation(choice), self.decoder, self._head_of(choice))
        needed = rows * (each + width * self.spec.vocab_size * torch.float32.itemsize)
        free = psutil.virtual_memory().available
        if needed > free:
            raise CapacityError(
                f"{rows} rows of {max_len} tokens need {needed / GIB:.1f} GiB for caches and logits, and "
                f"{free / GIB:.1f} GiB are free; lower --batch-sizes, --context or --new-tokens"
            )

    def generator(self, choice: DrafterChoice, *, rows: int, max_len: int) -> NativeGenerator:
        """A generator for cells of up to `rows` rows of up to `max_len` tokens; make another for another cell.

        Raises CapacityError for more than the memory holds.
        """
        self.check_room(choice, rows=rows, max_len=max_len)

        def new_kv() -> KVSlots:
            return self.decoder.new_kv(rows, max_len)

        drafter = self._drafter(choice, rows, new_kv)
        return NativeGenerator(
            EngineParts(
                decoder=self.decoder,
                kv=new_kv(),
                vocab_size=self.spec.vocab_size,
                max_len=max_len,
                device=self.decoder.device,
                dtype=self.decoder.dtype,
                drafter=FullDrafts(drafter) if choice.full and drafter is not None and drafter.point_mass else drafter,
                history=drafter if isinstance(drafter, HistoryDrafter | CombinedDrafter) else None,
                draft_length=FixedLength(0),
                rule=choice.rule,
            ),
            num_slots=rows,
            apply_update=_refuse_update,
        )

    def _drafter(self, choice: DrafterChoice, rows: int, new_kv: Callable[[], KVSlots]) -> Drafter | None:
        if choice.method == "none":
            return None
        if choice.method == "noisy_policy":
            return NoisyPolicyDrafter(
                self.decoder, new_kv(), vocab_size=self.spec.vocab_size, hidden_size=self.spec.hidden_size
            )
        return make_drafter(self._speculation(choice), self.decoder, self._head_of(choice), self.codec, num_slots=rows)

    def _head_of(self, choice: DrafterChoice) -> DraftHead | None:
        return None if choice.head is None else self.head(choice.draft, choice.head)

    def _speculation(self, choice: DrafterChoice) -> SpeculativeConfig:
        assert choice.method != "none", "there is a drafter"
        assert choice.method != "noisy_policy", "it is the audit's own"
        return SpeculativeConfig(method=choice.method, model=choice.draft)


def check_draft(method: BenchMethod, draft: str | None) -> None:
    """Before anything is loaded: raises ConfigError or ModelError when method and folder do not go together."""
    small = method.endswith("small_model")
    if small and draft is None:
        raise ConfigError(f"--method {method} needs --draft, the folder of a model with the policy's tokenizer")
    if draft is None:
        return
    if not small and head_of(method) is None:
        raise ConfigError(f"--method {method} drafts without a model, got --draft {draft}; leave one of them out")
    if not small and not Path(draft).is_dir():
        raise ModelError(f"--draft: expected the folder of a draft head, got {draft}, which is not there")


def _refuse_update(update: WeightUpdate) -> RefitReport:
    raise ConfigError("a generator of the bench keeps its weights")
