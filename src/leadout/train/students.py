"""Stage train, drafter: what can be taught. A student turns chains of a rollout into draft logits, depth by depth.

`DraftTrainer` and `AcceptanceMeter` see students only: a draft head is unrolled on the policy's states, a small model
reads the tokens themselves. Everything about losses, optimizer and measurement is theirs.

Axes: B rollouts, L query columns, H student width, N some of the columns, V draft vocabulary.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from leadout.batch import PolicyForward, PolicyOutput, StudentForward, TrainBatch
from leadout.errors import ModelError
from leadout.models.draft_head import DraftHead
from leadout.models.head_io import read_head, write_head
from leadout.models.loading import load_policy
from leadout.models.rope import RopeSpec
from leadout.records import DraftSpec
from leadout.storage import writing
from leadout.train.chains import Chains, unroll


class DraftStudent(Protocol):
    """A drafter that learns."""

    @property
    def module(self) -> nn.Module:
        """Its parameters; the state dict is what a generator is sent."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Policy layers whose inputs it needs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights: float32 or float64."""
        ...

    @property
    def token_ids_V(self) -> Tensor | None:
        """Policy ids of the draft vocabulary; None for the identity."""
        ...

    @property
    def spec(self) -> DraftSpec:
        """What is fixed for its life."""
        ...

    def states(
        self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, chains: Chains, steps: int
    ) -> list[Tensor]:
        """Per depth the states [B, L, H] at every query column; see `Chains.valid_BL` for which count."""
        ...

    def logits(self, states_NH: Tensor, forward: PolicyForward) -> Tensor:
        """Draft logits [N, V]."""
        ...

    def frozen_copy(self) -> Self:
        """As it is now; does not learn."""
        ...

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and a generator can read."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights of a folder; raises ModelError for those of another student."""
        ...


class HeadStudent:
    """A draft head, trained along its own unrolled drafts."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head if head.dtype in (torch.float32, torch.float64) else head.float()

    @property
    def module(self) -> nn.Module:
        """The head."""
        return self.head

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's layers."""
        return self.head.spec.layer_ids

    @property
    def dtype(self) -> torch.dtype:
        """The head's."""
        return self.head.dtype

    @property
    def token_ids_V(self) -> Tensor | None:
        """The head's map."""
        return self.head.draft_token_ids()

    @property
    def spec(self) -> DraftSpec:
        """The head's."""
        return self.head.draft_spec()

    def states(
        self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, chains: Chains, steps: int
    ) -> list[Tensor]:
        """The unrolled layer's outputs."""
        assert output.taps_TF is not None, "the policy ran without the drafter's taps"
        taps_TF = output.taps_TF.detach().to(self.dtype)
        return unroll(self.head, chains, taps_TF, batch.token_ids_T, forward.embedding_VH, steps)

    def logits(self, states_NH: Tensor, forward: PolicyForward) -> Tensor:
        """By its own output matrix, or the policy's."""
        return self.head.logits(states_NH, forward.head_rows(None).detach())

    def frozen_copy(self) -> HeadStudent:
        """A copy without gradients."""
        return HeadStudent(copy.deepcopy(self.head).requires_grad_(False))

    def save(self, folder: Path) -> None:
        """Config and tensors."""
        write_head(self.head, folder)

    def load(self, folder: Path) -> None:
        """Raises ModelError for a head of another shape."""
        saved = read_head(folder)
        if saved.method != self.head.method or saved.spec != self.head.spec:
            raise ModelError(f"{folder}: expected the drafter of this recipe, got one of another shape")
        self.head.load_state_dict(saved.state_dict())


class SmallModelStudent:
    """A smaller language model, distilled on the policy's rollouts; its law at a token does not depend on the round."""

    def __init__(self, forward: StudentForward, rope: RopeSpec, *, policy_vocab_size: int) -> None:
        """`forward`: runs the small model over packs, its weights in float32 or float64."""
        self._forward = forward
        self._rope = rope
        self._policy_vocab_size = policy_vocab_size
        self._size = min(policy_vocab_size, forward.head_rows(None).shape[0])

    @property
    def module(self) -> nn.Module:
        """The small model."""
        return self._forward.model

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._forward.head_rows(None).dtype

    @property
    def token_ids_V(self) -> Tensor | None:
        """The first ids where its vocabulary is the shorter one."""
        return None if self._size == self._policy_vocab_size else torch.arange(self._size)

    @property
    def spec(self) -> DraftSpec:
        """No taps; the vocabulary it shares with the policy."""
        return small_model_spec(self._rope, self._size)

    def states(
        self, batch: TrainBatch, output: PolicyOutput, forward: PolicyForward, chains: Chains, steps: int
    ) -> list[Tensor]:
        """The same states at every depth."""
        states_BLH = self._forward.response_states(batch)[chains.target_BL]
        return [states_BLH] * steps

    def logits(self, states_NH: Tensor, forward: PolicyForward) -> Tensor:
        """By the small model's output matrix, with gradients to it."""
        head: Any = self._forward.model
        logits_NV: Tensor = head.get_output_embeddings()(states_NH)
        return logits_NV[:, : self._size]

    def frozen_copy(self) -> SmallModelStudent:
        """A copy without gradients."""
        frozen = copy.deepcopy(self._forward)
        frozen.model.requires_grad_(False)
        return SmallModelStudent(frozen, self._rope, policy_vocab_size=self._policy_vocab_size)

    def save(self, folder: Path) -> None:
        """A Hugging Face folder; the tokenizer stays where it is."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model: Any = self._forward.model
        with writing(folder):
            model.save_pretrained(temporary)
        for file in sorted(temporary.iterdir()):
            file.replace(folder / file.name)
        temporary.rmdir()

    def load(self, folder: Path) -> None:
        """Raises ModelError for a model of another shape."""
        saved, own = load_policy(folder, self.dtype).state_dict(), self.module.state_dict()
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
            raise ModelError(f"{folder}: expected the drafter of this recipe, got a model of another shape")
        self.module.load_state_dict(saved)


def small_model_spec(rope: RopeSpec, vocab_size: int) -> DraftSpec:
    """What generator and learner of a small model agree on."""
    return DraftSpec(method="small_model", layer_ids=(), vocab_size=vocab_size, vocab_map_crc32=0, rope=rope.text)
