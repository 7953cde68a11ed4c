from __future__ import annotations

import torch

from leadout.train.draft_vocabulary import mean_probabilities, most_probable
from tests.train.learner_fakes import make_forward, random_groups, tiny_policy


def test_the_mean_is_over_every_response_token_of_every_rollout():
    model = tiny_policy(torch.float64)
    groups = random_groups([[3, 0, 2], [4]])
    got = mean_probabilities(make_forward(model, temperature=0.7, max_completions=2), groups, 0.7, chunk_size=4)
    rows = []
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([*group.prompt.token_ids.tolist(), *rollout.token_ids.tolist()])
            logits = model(input_ids=tokens[None]).logits[0, len(group.prompt.token_ids) - 1 : -1]
            rows.append((logits[: rollout.length] / 0.7).softmax(-1))
    torch.testing.assert_close(got.double(), torch.cat(rows).mean(0).detach(), rtol=0, atol=1e-6)


def test_the_most_probable_tokens_come_in_order_of_their_ids():
    assert most_probable(torch.tensor([0.1, 0.3, 0.1, 0.4, 0.1]), 3).tolist() == [0, 1, 3]


def test_no_rollouts_give_no_probability():
    assert mean_probabilities(make_forward(tiny_policy()), random_groups([[0]]), 1.0, 4).sum() == 0
