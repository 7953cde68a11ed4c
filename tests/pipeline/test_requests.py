from leadout.pipeline.requests import DrawCounter, make_requests
from tests.fakes import make_params, make_prompt


def test_ids_count_draws_and_siblings():
    requests = make_requests([make_prompt(0), make_prompt(1)], make_params(), 2, first_draw=7)
    assert [tuple(request.rollout_id) for request in requests] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert [request.prompt.id for request in requests] == ["fake/0", "fake/0", "fake/1", "fake/1"]


def test_draw_numbers_are_never_reused_even_for_the_same_prompt():
    draws, prompt = DrawCounter(), make_prompt()
    ids = [r.rollout_id for _ in range(3) for r in draws.requests([prompt, prompt], make_params(), 2)]
    assert len(set(ids)) == 12
    assert draws.next_draw == 6
