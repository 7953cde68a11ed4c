"""Models that whole runs of a module share."""

from __future__ import annotations

import pytest

from leadout.models.cut_layers import write_cut_model
from tests.build.tiny_runs import model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(tmp_path_factory, model):
    """Two layers of the model, as a small model that drafts for it."""
    folder = tmp_path_factory.mktemp("small") / "two-layers"
    write_cut_model(model, [0, 3], folder)
    return str(folder)
