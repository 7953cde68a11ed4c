from __future__ import annotations

import pytest
import torch

from leadout.models.sampling import ParamsBatch
from leadout.records import SamplingParams
from leadout.rollout.sampler import Sampler


def test_a_token_that_penalties_lead_to_has_a_finite_log_probability_however_improbable_it_is():
    params = SamplingParams(temperature=0.1, repetition_penalty=4.0)
    sampler = Sampler(1, 3, torch.device("cpu"))
    sampler.admit(0, params, torch.tensor([0]), torch.tensor([], dtype=torch.int64))
    logits_XV = torch.tensor([[30.0, 10.0, 0.0]])
    batch = ParamsBatch.of([params])
    laws = sampler.laws(logits_XV.clone(), batch, [0], torch.tensor([[0]]))
    assert float(laws.sampled.logprob(torch.tensor([1]))) == pytest.approx(0.0, abs=1e-6)
    assert float(laws.policy.logprob(torch.tensor([1]))) == pytest.approx(-200.0)
