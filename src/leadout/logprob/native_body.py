"""Stage logprob: a policy's decoder layers over a pack, in native code where there is some for the model and machine.

What transformers runs as some hundred operators a layer runs as one (`leadout.models.native.train_layer`): the same
numbers but for rounding, which autocast does more of. Only for the forms that the kernels know, and only after the
first layer has been compared with transformers' own, forward and backward; else `native_body` says why not, and the
model runs as transformers has it.

Axes: T tokens of a pack, H policy width, F taps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadout.batch import TrainBatch
from leadout.errors import ModelError
from leadout.logprob.pack import segments
from leadout.models.native.check import usable_library
from leadout.models.native.decoder import fits
from leadout.models.native.train_layer import WEIGHTS, NativeLayer, PackSegments
from leadout.models.spec import DecoderSpec

_TOLERANCE = 0.03
"""Relative mean difference from a layer in float32 that is still rounding: bfloat16 has 8 bits."""


class NativeBody:
    """Embedding, layers and final norm of one transformers decoder."""

    def __init__(self, decoder: Any, kernel: NativeLayer) -> None:
        self._decoder, self._kernel = decoder, kernel

    @classmethod
    def of(cls, model: Any) -> Self | str:
        """For this model, or one line that says why there is none."""
        reason = _unknown_form(model)
        if reason is not None:
            return reason
        library = usable_library()
        if library is None:
            return "native kernels are off"
        spec = DecoderSpec.from_config(model.config.to_dict())
        if not fits(library, spec):
            return "there are no kernels for its sizes"
        kernel, decoder = NativeLayer(library, spec), model.get_decoder()
        gap = _difference(decoder, kernel)
        if not gap < _TOLERANCE:
            return f"the kernels differ from transformers' layer by {gap:.3g}"
        return cls(decoder, kernel)

    def run(self, batch: TrainBatch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """States after the final norm [T, H], and the detached states entering the tapped layers [T, F]."""
        hidden_TH: Tensor = self._decoder.embed_tokens(batch.token_ids_T)
        angles = _angles(self._decoder, hidden_TH, batch.position_ids_T)
        parts = _segments(batch)
        tapped: dict[int, Tensor] = {}
        layers = self._decoder.layers
        saves = any(getattr(layer, "gradient_checkpointing", False) for layer in layers) and torch.is_grad_enabled()
        for index, layer in enumerate(layers):
            if index in taps:
                tapped[index] = hidden_TH.detach()
            call = functools.partial(self._kernel, parts, angles, weights=_weights(layer))
            hidden_TH = checkpoint(call, hidden_TH, use_reentrant=False) if saves else call(hidden_TH)
        if len(layers) in taps:
            tapped[len(layers)] = hidden_TH.detach()
        states_TH: Tensor = self._decoder.norm(hidden_TH)
        return states_TH, torch.cat([tapped[layer] for layer in taps], -1) if taps else None


def _unknown_form(model: Any) -> str | None:
    """What about a model the kernels do not know."""
    try:
        DecoderSpec.from_config(model.config.to_dict())
    except ModelError as error:
        return str(error)
    weights = list(model.get_decoder().layers.parameters())
    if any(weight.dtype is not torch.float32 or weight.device.type != "cpu" for weight in weights):
        return "its weights are not float32 on a CPU"
    if getattr(model.config, "attention_dropout", 0.0):
        return "it has dropout"
    known = set(WEIGHTS)
    for layer in model.get_decoder().layers:
        extra = sorted({name for name, _ in layer.named_parameters()} - known)
        if extra:
            return f"its layers have parameters of other names ({', '.join(extra[:3])})"
    return None


def _weights(layer: nn.Module) -> tuple[Tensor | None, ...]:
    own = dict(layer.named_parameters())
    return tuple(own.get(name) for name in WEIGHTS)


def _angles(decoder: Any, hidden_TH: Tensor, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(hidden_TH.device.type, enabled=False):
        cosine_1TD, sine_1TD = decoder.rotary_emb(hidden_TH[None], position_ids_T[None])
    return cosine_1TD[0].contiguous(), sine_1TD[0].contiguous()


def _segments(batch: TrainBatch) -> PackSegments:
    parts, prompt = [], None
    for segment, at_T in segments(batch).items():
        prompt = segment if segment < 0 else prompt
        assert int(batch.parent_T[at_T[0]]) == prompt, "a completion lies behind its prompt"
        parts.append((int(at_T[0]), at_T.numel(), segment < 0))
    return PackSegments.of(parts)


def _difference(decoder: Any, kernel: NativeLayer) -> float:
    """Largest relative mean difference of output and gradients between the first layer here and in float32."""
    layer, width = decoder.layers[0], decoder.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    x_TH, slope_TH = (torch.randn(23, width, generator=generator) for _ in range(2))
    # A prompt of nine tokens, completions of eight and six.
    position_T = torch.cat([torch.arange(17), torch.arange(9, 15)])
    seen_TT = torch.ones(23, 23, dtype=torch.bool).tril()
    seen_TT[17:, 9:17] = False
    angles = _angles(decoder, x_TH, position_T)
    parts = PackSegments.of([(0, 9, True), (9, 8, False), (17, 6, False)])

    def plain(x: Tensor) -> Tensor:
        mask = torch.zeros(23, 23).masked_fill(~seen_TT, -torch.inf)[None, None]
        cosine_TD, sine_TD = angles
        out: Tensor = layer(x[None], attention_mask=mask, position_embeddings=(cosine_TD[None], sine_TD[None]))
        return out[0]

    def native(x: Tensor) -> Tensor:
        return kernel(parts, angles, x, _weights(layer))

    def values(run: Any) -> Iterator[Tensor]:
        x = x_TH.clone().requires_grad_()
        weights = [weight for weight in layer.parameters() if weight.requires_grad]
        with torch.enable_grad():
            out = run(x)
            yield out.detach()
            yield from torch.autograd.grad(out, (x, *weights), slope_TH)

    def gap(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).abs().mean() / expected.abs().mean().clamp(min=1e-30))

    return max(gap(found, expected) for found, expected in zip(values(native), values(plain), strict=True))
