from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from leadout.errors import ConfigError
from leadout.train.draft_loss import (
    LOSSES,
    acceptance_of_token,
    expected_rounds,
    make_loss,
    shared_mass,
    soft_cross_entropy,
    teacher_probabilities,
    unrolled_loss,
)


def test_teacher_probabilities_are_the_policys_share_of_the_draft_vocabulary():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    head = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    logits = hidden @ head.T / 0.7
    ids = torch.tensor([1, 4, 8])
    got = teacher_probabilities(hidden, head[ids], logits.logsumexp(-1), 0.7)
    torch.testing.assert_close(got, logits.softmax(-1)[:, ids], rtol=0, atol=1e-12)


def test_soft_cross_entropy_over_the_full_vocabulary_is_the_usual_one():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64).softmax(-1)
    got = soft_cross_entropy(logits, teacher, 0.5)
    torch.testing.assert_close(got, F.cross_entropy(logits / 0.5, teacher, reduction="none"), rtol=0, atol=1e-12)


def test_with_a_reduced_vocabulary_a_position_weighs_what_can_be_drafted_there():
    logits = torch.tensor([[0.3, -1.0]], dtype=torch.float64, requires_grad=True)
    share = torch.tensor([[0.1, 0.3]], dtype=torch.float64)
    soft_cross_entropy(logits, share, 1.0).sum().backward()
    expected = 0.4 * (logits.detach().softmax(-1) - share / 0.4)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-12)


