from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leadout.train.loss import LossSettings, importance_weights, k3_divergence, policy_loss, rollout_weights

ACTIVE = np.array([4, 2, 0, 6])
MICRO = np.array([0, 0, 1, 1])


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(log_ratio: float, advantage: float, **options: object):
    logprob = tensor(log_ratio).requires_grad_()
    out = policy_loss(
        logprob, tensor(0.0), tensor(advantage), tensor(1.0), torch.zeros(1, dtype=torch.int64), LossSettings(**options)
    )
    out.loss.backward()
    return float(out.loss), float(logprob.grad), out


def test_dapo_weighs_every_token_of_the_update_alike():
    assert rollout_weights(ACTIVE, MICRO, "dapo", 8).tolist() == [1 / 12, 1 / 12, 0.0, 1 / 12]


def test_grpo_weighs_every_rollout_alike():
    np.testing.assert_allclose(rollout_weights(ACTIVE, MICRO, "grpo", 8), [1 / 12, 1 / 6, 0.0, 1 / 18])


def test_dr_grpo_divides_by_a_constant_length():
    np.testing.assert_allclose(rollout_weights(ACTIVE, MICRO, "dr_grpo", 8), [1 / 24, 1 / 24, 0.0, 1 / 24])


def test_bnpo_averages_the_token_means_of_micro_batches():
    np.testing.assert_allclose(rollout_weights(ACTIVE, MICRO, "bnpo", 8), [2 / 3 / 6, 2 / 3 / 6, 0.0, 1 / 3 / 6])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_masked_rollouts_count_in_no_denominator(loss_type):
    with_masked = rollout_weights(np.array([4, 0, 2]), np.zeros(3, np.int64), loss_type, 8)
    without = rollout_weights(np.array([4, 2]), np.zeros(2, np.int64), loss_type, 8)
    assert with_masked[[0, 2]].tolist() == without.tolist()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_weights_are_zero_and_finite_when_everything_is_masked(loss_type):
    assert rollout_weights(np.zeros(3, np.int64), np.zeros(3, np.int64), loss_type, 8).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_the_ratio_is_clipped_only_where_it_would_gain(ratio, advantage, loss, gradient):
    got_loss, got_gradient, _ = one_token(math.log(ratio), advantage, epsilon=0.2, epsilon_high=0.28)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)


def test_epsilon_high_defaults_to_epsilon():
    loss, _, _ = one_token(math.log(1.5), 1.0, epsilon=0.2, epsilon_high=None)
    assert loss == pytest.approx(-1.2)


def test_delta_bounds_the_ratio_of_a_negative_advantage():
    loss, gradient, _ = one_token(math.log(9.0), -1.0, delta=4.0)
    assert (loss, gradient) == (pytest.approx(4.0), 0.0)


def test_clipped_tokens_are_marked_by_side():
    assert bool(one_token(math.log(1.5), 1.0)[2].high_clipped_R)
    assert bool(one_token(math.log(0.5), -1.0)[2].low_clipped_R)
    for ratio, advantage in ((1.5, -1.0), (0.5, 1.0), (1.1, 1.0), (0.9, -1.0)):
        out = one_token(math.log(ratio), advantage)[2]
        assert not bool(out.high_clipped_R | out.low_clipped_R)


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_ratios_give_finite_losses_and_gradients(log_ratio, advantage, dtype):
    logprob = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    out = policy_loss(
        logprob,
        zero,
        one * advantage,
        one,
        torch.zeros(1, dtype=torch.int64),
        LossSettings(beta=0.1),
        reference_logprobs_R=zero,
    )
    out.loss.backward()
    assert bool(out.loss.isfinite())
    assert bool(logprob.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_the_k3_divergence_is_finite_with_finite_gradient(dtype, log_ratio):
    d = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    value = k3_divergence(d)
    value.sum().backward()
    assert bool(value.isfinite().all()) and bool(d.grad.isfinite().all())


def test_the_k3_divergence_is_exp_d_minus_d_minus_one():
    got = k3_divergence(tensor(0.0, 1.0, -2.0))
    np.testing.assert_allclose(got, [0.0, math.e - 2.0, math.exp(-2.0) + 1.0])


def test_sequence_level_ratios_are_the_geometric_mean_of_a_rollouts_tokens():
    logprobs = tensor(0.1, 0.3, -0.2).requires_grad_()
    rollout = torch.tensor([0, 0, 1])
    settings = LossSettings(importance_sampling_level="sequence", epsilon=5.0, epsilon_high=5.0)
    out = policy_loss(logprobs, tensor(0.0, 0.0, 0.0), tensor(1.0, 1.0, 1.0), tensor(1.0, 1.0, 1.0), rollout, settings)
    assert float(out.loss) == pytest.approx(-(2 * math.exp(0.2) + math.exp(-0.2)))


def test_sequence_level_ratios_leave_masked_tokens_out():
    settings = LossSettings(importance_sampling_level="sequence", epsilon=5.0, epsilon_high=5.0)
    out = policy_loss(
        tensor(0.2, 9.0), tensor(0.0, 0.0), tensor(1.0, 1.0), tensor(1.0, 0.0), torch.tensor([0, 0]), settings
    )
    assert float(out.loss) == pytest.approx(-math.exp(0.2))


def test_masked_tokens_may_hold_anything():
    logprobs = tensor(0.0, 0.0).requires_grad_()
    out = policy_loss(
        logprobs, tensor(0.0, float("nan")), tensor(1.0, 1.0), tensor(0.5, 0.0), torch.tensor([0, 1]), LossSettings()
    )
    out.loss.backward()
    assert float(out.loss) == -0.5
    assert logprobs.grad.tolist() == [-0.5, 0.0]


def test_importance_weights_are_truncated_and_detached():
    learner = tensor(0.0, 1.0, 0.5).requires_grad_()
    weights = importance_weights(learner, tensor(0.0, -3.0, 1.0), 2.0)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, [1.0, 2.0, math.exp(-0.5)])


def test_importance_weights_scale_the_loss():
    out = policy_loss(
        tensor(0.0),
        tensor(0.0),
        tensor(2.0),
        tensor(1.0),
        torch.zeros(1, dtype=torch.int64),
        LossSettings(),
        importance_R=tensor(0.25),
    )
    assert float(out.loss) == -0.5


def test_the_kl_term_acts_without_advantages():
    logprob = tensor(-1.0).requires_grad_()
    out = policy_loss(
        logprob,
        tensor(-1.0),
        tensor(0.0),
        tensor(1.0),
        torch.zeros(1, dtype=torch.int64),
        LossSettings(beta=0.5),
        reference_logprobs_R=tensor(-2.0),
    )
    out.loss.backward()
    assert float(out.loss) == pytest.approx(0.5 * (math.exp(-1.0) + 1.0 - 1.0))
    assert float(logprob.grad) == pytest.approx(0.5 * (1.0 - math.exp(-1.0)))


def test_no_tokens_give_a_zero_loss_that_can_be_differentiated():
    logprobs = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    out = policy_loss(logprobs, empty, empty, empty, torch.zeros(0, dtype=torch.int64), LossSettings())
    out.loss.backward()
    assert float(out.loss) == 0.0
