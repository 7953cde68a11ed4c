"""The train stage's native head against a softmax in float64."""

from __future__ import annotations

import pytest
import torch

from leadout.logprob.recompute import token_logprobs
from leadout.models.native.output_head import NativeHead
from tests.models.native.models import distance, needs_kernels

pytestmark = needs_kernels

VOCABS = (37, 512, 9001)
"""The largest spans several slices of the way back."""


def inputs(vocab: int, positions: int = 23, size: int = 48):
    """Representable in bfloat16, so that products are exact but for the order of sums."""
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(positions, size, generator=generator).bfloat16().float().requires_grad_()
    head = (0.3 * torch.randn(vocab, size, generator=generator)).bfloat16().float().requires_grad_()
    return hidden, head, torch.randint(0, vocab, (positions,), generator=generator)


def native_head(head) -> NativeHead:
    kernels = NativeHead.of(head)
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("temperature", "chunk_size"), [(1.0, 100), (0.6, 7)])
def test_log_probabilities_entropies_and_normalizers_equal_a_softmax_in_float64(vocab, temperature, chunk_size):
    hidden, head, targets = inputs(vocab)
    out = token_logprobs(
        hidden, head, targets, temperature=temperature, chunk_size=chunk_size, native=native_head(head)
    )
    logits = hidden.double() @ head.double().T / temperature
    full = logits.log_softmax(-1)
    expected = (full.gather(-1, targets[:, None]).squeeze(-1), -(full.exp() * full).sum(-1), logits.logsumexp(-1))
    for found, exact in zip(out, expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("chunk_size", [100, 7])
def test_gradients_are_those_of_float64_to_two_digits(vocab, chunk_size):
    hidden, head, targets = inputs(vocab)
    slopes = torch.linspace(-2, 3, len(targets))
    out = token_logprobs(hidden, head, targets, temperature=0.7, chunk_size=chunk_size, native=native_head(head))
    found = torch.autograd.grad((out.logprobs_R * slopes).sum(), (hidden, head))
    exact_hidden, exact_head = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    exact = token_logprobs(exact_hidden, exact_head, targets, temperature=0.7, chunk_size=100)
    expected = torch.autograd.grad((exact.logprobs_R * slopes.double()).sum(), (exact_hidden, exact_head))
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 0.005


def test_the_watcher_sees_the_logits_before_temperature():
    hidden, head, targets = inputs(37)
    seen = []
    token_logprobs(
        hidden,
        head,
        targets,
        temperature=0.5,
        chunk_size=10,
        native=native_head(head),
        watch=lambda start, logits: seen.append((start, logits.clone())),
    )
    assert [start for start, _ in seen] == [0, 10, 20]
    torch.testing.assert_close(torch.cat([logits for _, logits in seen]), hidden @ head.T, rtol=1e-5, atol=1e-4)


def test_no_positions_give_no_gradient():
    hidden, head, targets = inputs(37, positions=0)
    out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=8, native=native_head(head))
    found = torch.autograd.grad(out.logprobs_R.sum(), (hidden, head))
    assert found[0].shape == (0, 48)
    assert torch.equal(found[1], torch.zeros_like(head))


def test_an_output_matrix_of_another_type_or_width_has_no_kernels():
    assert NativeHead.of(torch.zeros(8, 24)) is None
    assert NativeHead.of(torch.zeros(8, 32, dtype=torch.float64)) is None