def logits_and_teacher(share: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    return logits, share * torch.randn(6, 9, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("name", [*LOSSES, "ce+tv", "0.3*kl+2*lk"])
def test_gradients_equal_finite_differences(name, share):
    logits, teacher = logits_and_teacher(share)
    loss = make_loss(name)
    assert torch.autograd.gradcheck(lambda x: loss(x, teacher, 0.7), logits.requires_grad_(True))


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_a_draft_that_is_the_policy_is_a_stationary_point(name):
    logits, _ = logits_and_teacher()
    teacher = (logits / 0.7).softmax(-1)
    make_loss(name)(logits.requires_grad_(True), teacher, 0.7).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_a_draft_that_is_the_policy_has_no_loss(name):
    logits, _ = logits_and_teacher()
    got = make_loss(name)(logits, (logits / 0.7).softmax(-1), 0.7)
    torch.testing.assert_close(got, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)


def test_total_variation_over_the_full_vocabulary_is_half_the_l1_distance():
    logits, teacher = logits_and_teacher()
    got = LOSSES["tv"](logits, teacher, 0.7)
    torch.testing.assert_close(got, 0.5 * ((logits / 0.7).softmax(-1) - teacher).abs().sum(-1), rtol=0, atol=1e-12)


def test_mass_outside_the_draft_vocabulary_counts_as_rejected():
    teacher = torch.tensor([[0.3, 0.1]], dtype=torch.float64)
    logits = torch.log(torch.tensor([[0.75, 0.25]], dtype=torch.float64))
    assert float(shared_mass(logits, teacher, 1.0)) == pytest.approx(0.4)
    assert float(LOSSES["tv"](logits, teacher, 1.0)) == pytest.approx(0.6)
    assert float(LOSSES["lk"](logits, teacher, 1.0)) == pytest.approx(-np.log(0.4))


def test_kl_divergence_is_torchs_and_shares_the_gradient_of_cross_entropy():
    logits, teacher = logits_and_teacher()
    got = LOSSES["kl"](logits, teacher, 0.7)
    expected = F.kl_div((logits / 0.7).log_softmax(-1), teacher, reduction="none").sum(-1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grads = []
    for name in ("ce", "kl"):
        leaf = logits.clone().requires_grad_(True)
        LOSSES[name](leaf, teacher, 0.7).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-12)


def test_the_gradient_of_log_acceptance_is_that_of_acceptance_divided_by_it():
    logits, teacher = logits_and_teacher()
    grads = {}
    for name in ("tv", "lk"):
        leaf = logits.clone().requires_grad_(True)
        LOSSES[name](leaf, teacher, 1.0).sum().backward()
        grads[name] = leaf.grad
    accept_N1 = shared_mass(logits, teacher, 1.0)[:, None]
    torch.testing.assert_close(grads["lk"], grads["tv"] / accept_N1, rtol=0, atol=1e-12)


def test_positions_without_policy_mass_in_the_draft_vocabulary_are_constant():
    logits, teacher = torch.randn(1, 4, requires_grad=True), torch.zeros(1, 4)
    for loss in LOSSES.values():
        value = loss(logits, teacher, 1.0)
        (grad,) = torch.autograd.grad(value.sum(), logits)
        assert bool(torch.isfinite(value).all()) and not grad.any()


def test_a_mix_is_the_weighted_sum_of_its_terms():
    logits, teacher = logits_and_teacher()
    parts = {name: loss(logits, teacher, 1.0) for name, loss in LOSSES.items()}
    torch.testing.assert_close(make_loss("ce+tv")(logits, teacher, 1.0), parts["ce"] + parts["tv"])
    torch.testing.assert_close(make_loss("0.25*kl+3*lk")(logits, teacher, 1.0), 0.25 * parts["kl"] + 3 * parts["lk"])


@pytest.mark.parametrize("text", ["mse", "ce+", "x*ce", ""])
def test_unknown_losses_are_refused_with_the_known_ones(text):
    with pytest.raises(ConfigError, match="expected a sum of ce, kl, tv, lk"):
        make_loss(text)


def test_deeper_steps_weigh_less():
    losses = [torch.tensor([1.0, 3.0]), torch.tensor([4.0]), torch.tensor([])]
    assert float(unrolled_loss(losses, 0.5)) == pytest.approx((2.0 + 0.5 * 4.0) / 1.5)


def test_the_loss_of_nothing_is_zero():
    assert float(unrolled_loss([torch.zeros(0)], 0.8)) == 0.0


def test_acceptance_of_a_token_is_the_ratio_cut_at_one():
    got = acceptance_of_token(torch.tensor([0.5, 0.2, 0.4]).log(), torch.tensor([0.25, 0.6, 0.0]).log())
    torch.testing.assert_close(got, torch.tensor([0.5, 1.0, 0.0]))


def brute_force_rounds(policy, draft, length: int, num_drafts: int) -> float:
    """Expected rounds of an exact speculative sampler, by enumeration of every draft, acceptance and correction.

    `policy(context)` and `draft(context, depth)` give distributions; a rollout has `length` tokens, the first drawn
    from the policy outside any round.
    """

    def rounds_from(context: tuple[int, ...]) -> float:
        if len(context) >= length:
            return 0.0
        return 1.0 + drafted(context, context, 0)

    def drafted(context: tuple[int, ...], start: tuple[int, ...], depth: int) -> float:
        """Expected further rounds once `depth` drafts of the round begun at `start` were accepted."""
        if len(context) >= length:
            return 0.0
        p = policy(context)
        if depth == num_drafts:
            return sum(p[x] * rounds_from((*context, x)) for x in range(len(p)))
        q = draft(context, depth)
        total = 0.0
        for d in range(len(p)):
            if q[d] > 0:
                total += q[d] * min(1.0, p[d] / q[d]) * drafted((*context, d), start, depth + 1)
        residual = np.maximum(p - q, 0.0)
        rejected = 1.0 - np.minimum(p, q).sum()
        if rejected > 1e-15:
            residual /= residual.sum()
            total += rejected * sum(residual[x] * rounds_from((*context, x)) for x in range(len(p)))
        return total

    p = policy(())
    return sum(p[x] * rounds_from((x,)) for x in range(len(p)))


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_expected_rounds_equal_those_of_an_enumerated_speculative_sampler(num_drafts):
    vocab, length = 3, 4
    rng = np.random.default_rng(1)
    contexts = [c for n in range(length) for c in itertools.product(range(vocab), repeat=n)]
    policies = {context: rng.dirichlet(np.ones(vocab) * 0.7) for context in contexts}
    drafts = {(c, depth): rng.dirichlet(np.ones(vocab) * 0.7) for c in contexts for depth in range(num_drafts)}
    drafts[(contexts[1], 0)] = np.array([0.0, 0.5, 0.5])

    expected, total = brute_force_rounds(policies.get, lambda c, d: drafts[c, d], length, num_drafts), 0.0
    for tokens in itertools.product(range(vocab), repeat=length):
        probability = np.prod([policies[tokens[:t]][tokens[t]] for t in range(length)])
        accept = np.zeros((1, length, num_drafts))
        for start in range(1, length):
            for depth in range(min(num_drafts, length - start)):
                t = start + depth
                p, q = policies[tokens[:t]][tokens[t]], drafts[tokens[:t], depth][tokens[t]]
                accept[0, start, depth] = min(1.0, q / p)
        total += probability * expected_rounds(accept, np.array([length]))[0]
    assert total == pytest.approx(expected, abs=1e-12)


def test_a_perfect_drafter_needs_one_round_for_every_four_tokens():
    accept = np.ones((2, 9, 3))
    assert expected_rounds(accept, np.array([9, 5])).tolist() == [2.0, 1.0]


def test_a_hopeless_drafter_needs_one_round_per_token_after_the_first():
    assert expected_rounds(np.zeros((1, 6, 3)), np.array([6])).tolist() == [5.0]


def test_rollouts_of_one_token_need_no_round():
    assert expected_rounds(np.zeros((2, 3, 3)), np.array([1, 0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_of_the_shared_mass_flows_where_the_draft_is_below_the_policy(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64).softmax(-1)
    shared_mass(logits, teacher, temperature).sum().backward()
    q = (logits.detach() / temperature).softmax(-1)
    below = torch.where(q < teacher, q, 0.0)
    expected = (below - q * below.sum(-1, keepdim=True)) / temperature
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-12)


def test_a_draft_that_is_not_a_number_is_no_acceptance():
    logits = torch.full((1, 3), torch.nan)
    assert shared_mass(logits, torch.full((1, 3), 0.3), 1.0).isnan().all()
