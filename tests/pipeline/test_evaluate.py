from leadout.pipeline.evaluate import Evaluation, evaluation_metrics
from leadout.records import Finish
from tests.fakes import FakeGenerator, FakeScorer, make_group, make_params, make_prompt, make_rollout


def groups():
    def rollouts(draw):
        return [make_rollout(draw, 0, tokens=(5, 2)), make_rollout(draw, 1, tokens=(5,) * 6, finish=Finish.LENGTH)]

    return [make_group(rollouts(0), [1.0, 0.0]), make_group(rollouts(1), [0.5, 0.0])]


def test_metrics_of_two_prompts_with_two_answers_are_hand_computed():
    assert evaluation_metrics(groups()) == {
        "eval/mean@2": 0.375,
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
        "eval/mean_length": 4.0,
        "eval/clipped_ratio": 0.5,
    }


def test_the_reward_from_which_an_answer_is_solved_can_be_lowered():
    assert evaluation_metrics(groups(), solved_reward=0.5)["eval/pass@2"] == 1.0


def test_one_answer_per_prompt_has_pass_at_one_only():
    metrics = evaluation_metrics([make_group([make_rollout()], [1.0])])
    assert (metrics["eval/mean@1"], metrics["eval/pass@1"]) == (1.0, 1.0)


def test_no_prompts_give_no_metrics():
    assert evaluation_metrics([]) == {}


def test_an_evaluation_repeats_itself_and_answers_every_prompt_k_times():
    generator = FakeGenerator()
    evaluation = Evaluation(
        prompts=tuple(make_prompt(i) for i in range(3)),
        generator=generator,
        scorer=FakeScorer(),
        params=make_params(seed=9),
        num_generations=4,
    )
    assert evaluation.run() == evaluation.run()
    assert len(generator.submitted) == 24
    assert {request.params.seed for request in generator.submitted} == {9}
