from __future__ import annotations

import pytest
import torch

from leadout.logprob.recompute import token_logprobs


def inputs(positions: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, 6, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(20, 6, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(20, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, bias, torch.randint(0, 20, (positions,), generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_log_probabilities_equal_a_full_softmax(chunk_size, temperature):
    hidden, head, bias, targets = inputs()
    out = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size, bias_V=bias)
    logits = (hidden @ head.T + bias) / temperature
    full = logits.log_softmax(-1)
    torch.testing.assert_close(out.logprobs_R, full.gather(-1, targets[:, None]).squeeze(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(out.entropy_R, -(full.exp() * full).sum(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(out.log_normalizer_R, logits.logsumexp(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_gradients_equal_those_of_a_full_softmax(chunk_size):
    hidden, head, bias, targets = inputs()
    upstream = torch.linspace(-2, 3, 11, dtype=torch.float64)
    out = token_logprobs(hidden, head, targets, temperature=0.7, chunk_size=chunk_size, bias_V=bias)
    got = torch.autograd.grad((out.logprobs_R * upstream).sum(), (hidden, head, bias))
    full = ((hidden @ head.T + bias) / 0.7).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    expected = torch.autograd.grad((full * upstream).sum(), (hidden, head, bias))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_low_gradients_are_those_of_float32_to_two_digits(chunk_size):
    hidden, head, bias, targets = inputs(dtype=torch.float32)
    upstream = torch.linspace(-2, 3, 11)
    exact, low = [
        torch.autograd.grad(
            (
                token_logprobs(
                    hidden, head, targets, temperature=0.7, chunk_size=chunk_size, bias_V=bias, low_gradients=flag
                ).logprobs_R
                * upstream
            ).sum(),
            (hidden, head, bias),
        )
        for flag in (False, True)
    ]
    for one, other in zip(low, exact):
        assert one.dtype is torch.float32
        assert float((one - other).norm() / other.norm()) < 0.01


def test_entropy_carries_no_gradient():
    hidden, head, _, targets = inputs()
    out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=4)
    assert not out.entropy_R.requires_grad
    assert not out.log_normalizer_R.requires_grad


def test_logits_are_float32_whatever_the_body_ran_in():
    hidden, head, _, targets = inputs(dtype=torch.float32)
    low = hidden.detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = token_logprobs(low, head, targets, temperature=1.0, chunk_size=4)
    expected = (low.float() @ head.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    assert out.logprobs_R.dtype is torch.float32
    torch.testing.assert_close(out.logprobs_R, expected, rtol=0, atol=1e-5)


def test_a_watcher_sees_logits_before_temperature_chunk_by_chunk():
    hidden, head, _, targets = inputs()
    seen = []
    token_logprobs(
        hidden,
        head,
        targets,
        temperature=0.5,
        chunk_size=4,
        watch=lambda start, logits: seen.append((start, logits.detach().clone())),
    )
    assert [start for start, _ in seen] == [0, 4, 8]
    torch.testing.assert_close(
        torch.cat([logits for _, logits in seen]), (hidden @ head.T).detach(), rtol=0, atol=1e-12
    )


def test_no_positions_give_an_empty_result_that_can_be_differentiated():
    hidden, head, _, targets = inputs(positions=0)
    out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=4)
    out.logprobs_R.sum().backward()
    assert torch.equal(head.grad, torch.zeros_like(head))
