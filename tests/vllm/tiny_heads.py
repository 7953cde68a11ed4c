"""A small random policy on disk and heads for it in every form that the writer knows, each taught a little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leadout.models.draft_head import policy_shape
from leadout.models.eagle3 import Eagle3Head, initial_head
from leadout.models.eagle3_io import write_eagle3, write_speculators
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.spec import DecoderSpec
from leadout.records import Rollout
from leadout.train.settings import DraftSettings
from tests.train.learner_fakes import learn_by_heart, make_forward

VOCAB = 97
"""Not a multiple of what vLLM pads a vocabulary to."""
DRAFTABLE = tuple(i for i in range(VOCAB) if i % 4 != 1)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}


def policy(folder: Path, *, rope: dict[str, Any] | None = None) -> Any:
    """A random Llama whose logits are far from flat; vLLM's attention wants heads of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.15,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a head is made and written."""

    spec: dict[str, Any] = field(default_factory=dict)
    """Changes to the spec."""
    reduced: bool = True
    own_embeddings: bool = False
    speculators: bool = False
    rope: dict[str, Any] | None = None
    """Of the policy."""

    @property
    def speculation(self) -> dict[str, Any]:
        """What vLLM has to be told beyond the folder."""
        return {"parallel_drafting": True} if "mask_token_id" in self.spec else {}


_ONE_NORM = {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True}
FORMS = {
    "reduced vocabulary": Form(),
    "whole vocabulary": Form(reduced=False),
    "first and last states": Form(spec={"layer_ids": (0, 2, 4)}),
    "two states": Form(spec={"layer_ids": (1, 3)}),
    "one norm over the states, normed residual": Form(spec=_ONE_NORM),
    "no norm of the states": Form(spec={"fc_norm": False}),
    "embeddings of its own": Form(own_embeddings=True),
    "scaled rotation": Form(rope=LLAMA3),
    "speculators": Form(speculators=True),
    "speculators, two states": Form(speculators=True, spec={"layer_ids": (1, 3)}),
    "speculators, one norm, normed residual, whole vocabulary": Form(speculators=True, spec=_ONE_NORM, reduced=False),
    "speculators, scaled rotation": Form(speculators=True, rope=LLAMA3),
    "speculators, parallel": Form(speculators=True, spec={"mask_token_id": VOCAB - 1}),
}


def head_of(form: Form, model: Any) -> Eagle3Head:
    """Untrained; norms are not all ones, since a norm that is left out would not show."""
    spec = DecoderSpec.from_config(model.config.to_dict())
    shape = Eagle3Spec(
        **policy_shape(spec),
        draft_vocab_size=len(DRAFTABLE) if form.reduced else VOCAB,
        layer_ids=(1, 2, 3),
    )
    shape = replace(shape, **form.spec)
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor(DRAFTABLE) if form.reduced else None
    head = initial_head(shape, model.state_dict(), generator, token_ids_V=ids)
    if form.own_embeddings:
        table_PH = torch.randn(VOCAB, shape.hidden_size, generator=generator)
        bare, head = head, Eagle3Head(shape, own_embeddings=True)
        head.load_state_dict(bare.state_dict() | {"embed_tokens.weight": table_PH})
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter *= 1.0 + 0.5 * torch.rand(parameter.shape, generator=generator)
    return head


def teach(
    head: Eagle3Head,
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    steps: int,
    passes: int = 1,
    learning_rate: float = 1e-2,
) -> Eagle3Head:
    """Learn some rollouts, so that drafts are sometimes accepted; `passes` updates per pass of the policy."""
    settings = DraftSettings(
        learning_rate=learning_rate, warmup_steps=1, micro_rollouts=8, passes=passes, measure_tokens=0, autocast=False
    )
    learn_by_heart(head, make_forward(model, chunk_size=512), rollouts, settings, steps)
    return head.requires_grad_(False)


def write(form: Form, head: Eagle3Head, folder: Path, model: Any) -> None:
    """In the form's layout."""
    if form.speculators:
        embedding_PH = model.get_input_embeddings().weight
        write_speculators(head, folder, embedding_PH, policy="policy", drafts=3)
    else:
        write_eagle3(head, folder)
