from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.train.cotrain import DraftTrainer
from leadout.train.draft_loss import expected_rounds
from leadout.train.lesson import Lesson
from leadout.train.settings import DraftSettings
from leadout.train.students import HeadStudent
from tests.train.learner_fakes import (
    DRAFT_IDS,
    KINDS,
    make_forward,
    make_group,
    random_groups,
    sampled_groups,
    tiny_draft_head,
    tiny_policy,
)
from tests.train.test_chains import slow_logits

EXACT = DraftSettings(autocast=False, learning_rate=3e-3, warmup_steps=1)


def step(trainer: DraftTrainer, forward, groups) -> dict[str, float]:
    """One train stage of the drafter alone."""
    trainer.begin_step(sum(len(group.rollouts) for group in groups))
    for batch in forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups]):
        with torch.no_grad():
            output = forward.run(batch, taps=trainer.taps)
        trainer.observe(batch, output, forward)
    metrics = trainer.finish_step(forward)
    trainer.remember(groups)
    return metrics


def lesson(trainer: DraftTrainer, batch, output, forward) -> Lesson:
    return Lesson(batch, output, forward, trainer.student.token_ids_V, trainer.temperature)


def setup(settings: DraftSettings = EXACT, *, reduced: bool = True, temperature: float = 1.0, kind: str = "eagle3"):
    model = tiny_policy()
    head = tiny_draft_head(model, reduced=reduced, kind=kind)
    trainer = DraftTrainer(HeadStudent(head), settings, temperature=temperature, seed=0)
    return model, make_forward(model, temperature=temperature), trainer


