from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from leadout.errors import ModelError
from leadout.models.rope import RopeSpec
from tests.models.tiny import ROPES

YARNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention_factor": {"attention_factor": 0.7},
    "mscale": {"mscale": 0.8, "mscale_all_dim": 1.2},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "not_truncated": {"truncate": False},
}
ALL = {
    "default": {"rope_type": "default", "rope_theta": 123.0},
    **ROPES,
    **{f"yarn_{name}": ROPES["yarn"] | extra for name, extra in YARNS.items()},
}


def spec_and_reference(parameters: dict[str, Any]) -> tuple[RopeSpec, LlamaRotaryEmbedding]:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    return RopeSpec.from_config(config.to_dict(), 64), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", sorted(ALL))
def test_frequencies_and_attention_factor_equal_transformers(name: str) -> None:
    spec, reference = spec_and_reference(ALL[name])
    torch.testing.assert_close(spec.inverse_frequencies(), reference.inv_freq, atol=0, rtol=1e-6)
    assert spec.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", sorted(ALL))
def test_tables_rotate_as_transformers_does(name: str) -> None:
    spec, reference = spec_and_reference(ALL[name])
    cos_PD, sin_PD = spec.tables(200, torch.float32, torch.device("cpu"))
    cos, sin = reference(torch.zeros(1), torch.arange(200)[None])
    signs = torch.cat((-torch.ones(32), torch.ones(32)))
    torch.testing.assert_close(cos_PD, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin_PD, sin[0] * signs, atol=1e-6, rtol=0)


def test_old_and_new_config_fields_mean_the_same() -> None:
    new = RopeSpec.from_config({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}, 64)
    old = RopeSpec.from_config({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64)
    assert old == new


def test_without_any_field_the_kind_is_default_with_theta_10000() -> None:
    assert RopeSpec.from_config({}, 64) == RopeSpec(rope_type="default", theta=10000.0, dim=64)


def test_canonical_text_names_what_differs_from_neutral() -> None:
    assert RopeSpec.from_config({"rope_theta": 500000}, 64).text == "default theta=500000.0 dim=64"
    linear = RopeSpec.from_config({"rope_scaling": {"rope_type": "linear", "factor": 2}}, 64)
    assert linear.text == "linear theta=10000.0 dim=64 factor=2.0"


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_kinds_that_depend_on_the_longest_row_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"got '{kind}'"):
        RopeSpec.from_config({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, 64)


def test_missing_parameters_are_named() -> None:
    with pytest.raises(ModelError, match="llama3 needs low_freq_factor, high_freq_factor"):
        RopeSpec.from_config({"max_position_embeddings": 64, "rope_scaling": {"type": "llama3", "factor": 2.0}}, 64)


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(ModelError, match="unknown parameters short_factor"):
        RopeSpec.from_config({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, 64)
