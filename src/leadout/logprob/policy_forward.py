"""Stage logprob: the policy's forward pass over a pack, used by the logprob pass and by training alike.

It runs a Hugging Face causal language model over the flat pack, so that a prompt is computed once for all its
completions: its layers in native code (`leadout.logprob.native_body`) where there is some; else with attention of its
own (`leadout.logprob.pack_attention`) where the model calls attention through transformers' interface, else under the
pack's mask. Models whose attention takes neither get one padded row per completion. Outside native code tapped layers
are read through hooks on those layers only.

Axes: T tokens of a pack, R response tokens, B rows and S columns of the padded form, H policy width, F taps,
V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leadout.batch import PolicyOutput, TrainBatch
from leadout.errors import ModelError
from leadout.interfaces import Auditor
from leadout.logprob.native_body import NativeBody
from leadout.logprob.pack import block_mask, pack_groups, padded_rows
from leadout.logprob.pack_attention import NAME, PackLayout, layout_pays, use_pack_attention
from leadout.logprob.recompute import token_logprobs
from leadout.models.native.output_head import NativeHead
from leadout.records import FloatArray, Group

logger = logging.getLogger(__name__)

SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Config fields of models whose logits are more than the output matrix times the last hidden state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """How the pass is run."""

    temperature: float
    """The sampling temperature, > 0."""
    max_completions: int = 8
    """Completions of a pack."""
    chunk_size: int = 1024
    """Positions whose full-vocabulary logits exist at once."""
    autocast: bool = True
    """Matrix products of the body in bfloat16."""
    layers: Literal["best", "layout", "mask"] = "best"
    """Native code where it can be had and else transformers' layers, or always these: with attention in rows or under a
    mask of the pack, where the model can do both ("best": by size). Equal but for rounding."""


class PackedForward:
    """Implements `leadout.batch.PolicyForward` for a Hugging Face `AutoModelForCausalLM`."""

    def __init__(self, model: nn.Module, settings: ForwardSettings) -> None:
        """Raises ModelError for models whose logits are not plainly `lm_head(last hidden state)`."""
        self.model = model
        self.settings = settings
        hf: Any = model
        for name in SCALED_LOGITS:
            if getattr(hf.config, name, None) not in (None, 1.0):
                raise ModelError(
                    f"expected a policy without {name}, got {hf.config.model_type} with it; it is not supported"
                )
        self.decoder: Any = hf.get_decoder()
        self.head: Any = hf.get_output_embeddings()
        reason = unshared_reason(model)
        self.shared = reason is None
        if reason is not None:
            logger.warning("completions do not share their prompt's forward pass: %s", reason)
        elif getattr(self.decoder, "_supports_attention_backend", False):
            use_pack_attention(self.decoder)
        best = settings.autocast and settings.layers == "best"
        self.native = self._native_body() if best and self.shared else None
        self.native_head = NativeHead.of(self.head.weight) if best else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: float32, or float64."""
        dtype: torch.dtype = self.head.weight.dtype
        return dtype

    @property
    def embedding_VH(self) -> Tensor:
        """Input embeddings, detached."""
        weight_VH: Tensor = self.decoder.get_input_embeddings().weight.detach()
        return weight_VH

    def pack(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], first_rollout: int = 0
    ) -> list[TrainBatch]:
        """Packs of at most `max_completions`, rollouts in the order of the groups."""
        return pack_groups(
            groups,
            advantages,
            max_completions=self.settings.max_completions,
            first_rollout=first_rollout,
            dtype=self.dtype,
            device=self.head.weight.device,
        )

    def run(self, batch: TrainBatch, *, taps: tuple[int, ...] = (), auditor: Auditor | None = None) -> PolicyOutput:
        """One forward pass over a pack; gradients flow through `logprobs_R` where autograd is on.

        `auditor` is shown the logits before temperature of every rollout that it selects.
        """
        response_R = batch.response_R
        hidden_RH, taps_TF = self._states(batch, taps)
        watch = None if auditor is None else _AuditFeed(batch, auditor)
        out = token_logprobs(
            hidden_RH,
            self.head.weight,
            batch.token_ids_T[response_R],
            temperature=self.settings.temperature,
            chunk_size=self.settings.chunk_size,
            bias_V=getattr(self.head, "bias", None),
            low_gradients=self.settings.autocast and self.dtype is torch.float32,
            native=self.native_head if self.settings.layers == "best" else None,
            watch=watch,
        )
        return PolicyOutput(
            logprobs_R=out.logprobs_R,
            entropy_R=out.entropy_R,
            log_normalizer_R=out.log_normalizer_R,
            hidden_RH=hidden_RH.detach(),
            taps_TF=taps_TF,
        )

    def response_states(self, batch: TrainBatch) -> Tensor:
        """The last hidden state that each response token is drawn from, [R, H]; gradients flow where autograd is on."""
        return self._states(batch, ())[0]

    def head_rows(self, token_ids_V: Tensor | None) -> Tensor:
        """Rows of the output matrix, detached."""
        weight_VH: Tensor = self.head.weight.detach()
        return weight_VH if token_ids_V is None else weight_VH[token_ids_V]

    def _native_body(self) -> NativeBody | None:
        body = NativeBody.of(self.model)
        if isinstance(body, str):
            logger.info("the policy's layers run as transformers has them: %s", body)
            return None
        return body

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.autocast and self.dtype is torch.float32
        return torch.autocast(self.head.weight.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _states(self, batch: TrainBatch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """States of the response tokens, and the tapped ones of all."""
        if self.native is not None and self.settings.layers == "best":
            hidden_TH, taps_TF = self.native.run(batch, taps)
            return hidden_TH[batch.previous_T[batch.response_R]], taps_TF
        with self._captured(taps) as captured, self._autocast():
            if not self.shared:
                return self._unshared(batch, taps, captured)
            hidden_TH = self._shared(batch)
            taps_TF = torch.cat([captured[layer][0] for layer in taps], dim=-1) if taps else None
            return hidden_TH[batch.previous_T[batch.response_R]], taps_TF

    def _shared(self, batch: TrainBatch) -> Tensor:
        pack: dict[str, Any] = {}
        if self._in_rows(batch):
            dtype = torch.bfloat16 if torch.is_autocast_enabled(batch.token_ids_T.device.type) else self.dtype
            # The layout says who sees whom; a mask of four axes keeps the model from making one of its own.
            pack = {
                "attention_mask": batch.token_ids_T.new_empty(1, 1, 0, 0),
                "pack_layout": PackLayout.of(batch, dtype),
            }
        else:
            pack["attention_mask"] = block_mask(batch)
        out: Tensor = self.decoder(
            input_ids=batch.token_ids_T[None], position_ids=batch.position_ids_T[None], use_cache=False, **pack
        ).last_hidden_state
        return out[0]

    def _in_rows(self, batch: TrainBatch) -> bool:
        if self.decoder.config._attn_implementation != NAME or self.settings.layers == "mask":
            return False
        return self.settings.layers == "layout" or layout_pays(batch)

    def _unshared(
        self, batch: TrainBatch, taps: tuple[int, ...], captured: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        rows = padded_rows(batch)
        hidden_BSH: Tensor = self.decoder(
            input_ids=batch.token_ids_T[rows.index_BS], attention_mask=rows.mask_BS.long(), use_cache=False
        ).last_hidden_state
        taps_TF = None
        if taps:
            taps_BSF = torch.cat([captured[layer] for layer in taps], dim=-1)
            taps_TF = taps_BSF.new_zeros(batch.num_tokens, taps_BSF.shape[-1])
            taps_TF[rows.index_BS[rows.mask_BS]] = taps_BSF[rows.mask_BS]
        return hidden_BSH[rows.row_R, rows.previous_column_R], taps_TF

    @contextlib.contextmanager
    def _captured(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Detached inputs of the tapped layers by layer; tap L (past the last layer) enters the final norm."""
        captured: dict[int, Tensor] = {}

        def keep(layer: int, hidden: Tensor) -> None:
            captured[layer] = hidden.detach()

        def hook(layer: int) -> Any:
            def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                keep(layer, args[0] if args else kwargs["hidden_states"])

            return read

        layers = list(self.decoder.layers)
        handles = [
            (layers[layer] if layer < len(layers) else self.decoder.norm).register_forward_pre_hook(
                hook(layer), with_kwargs=True
            )
            for layer in taps
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


class _AuditFeed:
    """Collects the logits of selected rollouts from the chunks they come in and hands each over whole."""

    def __init__(self, batch: TrainBatch, auditor: Auditor) -> None:
        self.auditor = auditor
        self.ends: list[tuple[int, int, int]] = []
        self.rollouts = batch.rollouts
        end = 0
        for number, rollout in enumerate(batch.rollouts):
            start, end = end, end + rollout.length
            if rollout.length and auditor.select(rollout):
                self.ends.append((number, start, end))
        self.parts: dict[int, list[Tensor]] = {}

    def __call__(self, start: int, logits_CV: Tensor) -> None:
        stop = start + logits_CV.shape[0]
        for number, first, end in self.ends:
            low, high = max(first, start), min(end, stop)
            if low < high:
                self.parts.setdefault(number, []).append(logits_CV[low - start : high - start].detach().clone())
                if high == end:
                    self.auditor.observe(self.rollouts[number], torch.cat(self.parts.pop(number)))


def unshared_reason(model: nn.Module) -> str | None:
    """Why a model's attention cannot take a pack's mask, or None if it can."""
    config: Any = model.config
    kind = getattr(config, "_attn_implementation", "eager")
    if kind not in ("sdpa", "eager", NAME):
        return f"the attention implementation {kind} takes no mask of this form"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        return f"{config.model_type} has layers of type {', '.join(other)}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"{config.model_type} has a sliding window"
    if getattr(config, "alibi", False) or not hasattr(model, "get_decoder"):
        return f"{config.model_type} has no rotary positions to be told"
    return None
