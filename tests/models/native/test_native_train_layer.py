"""The train stage's native layer against transformers' own, forward and backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from leadout.models.native.library import native_library
from leadout.models.native.train_layer import WEIGHTS, NativeLayer, PackSegments
from leadout.models.spec import DecoderSpec
from tests.models.native.models import CONFIGS, distance, needs_kernels, policy

pytestmark = needs_kernels

SHORT = [(5, (3, 1, 4)), (1, (2,)), (6, ())]
"""(tokens of a prompt, of each completion); an odd number in all."""
LONG = [(70, (90, 37)), (36, (73,))]
"""Longer than a block of queries and than a group of rows in a product."""


@dataclass
class Packed:
    segments: PackSegments
    seen_TT: Tensor
    position_T: Tensor
    starts: list[int]


def lay(families) -> Packed:
    parts, rows, positions, start = [], [], [], 0
    total = sum(prompt + sum(own) for prompt, own in families)
    for prompt, own in families:
        first = start
        for number, length in enumerate((prompt, *own)):
            parts.append((start, length, number == 0))
            for token in range(start, start + length):
                seen = torch.zeros(total, dtype=torch.bool)
                seen[first : first + prompt] = number > 0
                seen[start : token + 1] = True
                rows.append(seen)
                positions.append(token - start + (prompt if number else 0))
            start += length
    return Packed(
        segments=PackSegments.of(parts),
        seen_TT=torch.stack(rows),
        position_T=torch.tensor(positions),
        starts=[part[0] for part in parts],
    )


class Layers:
    """The first layer of a policy, by transformers and natively."""

    def __init__(self, name: str, families) -> None:
        self.model = policy(name)
        self.decoder: Any = self.model.get_decoder()
        self.layer = self.decoder.layers[0]
        self.pack = lay(families)
        library = native_library()
        assert library is not None
        self.kernel = NativeLayer(library, DecoderSpec.from_config(self.model.config.to_dict()))
        generator = torch.Generator().manual_seed(1)
        shape = (len(self.pack.position_T), self.model.config.hidden_size)
        self.x_TH, self.slope_TH = (torch.randn(shape, generator=generator) for _ in range(2))
        cosine, sine = self.decoder.rotary_emb(self.x_TH[None], self.pack.position_T[None])
        self.angles = (cosine[0].contiguous(), sine[0].contiguous())

    def weights(self) -> tuple[Tensor | None, ...]:
        own = dict(self.layer.named_parameters())
        return tuple(own.get(name) for name in WEIGHTS)

    def native(self, x: Tensor) -> Tensor:
        return self.kernel(self.pack.segments, self.angles, x, self.weights())

    def plain(self, x: Tensor) -> Tensor:
        mask = torch.zeros(self.pack.seen_TT.shape, dtype=x.dtype).masked_fill(~self.pack.seen_TT, -torch.inf)
        angles = tuple(angle[None].to(x.dtype) for angle in self.angles)
        return self.layer(x[None], attention_mask=mask[None, None], position_embeddings=angles)[0]

    def rounded(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.plain(x)

    def values(self, run) -> dict[str, Tensor]:
        """Output and gradients by name."""
        dtype = self.layer.input_layernorm.weight.dtype
        x = self.x_TH.detach().clone().to(dtype).requires_grad_()
        out = run(x)
        names, weights = zip(*self.layer.named_parameters())
        grads = torch.autograd.grad(out, (x, *weights), self.slope_TH.to(dtype))
        return {"output": out.detach(), **dict(zip(("input", *names), grads, strict=True))}


@pytest.mark.parametrize(("name", "families"), [*((name, SHORT) for name in CONFIGS), ("llama", LONG), ("qwen3", LONG)])
def test_output_and_every_gradient_are_no_further_from_float64_than_autocasts(name, families):
    layers = Layers(name, families)
    native, rounded = layers.values(layers.native), layers.values(layers.rounded)
    layers.layer.double()
    exact = layers.values(layers.plain)
    assert native.keys() == exact.keys()
    for key, expected in exact.items():
        assert distance(native[key], expected) < max(1.1 * distance(rounded[key], expected), 2e-3), key


def test_a_completion_sees_no_sibling_and_no_other_family():
    layers = Layers("qwen3", SHORT)
    before = layers.native(layers.x_TH)
    changed = layers.x_TH.clone()
    changed[5:8] += 1.0  # the first completion of the first prompt
    after = layers.native(changed)
    same_T = (after == before).all(-1)
    assert same_T.tolist() == [*[True] * 5, *[False] * 3, *[True] * (len(same_T) - 8)]


def test_gradients_are_the_same_bits_with_any_number_of_threads():
    layers = Layers("qwen3", LONG)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(layers.values(layers.native))
    finally:
        torch.set_num_threads(threads)
    for first, other in itertools.product(found[:1], found[1:]):
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_packing_families_together_changes_no_output():
    layers = Layers("llama_biases_tied", SHORT)
    together = layers.native(layers.x_TH)
    start = 0
    for family in SHORT:
        size = family[0] + sum(family[1])
        alone = Layers("llama_biases_tied", [family])
        torch.testing.assert_close(
            alone.native(layers.x_TH[start : start + size]), together[start : start + size], rtol=1e-6, atol=1e-6
        )
        start += size


def test_frozen_weights_get_no_gradient_and_others_the_same():
    layers = Layers("llama_biases_tied", SHORT)
    expected = layers.values(layers.native)
    layers.layer.self_attn.requires_grad_(False)
    x = layers.x_TH.detach().clone().requires_grad_()
    layers.native(x).backward(layers.slope_TH)
    assert torch.equal(x.grad, expected["input"])
    for name, weight in layers.layer.named_parameters():
        if name.startswith("self_attn."):
            assert weight.grad is None
        else:
            assert torch.equal(weight.grad, expected[name])


def test_completions_belong_to_the_prompt_before_them():
    segments = PackSegments.of([(0, 4, True), (4, 2, False), (6, 3, True), (9, 1, False), (10, 5, False)])
    assert segments.prompt_start_S.tolist() == [0, 0, 0, 6, 6]
    assert segments.prompt_length_S.tolist() == [0, 4, 0, 3, 3]
    assert segments.first_F.tolist() == [0, 2, 5]
