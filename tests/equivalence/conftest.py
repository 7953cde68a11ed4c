"""The small policy in float64 and the engine's decoder of it, which the tests of this folder share."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence.tiny_engines import MAX_LEN
from tests.models.tiny import decoder, policy


@pytest.fixture(scope="module")
def llama():
    return policy("llama", torch.float64)


@pytest.fixture(scope="module")
def fused(llama):
    return decoder(llama, MAX_LEN)
