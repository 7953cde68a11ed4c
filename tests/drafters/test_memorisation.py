"""A head that has learnt one sequence by heart drafts it: training, serving and vocabulary map agree end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.models.decoder import FusedDecoder
from leadout.models.spec import DecoderSpec
from tests.equivalence.tiny_engines import eagle3_drafter, engine, generate, ragged_requests, trained_head
from tests.train.learner_fakes import tiny_policy


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "mtp"])
def test_every_draft_of_a_memorised_greedy_rollout_is_accepted_at_every_depth(kind):
    model = tiny_policy(tied=False)
    with torch.no_grad():
        model.lm_head.weight *= 5  # The head learns the whole law; a sharp one leaves no doubt which token is best.
    fused = FusedDecoder(DecoderSpec.from_config(model.config.to_dict()), dtype=torch.float64, max_len=96)
    fused.load(dict(model.named_parameters()))
    (request,) = ragged_requests(3, 1, vocab_size=50, temperature=0.0, max_new_tokens=17)[2:]
    (plain,) = generate(engine(fused), [request]).values()
    head = trained_head(model, [plain], reduced=False, steps=150, kind=kind)
    for k in (1, 2, 3):
        (rollout,) = generate(engine(fused, eagle3_drafter(head, fused, 16), k), [request]).values()
        assert rollout.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_array_equal(rollout.rounds.accepted, rollout.rounds.drafted)
        assert rollout.rounds.drafted[:-1].tolist() == [k] * (len(rollout.rounds.drafted) - 1)
