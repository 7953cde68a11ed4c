from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from leadout.errors import AuditError, CheckpointError
from leadout.interfaces import Learner
from leadout.refit.apply import receive
from leadout.train.advantage import advantages
from leadout.train.loss import LossSettings
from leadout.train.policy_step import PolicyStep, plan_updates
from leadout.train.settings import DraftSettings, OptimizerSettings, UpdateSettings
from leadout.train.step_metrics import StepMetrics
from tests.train.learner_fakes import (
    make_forward,
    make_group,
    make_learner,
    random_groups,
    sampled_groups,
    tiny_draft_head,
    tiny_policy,
)

DRAFT = DraftSettings(autocast=False, warmup_steps=1)
RAGGED = [[3, 6, 1, 4], [4, 1, 2, 5]]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def rewarded(groups):
    """The groups with rewards that differ within each."""
    return [
        make_group(
            group.rollouts[0].request_id.draw,
            group.prompt.token_ids,
            [rollout.token_ids for rollout in group.rollouts],
            [float(i % 3) for i in range(len(group.rollouts))],
        )
        for group in groups
    ]


def gradient(model, groups, settings: LossSettings, max_completions: int) -> dict[str, torch.Tensor]:
    forward = make_forward(model, max_completions=max_completions)
    (update,) = plan_updates(forward, groups, advantages(groups, "group"), mini_batch_size=None, settings=settings)
    runner = PolicyStep(forward, settings, StepMetrics(), logprobs=None, reference=None)
    model.zero_grad()
    runner.accumulate(update, first_pass=True)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_gradient_does_not_depend_on_micro_batches(loss_type):
    model, groups = tiny_policy(), rewarded(random_groups(RAGGED))
    settings = LossSettings(loss_type=loss_type, max_completion_length=8)
    whole = gradient(model, groups, settings, 8)
    for size in (1, 2, 3, 4):
        for name, tensor in gradient(model, groups, settings, size).items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_the_gradient_equals_that_of_plain_passes_and_the_written_out_loss(loss_type):
    model, groups = tiny_policy(), rewarded(random_groups(RAGGED))
    got = gradient(model, groups, LossSettings(loss_type=loss_type, max_completion_length=8), 8)
    sums, lengths = [], []
    for group, advantages_G in zip(groups, advantages(groups, "group")):
        for rollout, advantage in zip(group.rollouts, advantages_G):
            tokens = torch.from_numpy(np.concatenate([group.prompt.token_ids, rollout.token_ids]).astype(np.int64))
            log_p = model(input_ids=tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])
            sums.append(-advantage * log_p[-rollout.length :].sum())
            lengths.append(rollout.length)
    sums, lengths = torch.stack(sums), torch.tensor(lengths)
    loss = {
        "dapo": sums.sum() / lengths.sum(),
        "grpo": (sums / lengths).mean(),
        "dr_grpo": sums.sum() / (8 * len(sums)),
        "bnpo": sums.sum() / lengths.sum(),
    }[loss_type]
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_masked_rollout_is_as_if_absent_from_the_loss():
    model = tiny_policy()
    rows = [[7, 2, 9], [8, 3], [4]]
    masked = make_group(0, [1, 5], rows, [1.0, 0.0, 0.5], masked=[False, False, True])
    settings = LossSettings(loss_type="grpo", max_completion_length=8)
    with_masked = gradient(model, [masked], settings, 8)
    plain = make_group(0, [1, 5], rows[:2], [1.0, 0.0])
    without = gradient(model, [plain], settings, 8)
    scale = advantages([masked], "group")[0][0] / advantages([plain], "group")[0][0]
    for name, tensor in with_masked.items():
        torch.testing.assert_close(tensor, without[name] * scale, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_a_step_with_everything_masked_changes_nothing_and_stays_finite(loss_type):
    model = tiny_policy()
    learner = make_learner(model, draft=DRAFT, loss=LossSettings(loss_type=loss_type, max_completion_length=8))
    before = weights(model)
    groups = [
        make_group(0, [1, 5], [[7, 2], [8]], [1.0, 0.0], masked=[True, True]),
        make_group(1, [2], [[], []], [0, 1]),
    ]
    report = learner.step(groups, learner.logprobs(groups))
    assert report.version == 1
    assert report.metrics["loss"] == 0.0
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert same(before, weights(model))


def test_equal_rewards_leave_the_policy_as_it_is():
    model = tiny_policy()
    learner = make_learner(model)
    before = weights(model)
    groups = [make_group(0, [1, 5], [[7, 2], [8]], [1.0, 1.0])]
    report = learner.step(groups, None)
    assert same(before, weights(model))
    assert report.metrics["frac_reward_zero_std"] == 1.0
    assert report.metrics["optimizer_updates"] == 0


def test_with_a_reference_equal_rewards_still_feel_the_kl():
    model, reference = tiny_policy(), make_forward(tiny_policy(seed=1))
    learner = make_learner(model, loss=LossSettings(beta=0.1, max_completion_length=8), reference=reference)
    before = weights(model)
    report = learner.step([make_group(0, [1, 5], [[7, 2], [8]], [1.0, 1.0])], None)
    assert report.metrics["kl"] > 0
    assert not same(before, weights(model))


def test_kl_is_not_reported_without_a_reference():
    groups = rewarded(random_groups([[3, 3]]))
    assert "kl" not in make_learner(tiny_policy()).step(groups, None).metrics


def test_the_loss_of_the_first_step_is_zero_for_a_mean_per_rollout():
    groups = rewarded(random_groups(RAGGED))
    learner = make_learner(tiny_policy(), loss=LossSettings(loss_type="grpo", max_completion_length=8))
    assert learner.step(groups, None).metrics["loss"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_policy_is_the_same_to_the_bit_with_and_without_draft_training(recompute, autocast):
    groups = rewarded(random_groups(RAGGED))
    violent = DraftSettings(autocast=autocast, learning_rate=10.0, warmup_steps=1, max_grad_norm=1e9)
    results = []
    for draft in (None, DraftSettings(autocast=autocast), violent):
        model = tiny_policy(torch.float32)
        update = UpdateSettings(recompute=recompute)
        learner = make_learner(model, draft=draft, update=update, max_completions=3, autocast=autocast)
        for _ in range(2):
            learner.step(groups, learner.logprobs(groups))
        results.append(weights(model))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_recomputing_log_probabilities_changes_nothing_when_there_is_one_update():
    groups = rewarded(random_groups(RAGGED))
    results = []
    for recompute in ("auto", "always"):
        model = tiny_policy()
        learner = make_learner(model, update=UpdateSettings(recompute=recompute))
        logprobs = learner.logprobs(groups)
        assert (logprobs is None) == (recompute == "auto")
        learner.step(groups, logprobs)
        results.append(weights(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "update, is_policy_law",
    [
        (UpdateSettings(num_iterations=2), True),
        (UpdateSettings(mini_batch_size=4), True),
        (UpdateSettings(), False),
    ],
)
def test_log_probabilities_are_recomputed_where_one_forward_is_not_enough(update, is_policy_law):
    learner = make_learner(tiny_policy(), update=update, is_policy_law=is_policy_law)
    assert learner.logprobs(random_groups(RAGGED)) is not None


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recomputed_log_probabilities_are_those_of_the_law_sampled_from(temperature):
    model = tiny_policy()
    groups = sampled_groups(model, 2, 3, 7, temperature=temperature)
    learner = make_learner(model, update=UpdateSettings(recompute="always"), temperature=temperature, max_completions=2)
    logprobs = learner.logprobs(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(logprobs.values) == len(rollouts)
    for values, rollout in zip(logprobs.values, rollouts):
        np.testing.assert_allclose(values, rollout.policy_logprobs, rtol=0, atol=1e-9)
    assert logprobs.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-12)
    assert logprobs.metrics["sampling/sampling_logp_difference/max"] < 1e-9


def test_log_probabilities_of_an_empty_completion_are_an_empty_array():
    learner = make_learner(tiny_policy(), update=UpdateSettings(recompute="always"))
    logprobs = learner.logprobs([make_group(0, [1, 2], [[], [7, 8]], [0.0, 1.0]), make_group(1, [3], [[]], [0.0])])
    assert [len(values) for values in logprobs.values] == [0, 2, 0]


def test_mismatch_is_the_k3_estimate_of_learner_against_generator():
    model = tiny_policy()
    groups = sampled_groups(model, 1, 2, 4)
    true = np.concatenate([rollout.policy_logprobs.copy() for rollout in groups[0].rollouts])
    gaps = np.linspace(-0.3, 0.4, 8)
    for index, rollout in enumerate(groups[0].rollouts):
        rollout.policy_logprobs[:] -= gaps[4 * index : 4 * index + 4]
    metrics = make_learner(model).step(groups, None).metrics
    assert len(true) == 8
    assert metrics["mismatch_kl"] == pytest.approx(np.mean(np.exp(gaps) - 1 - gaps), abs=1e-9)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(np.abs(gaps).mean(), abs=1e-9)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.4, abs=1e-9)


def test_importance_ratios_are_reported_when_the_correction_is_on():
    model = tiny_policy()
    groups = sampled_groups(model, 1, 2, 2)
    groups[0].rollouts[0].policy_logprobs[0] -= np.log(1.5)
    groups[0].rollouts[0].policy_logprobs[1] -= 9.0
    metrics = (
        make_learner(model, loss=LossSettings(importance_clip_max=2.0, max_completion_length=8))
        .step(groups, None)
        .metrics
    )
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(2.0)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx((1.5 + 2 + 1 + 1) / 4)


@pytest.mark.parametrize("sizes, updates", [((None, 1), 1), ((4, 1), 2), ((3, 2), 6), ((None, 3), 3)])
def test_mini_batches_and_iterations_make_the_updates(sizes, updates):
    mini_batch_size, num_iterations = sizes
    settings = UpdateSettings(mini_batch_size=mini_batch_size, num_iterations=num_iterations)
    learner = make_learner(tiny_policy(), update=settings, optimizer=OptimizerSettings(learning_rate=1e-5))
    groups = rewarded(random_groups(RAGGED))
    report = learner.step(groups, learner.logprobs(groups))
    assert report.metrics["optimizer_updates"] == updates
    assert report.version == 1


def test_a_mini_batch_of_whole_groups_is_a_step_of_its_own():
    groups = rewarded(random_groups(RAGGED))
    split, apart = tiny_policy(), tiny_policy()
    learner = make_learner(split, update=UpdateSettings(mini_batch_size=4), max_completions=3)
    learner.step(groups, learner.logprobs(groups))
    other = make_learner(apart, update=UpdateSettings(recompute="always"))
    old = other.logprobs(groups)
    for number, group in enumerate(groups):
        part = type(old)(values=old.values[4 * number : 4 * number + 4], version=0, metrics={})
        other.step([group], part)
    for name, tensor in weights(split).items():
        torch.testing.assert_close(tensor, weights(apart)[name], rtol=0, atol=1e-8)


def test_the_second_iteration_is_held_against_the_policy_before_the_first():
    model = tiny_policy()
    update = UpdateSettings(num_iterations=3)
    learner = make_learner(model, update=update, optimizer=OptimizerSettings(learning_rate=0.05))
    groups = rewarded(random_groups(RAGGED))
    metrics = learner.step(groups, learner.logprobs(groups)).metrics
    assert metrics["clip_ratio/high_mean"] > 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(
        metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    )


def test_nothing_is_clipped_in_the_first_update():
    metrics = make_learner(tiny_policy()).step(rewarded(random_groups(RAGGED)), None).metrics
    assert metrics["clip_ratio/region_mean"] == 0.0


def test_entropy_is_that_of_the_sampling_law_over_trained_tokens():
    model = tiny_policy()
    group = make_group(0, [1, 5], [[7, 2], [8]], [1.0, 0.0], masked=[False, True])
    metrics = make_learner(model, temperature=0.7).step([group], None).metrics
    log_p = (tiny_policy()(input_ids=torch.tensor([[1, 5, 7]])).logits[0, 1:] / 0.7).log_softmax(-1)
    assert metrics["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), abs=1e-9)


def test_the_gradient_norm_is_reported_before_clipping():
    groups = rewarded(random_groups(RAGGED))
    norms = [
        make_learner(tiny_policy(), optimizer=OptimizerSettings(max_grad_norm=bound))
        .step(groups, None)
        .metrics["grad_norm"]
        for bound in (1e-3, 1e3)
    ]
    assert norms[0] == pytest.approx(norms[1])


def test_published_weights_are_the_policys_and_the_drafters_of_that_version():
    model = tiny_policy(torch.float32)
    learner = make_learner(model, draft=DRAFT)
    groups = rewarded(random_groups(RAGGED))
    learner.step(groups, None)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    head = learner.drafter.student.head
    draft_shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    received = receive(learner.publish(), shapes, draft_shapes, head.draft_spec())
    assert (received.report.version, received.report.draft_version) == (1, 1)
    assert all(torch.equal(t, model.state_dict()[name].bfloat16()) for name, t in received.policy.items())
    assert torch.equal(received.draft["fc.weight"], head.fc.weight.bfloat16())
    assert torch.equal(received.draft["d2t"], head.d2t)


def run(learner: Learner, steps: range, draft: bool = True):
    rows = []
    for number in steps:
        groups = rewarded(random_groups(RAGGED, seed=number))
        metrics = learner.step(groups, learner.logprobs(groups)).metrics
        rows.append({name: value for name, value in metrics.items() if not name.startswith("seconds/")})
    return rows


@pytest.mark.parametrize("update", [UpdateSettings(), UpdateSettings(mini_batch_size=4, num_iterations=2)])
def test_a_resumed_learner_goes_on_to_the_bit(tmp_path, update):
    draft = DraftSettings(warmup_steps=3, token_fraction=0.6, replay_rollouts=5)
    optimizer = OptimizerSettings(learning_rate=1e-3, warmup_steps=3, schedule="linear", total_updates=20)

    def fresh():
        return make_learner(tiny_policy(torch.float32), draft=draft, optimizer=optimizer, update=update)

    whole = fresh()
    run(whole, range(2))
    whole.save(tmp_path)
    expected = run(whole, range(2, 4))
    resumed = fresh()
    resumed.load(tmp_path)
    assert resumed.version == 2
    assert run(resumed, range(2, 4)) == expected
    assert same(weights(whole.forward.model), weights(resumed.forward.model))
    assert same(weights(whole.drafter.student.head), weights(resumed.drafter.student.head))


def test_an_untied_policy_without_drafter_resumes_too(tmp_path):
    first = make_learner(tiny_policy(torch.float32, tied=False))
    run(first, range(1))
    first.save(tmp_path)
    second = make_learner(tiny_policy(torch.float32, tied=False, seed=9))
    second.load(tmp_path)
    assert same(weights(first.forward.model), weights(second.forward.model))


def test_saving_between_log_probabilities_and_step_drops_the_unfinished_step(tmp_path):
    always = UpdateSettings(recompute="always")
    learner = make_learner(tiny_policy(torch.float32), draft=DRAFT, update=always)
    run(learner, range(1))
    kept = weights(learner.drafter.student.head)
    learner.logprobs(rewarded(random_groups(RAGGED, seed=1)))
    assert not same(kept, weights(learner.drafter.student.head))
    learner.save(tmp_path)
    resumed = make_learner(tiny_policy(torch.float32), draft=DRAFT, update=always)
    resumed.load(tmp_path)
    assert same(kept, weights(resumed.drafter.student.head))


@pytest.mark.parametrize("victim", ["learner.pt", "policy/model.safetensors", "draft/model.safetensors"])
def test_a_truncated_checkpoint_is_refused_in_one_line(tmp_path, victim):
    learner = make_learner(tiny_policy(torch.float32), draft=DRAFT)
    learner.save(tmp_path)
    path = tmp_path / victim
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError) as caught:
        learner.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_policy_or_drafter_is_refused(tmp_path):
    make_learner(tiny_policy(torch.float32), draft=DRAFT).save(tmp_path)
    with pytest.raises(CheckpointError, match="policy of this recipe"):
        make_learner(tiny_policy(torch.float32, layers=5), draft=DRAFT).load(tmp_path)
    with pytest.raises(CheckpointError, match="without a trained drafter"):
        make_learner(tiny_policy(torch.float32)).load(tmp_path)
    model = tiny_policy(torch.float32)
    other = make_learner(model, draft=DRAFT, head=tiny_draft_head(model, reduced=False))
    with pytest.raises(CheckpointError, match="another shape"):
        other.load(tmp_path)


class Watcher:
    """An auditor that notes what it is shown."""

    def __init__(self, error: bool = False):
        self.seen = []
        self.error = error

    def select(self, rollout):
        return rollout.request_id.sibling != 1

    def observe(self, rollout, logits_TV):
        self.seen.append((rollout.request_id, tuple(logits_TV.shape)))

    def finish_step(self):
        if self.error:
            raise AuditError("not the policy's")
        return {"audit/tokens": float(sum(shape[0] for _, shape in self.seen))}


@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_the_auditor_sees_the_selected_rollouts_of_the_present_version_once(recompute):
    watcher = Watcher()
    learner = make_learner(tiny_policy(), auditor=watcher, update=UpdateSettings(recompute=recompute))
    old = make_group(1, [2], [[5, 5], [6]], [1.0, 0.0], version=7)
    groups = [make_group(0, [1, 5], [[7, 2], [8], [9, 9, 9]], [1.0, 0.0, 1.0]), old]
    metrics = learner.step(groups, learner.logprobs(groups)).metrics
    assert watcher.seen == [((0, 0), (2, 50)), ((0, 2), (3, 50))]
    assert metrics["audit/tokens"] == 5
    assert metrics["audit/skipped"] == 1.0


def test_a_sample_that_cannot_be_judged_is_said_once(caplog):
    learner = make_learner(tiny_policy(), auditor=Watcher())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            group = make_group(1, [2], [[5, 5], [6]], [1.0, 0.0], version=7)
            learner.step([group], learner.logprobs([group]))
    assert [record.message.count("1 rollouts of the sample") for record in caplog.records] == [1]


def test_a_failed_audit_stops_before_the_policy_changes():
    model = tiny_policy()
    learner = make_learner(model, auditor=Watcher(error=True))
    before = weights(model)
    with pytest.raises(AuditError):
        learner.step(rewarded(random_groups(RAGGED)), None)
    assert same(before, weights(model))


def test_training_raises_the_probability_of_rewarded_completions():
    model = tiny_policy()
    learner = make_learner(model, optimizer=OptimizerSettings(learning_rate=3e-3))
    group = make_group(0, [1, 5], [[7, 2, 9], [8, 3, 3]], [1.0, 0.0])

    def log_probability(tokens):
        log_p = model(input_ids=torch.tensor([[1, 5, *tokens]])).logits[0].log_softmax(-1)
        return sum(float(log_p[1 + i, token]) for i, token in enumerate(tokens))

    good, bad = log_probability([7, 2, 9]), log_probability([8, 3, 3])
    for _ in range(5):
        learner.step([copy.copy(group)], None)
    assert log_probability([7, 2, 9]) > good
    assert log_probability([8, 3, 3]) < bad
