from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from leadout.models import linear
from leadout.models.linear import LogitsHead, PackedLinear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.05), (torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_layers_equal_plain_ones(dtype: torch.dtype, atol: float, rows: int, has_bias: bool) -> None:
    weight, x, residual = random(40, 24), random(rows, 24, seed=1).to(dtype), random(rows, 40, seed=2).to(dtype)
    bias = random(40, seed=3) if has_bias else None
    layer = PackedLinear(weight, bias, dtype)
    exact = F.linear(x.double(), weight.to(dtype).double(), None if bias is None else bias.to(dtype).double())
    torch.testing.assert_close(layer(x).double(), exact, atol=atol, rtol=0.01 if dtype is torch.bfloat16 else 1e-6)
    torch.testing.assert_close(
        layer.add_to(residual, x).double(),
        exact + residual.double(),
        atol=atol,
        rtol=0.01 if dtype is torch.bfloat16 else 1e-6,
    )


def test_new_weights_can_be_packed_into_the_same_layer() -> None:
    layer = PackedLinear(random(8, 4), None, torch.float32)
    weight, x = random(8, 4, seed=5), random(3, 4, seed=6)
    layer.load(weight)
    torch.testing.assert_close(layer(x), F.linear(x, weight))


def test_a_missing_operator_falls_back_to_plain_products_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(weight_OI: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear, "_pack", missing)
    linear.packing_works.cache_clear()
    weight, x = random(8, 4), random(3, 4, seed=1)
    with caplog.at_level(logging.WARNING):
        layers = [PackedLinear(weight, None, torch.float32) for _ in range(2)]
    linear.packing_works.cache_clear()
    torch.testing.assert_close(layers[1](x), F.linear(x, weight))
    assert [record.getMessage() for record in caplog.records] == [
        "packed torch.float32 linear layers are off, F.linear is used: no such operator"
    ]


def test_a_wrong_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_packed_linear", lambda x, packed, bias: torch.zeros(x.shape[0], 96))
    linear.packing_works.cache_clear()
    works = linear.packing_works(torch.float32)
    linear.packing_works.cache_clear()
    assert not works


@pytest.mark.parametrize("has_half", [True, False])
def test_the_head_of_a_bfloat16_model_keeps_float32_logits(monkeypatch: pytest.MonkeyPatch, has_half: bool) -> None:
    if not has_half:
        monkeypatch.setattr(linear, "half_head_works", lambda: False)
    weight, hidden = random(50, 24).to(torch.bfloat16), random(5, 24, seed=1).to(torch.bfloat16)
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(LogitsHead(weight, torch.bfloat16)(hidden).double(), exact, atol=1e-5, rtol=1e-6)


def test_head_weights_beyond_float16_are_kept_in_float32() -> None:
    weight = torch.full((3, 4), 1e6, dtype=torch.bfloat16)
    hidden = torch.ones(1, 4, dtype=torch.bfloat16)
    expected = 4 * weight[:1, :1].float().expand(1, 3)
    torch.testing.assert_close(LogitsHead(weight, torch.bfloat16)(hidden), expected)


def test_the_head_of_a_float64_model_is_float64() -> None:
    weight, hidden = random(50, 24).double(), random(5, 24, seed=1).double()
    torch.testing.assert_close(LogitsHead(weight, torch.float64)(hidden), hidden @ weight.t(), atol=1e-12, rtol=0)
