import pytest

from leadout.errors import LeadoutError
from leadout.pipeline.generate import generate, group_by_draw
from leadout.pipeline.requests import make_requests
from leadout.records import Score
from tests.fakes import FakeGenerator, make_params, make_prompt, make_rollout


def requests_for(prompts=2, generations=2):
    return make_requests([make_prompt(i) for i in range(prompts)], make_params(), generations)


def test_rollouts_come_in_the_order_of_the_requests_however_they_finish():
    requests = requests_for(3, 2)
    rollouts = generate(FakeGenerator(), requests)
    assert [r.request_id for r in rollouts] == [r.rollout_id for r in requests]


def test_no_requests_give_no_rollouts():
    assert generate(FakeGenerator(), []) == []


def test_a_lost_rollout_is_an_error():
    class Losing(FakeGenerator):
        def submit(self, requests):
            super().submit(requests[1:])

    with pytest.raises(LeadoutError, match="asked for 4 different rollouts, 1 did not come back and 0 came unasked"):
        generate(Losing(), requests_for())


def test_a_rollout_nobody_asked_for_is_an_error():
    generator = FakeGenerator()
    generator.submit(make_requests([make_prompt(9)], make_params(), 1, first_draw=50))
    generator.queue.reverse()

    class LastFirst(FakeGenerator):
        def collect(self, timeout=None):
            return [self._generate(self.queue.pop(0))] if self.queue else []

    with pytest.raises(LeadoutError, match="1 did not come back and 1 came unasked"):
        generate(LastFirst(queue=generator.queue), requests_for())


def test_groups_hold_the_siblings_of_one_draw_whatever_the_order():
    order = ((1, 1), (0, 0), (1, 0), (0, 1))
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.5, (1, 1): 0.25}
    groups = group_by_draw(
        [make_rollout(draw, sibling) for draw, sibling in order],
        [Score(reward=rewards[at], parts={}, text="") for at in order],
    )
    assert [[tuple(r.request_id) for r in g.rollouts] for g in groups] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [[s.reward for s in g.scores] for g in groups] == [[1.0, 0.0], [0.5, 0.25]]
    assert [g.prompt.id for g in groups] == ["fake/0", "fake/1"]


def test_the_same_prompt_drawn_twice_makes_two_groups():
    prompt = make_prompt(4)
    rollouts = [make_rollout(draw, sibling, prompt=prompt) for draw in (3, 8) for sibling in (0, 1)]
    groups = group_by_draw(rollouts, [Score(reward=0.0, parts={}, text="")] * 4)
    assert [len(group.rollouts) for group in groups] == [2, 2]
