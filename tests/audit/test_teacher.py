import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leadout.audit.plan import DEFAULT_PROMPTS, audit_requests
from leadout.audit.teacher import TeacherForced
from leadout.records import SamplingParams
from tests.fakes import make_prompt, make_rollout


def make_model(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def test_logits_stand_at_the_positions_that_produced_the_tokens():
    model = make_model(torch.float64)
    rollout = make_rollout(tokens=(7, 8, 9, 2))
    (scores,) = TeacherForced(model)([rollout])
    context = torch.from_numpy(np.concatenate((rollout.prompt.token_ids, rollout.token_ids)).astype(np.int64))
    with torch.inference_mode():
        for position in range(4):
            last = model(context[None, : len(rollout.prompt.token_ids) + position]).logits[0, -1]
            torch.testing.assert_close(scores.exact_TV[position], last, atol=1e-12, rtol=0)
    assert scores.rounded_TV is None


def test_a_bf16_pass_keeps_its_logits_in_fp32():
    (scores,) = TeacherForced(make_model(torch.float32), make_model(torch.bfloat16))([make_rollout(tokens=(7, 8, 9))])
    assert scores.rounded_TV.dtype is torch.float32
    gap = (scores.rounded_TV - scores.exact_TV).abs()
    assert 0 < float(gap.max()) < 0.1
    assert not torch.equal(scores.rounded_TV.bfloat16().float(), scores.rounded_TV)


def test_a_plan_covers_the_tokens_asked_for_with_whole_groups_of_distinct_ids():
    prompts = [make_prompt(number) for number in range(3)]
    requests = audit_requests(prompts, SamplingParams(max_new_tokens=50), tokens=2000, siblings=4)
    assert len(requests) == 4 * 15
    assert len({request.rollout_id for request in requests}) == 60
    assert [request.prompt.id for request in requests[::4]][:4] == ["fake/0", "fake/1", "fake/2", "fake/0"]
    assert len(set(DEFAULT_PROMPTS)) == len(DEFAULT_PROMPTS) >= 8