@pytest.mark.parametrize(("kind", "reduced"), [("eagle3", True), ("eagle3", False), ("parallel", True), ("mtp", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_expected_acceptance_length_is_that_of_cached_drafting(kind, reduced, temperature):
    model, forward, trainer = setup(reduced=reduced, temperature=temperature, kind=kind)
    groups = random_groups([[6, 2, 1], [5]])
    metrics = step(trainer, forward, groups)

    head = tiny_draft_head(model, reduced=reduced, kind=kind)
    columns = {int(token): i for i, token in enumerate(DRAFT_IDS if reduced else range(50))}
    tokens, rounds = 0, 0.0
    for group in groups:
        prompt = group.prompt.token_ids.tolist()
        for rollout in group.rollouts:
            completion = rollout.token_ids.tolist()
            drafts = slow_logits(head, model, prompt, completion)
            policy = (model(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature).softmax(-1)
            accept = np.zeros((1, len(completion), 3))
            for (depth, target), logits in drafts.items():
                token = completion[target]
                p = float(policy[len(prompt) + target - 1, token])
                q = float((logits / temperature).softmax(-1)[columns[token]]) if token in columns else 0.0
                accept[0, target - depth + 1, depth - 1] = min(1.0, q / p)
            tokens += max(len(completion) - 1, 0)
            rounds += expected_rounds(accept, np.array([len(completion)]))[0]
    assert metrics["draft/expected_acceptance_length"] == pytest.approx(tokens / rounds, abs=1e-9)


@pytest.mark.parametrize("reduced", [True, False])
def test_coverage_and_acceptance_by_entropy_are_those_of_the_policys_law(reduced):
    model, forward, trainer = setup(reduced=reduced)
    group = random_groups([[6, 4]])[0]
    metrics = step(trainer, forward, [group])
    head, prompt = tiny_draft_head(model, reduced=reduced), group.prompt.token_ids.tolist()
    ids = DRAFT_IDS if reduced else torch.arange(50)
    mass, by_class = [], {}
    for rollout in group.rollouts:
        completion = rollout.token_ids.tolist()
        policy = model(input_ids=torch.tensor([prompt + completion])).logits[0].softmax(-1)
        for (depth, target), logits in slow_logits(head, model, prompt, completion).items():
            if depth == 1:
                p = policy[len(prompt) + target - 1]
                entropy = float(-(p * p.log()).sum())
                bound = max(each for each in (0, 0.3, 1, 2, 3.5) if each <= entropy)
                mass.append(float(p[ids].sum()))
                by_class.setdefault(bound, []).append(float(torch.minimum(p[ids], logits.softmax(-1)).sum()))
    assert metrics["draft/vocabulary_coverage"] == pytest.approx(np.mean(mass), abs=1e-6)
    found = {name: value for name, value in metrics.items() if "_entropy_" in name}
    assert found == {
        f"draft/expected_acceptance_rate_entropy_{bound:g}": pytest.approx(np.mean(values), abs=1e-6)
        for bound, values in by_class.items()
    }


def test_acceptance_is_measured_on_the_head_that_served_the_step():
    groups = random_groups([[6, 5, 6], [5, 6]])
    _, forward, learning = setup()
    forward.settings = type(forward.settings)(temperature=1.0, max_completions=1, autocast=False)
    measured = step(learning, forward, groups)
    _, forward, frozen = setup(DraftSettings(autocast=False, learning_rate=1e-12))
    assert step(frozen, forward, groups)["draft/expected_acceptance_length"] == pytest.approx(
        measured["draft/expected_acceptance_length"], abs=1e-9
    )


@pytest.mark.parametrize(("max_completions", "copies"), [(8, 0), (1, 1)])
def test_the_drafter_is_copied_only_where_later_packs_are_still_to_be_measured(max_completions, copies, monkeypatch):
    _, forward, trainer = setup()
    forward.settings = type(forward.settings)(temperature=1.0, max_completions=max_completions, autocast=False)
    made = []
    frozen_copy = trainer.student.frozen_copy
    monkeypatch.setattr(trainer.student, "frozen_copy", lambda: made.append(1) or frozen_copy())
    step(trainer, forward, random_groups([[6, 5, 6], [5, 6]]))
    assert len(made) == copies


def test_the_measurement_stops_at_its_budget_of_tokens():
    _, forward, trainer = setup(DraftSettings(autocast=False, measure_tokens=4))
    full = random_groups([[5, 9, 9]])
    first_only = random_groups([[5]])
    alone = DraftTrainer(HeadStudent(tiny_draft_head(tiny_policy())), EXACT, temperature=1.0, seed=0)
    first_only[0] = make_group(0, full[0].prompt.token_ids, [full[0].rollouts[0].token_ids], [0.0])
    assert step(trainer, forward, full)["draft/expected_acceptance_length"] == pytest.approx(
        step(alone, forward, first_only)["draft/expected_acceptance_length"], abs=1e-9
    )


@pytest.mark.parametrize(("kind", "reduced"), [("eagle3", True), ("eagle3", False), ("parallel", True), ("mtp", False)])
def test_learning_on_rollouts_raises_the_acceptance_expected_on_others(kind, reduced):
    model = tiny_policy()
    forward = make_forward(model)
    head = tiny_draft_head(model, reduced=reduced, noise=0.0, kind=kind)
    settings = DraftSettings(autocast=False, learning_rate=5e-3, warmup_steps=1)
    trainer = DraftTrainer(HeadStudent(head), settings, temperature=1.0, seed=0)
    training, held_out = sampled_groups(model, 8, 16, 12, seed=1), sampled_groups(model, 4, 16, 12, seed=2)

    def expected_length() -> float:
        watcher = DraftTrainer(
            HeadStudent(head), DraftSettings(autocast=False, learning_rate=1e-12), temperature=1.0, seed=0
        )
        return step(watcher, forward, held_out)["draft/expected_acceptance_length"]

    before = expected_length()
    losses = [step(trainer, forward, training)["draft/loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert expected_length() > before + 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_draft_gradients_never_reach_the_policy(kind):
    model, forward, trainer = setup(kind=kind)
    (batch,) = forward.pack(random_groups([[6, 4]]), [np.zeros(2)])
    output = forward.run(batch, taps=trainer.taps)
    loss = trainer.loss(trainer.draft(lesson(trainer, batch, output, forward), [0, 1]))
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in trainer.student.head.parameters())


def test_the_map_of_the_draft_vocabulary_does_not_learn():
    _, forward, trainer = setup()
    step(trainer, forward, random_groups([[6, 4]]))
    assert trainer.student.head.draft_token_ids().tolist() == DRAFT_IDS.tolist()


def test_the_loss_of_a_rollout_does_not_depend_on_what_it_is_packed_with():
    _, forward, trainer = setup()
    groups = random_groups([[6, 4], [5, 3]])
    (together,) = forward.pack(groups, [np.zeros(2)] * 2)
    output = forward.run(together, taps=trainer.taps)
    (alone,) = forward.pack(
        [make_group(1, groups[1].prompt.token_ids, [groups[1].rollouts[0].token_ids], [0.0])], [np.zeros(1)]
    )
    got = trainer.loss(trainer.draft(lesson(trainer, together, output, forward), [2]))
    expected = trainer.loss(trainer.draft(lesson(trainer, alone, forward.run(alone, taps=trainer.taps), forward), [0]))
    assert float(got) == pytest.approx(float(expected), abs=1e-9)


def test_given_tokens_are_not_learnt():
    _, forward, trainer = setup()
    metrics = step(trainer, forward, [make_group(0, [1, 2], [[3, 4, 5, 6, 7]], [0.0], given=3)])
    assert metrics["draft/tokens"] == 2


def test_masked_rollouts_still_teach_the_drafter():
    _, forward, trainer = setup()
    metrics = step(trainer, forward, [make_group(0, [1, 2], [[3, 4, 5]], [0.0], masked=[True])])
    assert metrics["draft/tokens"] == 2


@pytest.mark.parametrize("completions", [[[]], [[3]], [[], [4]]])
def test_rollouts_without_anything_to_draft_leave_the_head_as_it_is(completions):
    _, forward, trainer = setup()
    before = {name: tensor.clone() for name, tensor in trainer.student.head.state_dict().items()}
    trainer.begin_step(len(completions))
    for batch in forward.pack([make_group(0, [1, 2], completions, [0.0] * len(completions))], [np.zeros(2)]):
        if batch.response_R.numel():
            trainer.observe(batch, forward.run(batch, taps=trainer.taps), forward)
    metrics = trainer.finish_step(forward)
    assert metrics.pop("seconds/drafter") >= 0.0
    assert metrics == {"draft/version": 0.0, "draft/updates": 0.0, "draft/age": 0.0}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.student.head.state_dict().items())


def test_four_rollouts_make_an_update_and_passes_repeat_it():
    _, forward, trainer = setup(DraftSettings(autocast=False, micro_rollouts=4, passes=3))
    metrics = step(trainer, forward, random_groups([[3] * 8]))
    assert metrics["draft/updates"] == 6


def test_only_the_asked_share_of_rollouts_is_learnt():
    _, forward, trainer = setup(DraftSettings(autocast=False, token_fraction=0.25))
    metrics = step(trainer, forward, random_groups([[5] * 8]))
    assert metrics["draft/tokens"] == 2 * 4


def test_a_share_of_rollouts_is_measured_by_itself():
    groups = random_groups([[9], [5], [7], [3]])
    _, forward, trainer = setup(DraftSettings(autocast=False, token_fraction=0.25))
    measured = step(trainer, forward, groups)
    alone = [step(setup()[2], forward, [group])["draft/expected_acceptance_length"] for group in groups]
    assert measured["draft/tokens"] in {8, 4, 6, 2}
    chosen = {8: 0, 4: 1, 6: 2, 2: 3}[int(measured["draft/tokens"])]
    assert measured["draft/expected_acceptance_length"] == pytest.approx(alone[chosen], abs=1e-6)
    assert len({round(length, 4) for length in alone}) == 4


def test_the_drafter_is_measured_on_steps_that_it_does_not_learn_on():
    groups = random_groups([[6, 5], [4, 7]])
    _, forward, trainer = setup(DraftSettings(autocast=False, every=2, learning_rate=1e-12))
    rows = [step(trainer, forward, groups) for _ in range(2)]
    assert rows[1]["draft/updates"] == 0
    assert rows[1]["draft/expected_acceptance_length"] == pytest.approx(
        rows[0]["draft/expected_acceptance_length"], abs=1e-6
    )


def test_the_drafter_learns_on_every_second_step_when_asked():
    _, forward, trainer = setup(DraftSettings(autocast=False, every=2))
    rows = [step(trainer, forward, random_groups([[4, 4]])) for _ in range(4)]
    assert [row["draft/version"] for row in rows] == [1, 1, 2, 2]
    assert [row["draft/updates"] for row in rows] == [1, 0, 1, 0]
    assert [row["draft/age"] for row in rows] == [0, 0, 1, 0]


def test_the_learning_rate_warms_up():
    _, forward, trainer = setup(DraftSettings(autocast=False, warmup_steps=4, learning_rate=1e-3))
    rates = [step(trainer, forward, random_groups([[4, 4]]))["draft/learning_rate"] for _ in range(5)]
    np.testing.assert_allclose(rates, [5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_replay_trains_on_as_many_kept_rollouts_as_fresh_ones():
    _, forward, trainer = setup(DraftSettings(autocast=False, replay_rollouts=6))
    first = step(trainer, forward, random_groups([[5] * 4]))
    second = step(trainer, forward, random_groups([[3] * 4], seed=1))
    assert first["draft/tokens"] == 4 * 4
    assert second["draft/tokens"] == 4 * 2 + 4 * 4
    assert [rollout.length for rollout in trainer.replay] == [5, 5, 3, 3, 3, 3]


def test_bf16_autocast_keeps_float32_masters():
    model = tiny_policy(torch.float32)
    head = tiny_draft_head(model)
    trainer = DraftTrainer(HeadStudent(head), DraftSettings(), temperature=1.0, seed=0)
    metrics = step(trainer, make_forward(model, autocast=True), random_groups([[6, 5]]))
    assert head.fc.weight.dtype is torch.float32
    assert np.isfinite(metrics["draft/loss"])


def test_rolling_back_undoes_a_step():
    _, forward, trainer = setup()
    groups = random_groups([[6, 5], [4, 4]])
    step(trainer, forward, groups)
    kept = {name: tensor.clone() for name, tensor in trainer.student.head.state_dict().items()}
    trainer.begin_step(4, can_roll_back=True)
    for batch in forward.pack(groups, [np.zeros(2)] * 2):
        trainer.observe(batch, forward.run(batch, taps=trainer.taps), forward)
    trainer.roll_back()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in trainer.student.head.state_dict().items())
    assert trainer.updates == 1


@pytest.mark.parametrize("loss_fn", ["kl", "tv", "lk", "ce+tv"])
def test_every_loss_raises_the_acceptance_of_the_rollouts_it_learns(loss_fn):
    _, forward, trainer = setup(DraftSettings(autocast=False, learning_rate=1e-2, warmup_steps=1, loss_fn=loss_fn))
    groups = random_groups([[8, 8]])
    before = trainer.evaluate(groups, forward)["draft/expected_acceptance_rate_pos_1"]
    for _ in range(12):
        step(trainer, forward, groups)
    assert trainer.evaluate(groups, forward)["draft/expected_acceptance_rate_pos_1"] > before + 0.1


def test_held_out_acceptance_is_what_a_step_would_measure():
    _, forward, trainer = setup()
    groups = random_groups([[6, 5, 6], [5, 6]])
    before = {name: tensor.clone() for name, tensor in trainer.student.head.state_dict().items()}
    held_out = trainer.evaluate(groups, forward)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.student.head.state_dict().items())
    measured = step(trainer, forward, groups)
    assert held_out == pytest.approx({name: measured[name] for name in held_out}, rel=1e-12)
    assert {"draft/expected_acceptance_length", "draft/vocabulary_coverage"} < held_out.keys()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("given", [0, 2])
def test_what_is_measured_does_not_depend_on_how_the_drafter_learns(steps, given):
    settings = DraftSettings(autocast=False, steps=steps, measure_depth=2, micro_rollouts=2, passes=2)
    _, forward, trainer = setup(settings)
    groups = random_groups([[6, 1, 5], [5, 6]])
    groups.append(make_group(2, [1, 2], [[3, 4, 5, 6]], [0.0], given=given))
    alone = trainer.evaluate(groups, forward)
    measured = step(trainer, forward, groups)
    assert alone == pytest.approx({name: measured[name] for name in alone}, rel=1e-12)
    assert measured["draft/tokens"] == 5 + 4 + 4 + 5 + (2 if given else 3)
    assert measured["draft/updates"] == 2 * 3


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_gradients_are_cut_to_the_largest_norm_and_left_alone_below_it(limit):
    _, forward, trainer = setup(DraftSettings(autocast=False, max_grad_norm=limit))
    metrics = step(trainer, forward, random_groups([[6, 5]]))
    moments = [state["exp_avg"] for state in trainer.state_dict()["optimizer"]["state"].values()]
    norm = float(torch.nn.utils.get_total_norm(moments)) / (1 - 0.9)
    assert norm == pytest.approx(min(metrics["draft/grad_norm"], limit), rel=1e-2 * limit if limit < 1 else 1e-9)


def test_the_learning_rate_rises_stays_and_falls_to_its_floor():
    settings = DraftSettings(
        autocast=False, learning_rate=1.0, warmup_steps=2, decay_from=4, decay_updates=8, decay_floor=0.1
    )
    _, _, trainer = setup(settings)
    rates = []
    for updates in (0, 1, 3, 4, 6, 8, 20):
        trainer.updates = updates
        rates.append(trainer._learning_rate())
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.5, 0.1, 0.1])
