"""Teacher forcing for the audit: the learner's transformers model over one rollout, exactly and rounded.

Logits leave the head in fp32 whatever the body computes in, as in the engine: bf16 logits are an eighth apart at the
sizes that occur, which moves probabilities by 13 %.

Axes: T tokens of a rollout, S prompt and completion, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from leadout.audit.observe import Scores
from leadout.records import Rollout


class TeacherForced:
    """A `Score` from a causal language model of transformers.

    Example: ``TeacherForced(fp32_model, bf16_model)`` for a bf16 engine, ``TeacherForced(fp64_model)`` in float64.
    """

    def __init__(self, exact: Any, rounded: Any | None = None) -> None:
        """`exact` in fp32 (or fp64) and, for a bf16 generator, the same model in bf16; both in evaluation mode."""
        self._models = [_Headed(exact)] if rounded is None else [_Headed(exact), _Headed(rounded)]

    def __call__(self, rollouts: Sequence[Rollout]) -> Iterator[Scores]:
        """Logits of each rollout, one at a time."""
        for rollout in rollouts:
            passes = [model.logits(rollout) for model in self._models]
            yield Scores(exact_TV=passes[0], rounded_TV=passes[1] if len(passes) > 1 else None)


class _Headed:
    """A model with its head widened once."""

    def __init__(self, model: Any) -> None:
        self._body = model.get_decoder()
        head = model.get_output_embeddings()
        wide = torch.float64 if head.weight.dtype is torch.float64 else torch.float32
        self._weight_VH = head.weight.detach().to(wide)
        bias = getattr(head, "bias", None)
        self._bias_V = None if bias is None else bias.detach().to(wide)

    @torch.inference_mode()
    def logits(self, rollout: Rollout) -> torch.Tensor:
        """f32[T, V] (f64 for float64 models), on the CPU."""
        tokens_S = np.concatenate((rollout.prompt.token_ids, rollout.token_ids)).astype(np.int64)
        device = self._weight_VH.device
        hidden_1SH = self._body(input_ids=torch.from_numpy(tokens_S)[None].to(device), use_cache=False)[0]
        first = rollout.prompt.token_ids.shape[0] - 1
        hidden_TH = hidden_1SH[0, first:-1].to(self._weight_VH.dtype)
        return torch.nn.functional.linear(hidden_TH, self._weight_VH, self._bias_V).cpu()
