"""The optional package's engine: which model it is asked for, and what it refuses."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from leadout.errors import ConfigError
from leadout.sim.project import project
from leadout.sim.second_opinion import ENGINE_MODELS, engine_model, second_opinion
from leadout.sim.shapes import MODELS
from tests.sim.scenarios import small


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B"),
        ("Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("DeepSeek-V3", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_the_engine_is_asked_for_the_model_by_its_owners_name(model, name):
    assert engine_model(model) == name


def test_every_built_in_model_has_a_name_there():
    assert set(ENGINE_MODELS) == set(MODELS)


def test_a_config_of_ones_own_is_given_by_its_folder(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps({**config, "intermediate_size": 128}))
    assert engine_model(str(tmp_path)) == engine_model(str(tmp_path / "config.json")) == str(tmp_path)
    with pytest.raises(ConfigError, match=r"from a folder with a config.json"):
        engine_model(str(tmp_path / "other.json"))


class DownloadError(Exception):
    """As the package raises for a model it does not know and cannot fetch."""


@pytest.mark.parametrize("refusal", [ValueError("bad\nshape"), RuntimeError("bad shape"), DownloadError("bad shape")])
def test_a_refusal_of_the_engine_is_one_line(monkeypatch, tmp_path, refusal):
    class Handle:
        @classmethod
        def compile(cls, *_: object, **__: object) -> None:
            raise refusal

    sdk, utils = ModuleType("sdk"), ModuleType("utils")
    sdk.__dict__["EngineHandle"], utils.__dict__["HuggingFaceDownloadError"] = Handle, DownloadError
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", sdk)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.utils", utils)
    monkeypatch.setattr("leadout.sim.second_opinion.data_folder", lambda: tmp_path)
    plain = project(small())
    with pytest.raises(ConfigError) as caught:
        second_opinion("aic", plain)
    assert str(caught.value) == "--second-opinion aic has none for Qwen/Qwen3-8B on h100_sxm: bad shape"
