from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.drafters.small_model import SmallModelDrafter
from leadout.errors import RefitError
from leadout.models.cut_layers import cut_tensors
from leadout.models.decoder import FusedDecoder
from leadout.models.sampling import Law
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.equivalence.tiny_engines import (
    accepted,
    drafted,
    engine,
    generate,
    ragged_requests,
    small_drafter,
    tokens_of,
)
from tests.models.tiny import decoder, policy


class Uniforms:
    """Numbers by depth, one per row."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.table = np.random.default_rng(seed).random((8, num_rows))

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        return torch.from_numpy(self.table[depth])


def admit(drafter: SmallModelDrafter, prompts: list[list[int]], siblings: int = 1) -> None:
    slot = 0
    for draw, prompt in enumerate(prompts):
        made = Prompt(id=str(draw), token_ids=np.array(prompt, np.int32), text="")
        requests = [
            Request(rollout_id=RolloutId(draw, s), prompt=made, params=SamplingParams(temperature=0.7))
            for s in range(siblings)
        ]
        drafter.admit(list(range(slot, slot + siblings)), requests, None)
        slot += siblings


def observe(drafter: SmallModelDrafter, *tokens: list[int]) -> None:
    width = max(map(len, tokens))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
    drafter.observe(list(range(len(tokens))), padded, np.array([len(row) for row in tokens]), None)


@pytest.fixture(scope="module")
def llama():
    return policy("llama", torch.float64)


def law_after(model, layers: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """The cut model's law, computed over the whole text at once."""
    fused = small_drafter(model, 1, layers=layers).decoder
    from leadout.models.kv import KVSlots

    kv = KVSlots(fused.spec, 1, fused.max_len, fused.dtype)
    hidden = fused.forward(torch.tensor([tokens]), kv, kv.allocate(1)).hidden_BNH[0, -1:]
    return (fused.logits(hidden)[0] / 0.7).softmax(-1)


def test_drafts_are_drawn_from_the_small_models_own_law_after_any_history(llama):
    drafter = small_drafter(llama, 4)
    admit(drafter, [[5, 6, 7], [9]], siblings=2)
    observe(drafter, [1], [2], [3], [4])
    drafter.propose([0, 1, 2, 3], np.array([2, 2, 2, 2]), Uniforms(4, 9))
    observe(drafter, [11, 12, 13], [21], [31, 32], [41])
    noise = Uniforms(4)
    draft = drafter.propose([0, 1, 2, 3], np.array([3, 3, 3, 3]), noise)
    texts = [[5, 6, 7, 1, 11, 12, 13], [5, 6, 7, 2, 21], [9, 3, 31, 32], [9, 4, 41]]
    for row, text in enumerate(texts):
        for depth in range(3):
            q = law_after(llama, (0, 2), text + draft.tokens_BK[row, :depth].tolist())
            torch.testing.assert_close(draft.probs.values_BKV[row, depth], q, rtol=0, atol=1e-9)
            drawn = Law.from_weights(q[None]).draw(noise.draft_uniforms(depth)[row : row + 1])
            assert draft.tokens_BK[row, depth] == drawn[0]


def test_tokens_committed_while_off_are_run_before_the_next_draft(llama):
    often, rarely = small_drafter(llama, 1), small_drafter(llama, 1)
    for drafter in (often, rarely):
        admit(drafter, [[5, 6]])
        for token in (1, 2, 3):
            observe(drafter, [token])
            if drafter is often:
                drafter.propose([0], np.array([4]), Uniforms(1, token))
    drafts = []
    for drafter in (often, rarely):
        observe(drafter, [8])
        drafts.append(drafter.propose([0], np.array([3]), Uniforms(1)))
    torch.testing.assert_close(drafts[0].probs.values_BKV, drafts[1].probs.values_BKV, rtol=0, atol=1e-9)


def test_rows_past_the_small_models_context_go_on_without_drafts(llama):
    drafter = small_drafter(llama, 3, max_len=6)
    admit(drafter, [[5, 6, 7], [1, 2, 3, 4, 5], [9] * 8])
    observe(drafter, [1], [2], [3])
    draft = drafter.propose([0, 1, 2], np.array([5, 5, 5]), Uniforms(3))
    assert draft.counts_B.tolist() == [3, 1, 0]
    q = law_after(llama, (0, 2), [1, 2, 3, 4, 5, 2])
    torch.testing.assert_close(draft.probs.values_BKV[1, 0], q, rtol=0, atol=1e-9)


def test_a_small_model_of_shorter_context_leaves_the_text_as_it_is(llama):
    fused = decoder(llama, 96)
    requests = ragged_requests(5, 2, max_new_tokens=40)
    speculative = generate(engine(fused, small_drafter(llama, 16, greedy=True, max_len=24), 4), requests)
    assert tokens_of(speculative) == tokens_of(generate(engine(fused), requests))
    assert drafted(speculative) > 0


def test_all_of_the_policys_layers_are_accepted_at_every_position(llama):
    fused = decoder(llama, 96)
    drafter = small_drafter(llama, 16, layers=(0, 1, 2))
    speculative = generate(engine(fused, drafter, 3), ragged_requests(4, 2, max_new_tokens=25))
    assert accepted(speculative) == drafted(speculative) > 0


def test_ids_past_the_policys_vocabulary_are_never_drafted(llama):
    drafter = SmallModelDrafter(small_drafter(llama, 2).decoder, num_slots=2, policy_vocab_size=11)
    admit(drafter, [[5], [6]])
    observe(drafter, [1], [2])
    draft = drafter.propose([0, 1], np.array([8, 8]), Uniforms(2))
    assert draft.probs.values_BKV.shape == (2, 8, 11)
    assert int(draft.tokens_BK.max()) < 11


def test_new_weights_are_taken_whole_or_not_at_all(llama):
    drafter = small_drafter(llama, 1)
    other = policy("llama", torch.float64, seed=5)
    weights = cut_tensors(dict(other.named_parameters()), (0, 2))
    missing = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    with pytest.raises(RefitError, match=r"missing .*norm"):
        drafter.load(missing, 1)
    admit(drafter, [[5]])
    observe(drafter, [1])
    draft = drafter.propose([0], np.array([1]), Uniforms(1))
    torch.testing.assert_close(draft.probs.values_BKV[0, 0], law_after(llama, (0, 2), [5, 1]), rtol=0, atol=1e-9)
    drafter.load(weights, 2)
    drafter.release([0])
    admit(drafter, [[5]])
    observe(drafter, [1])
    draft = drafter.propose([0], np.array([1]), Uniforms(1))
    torch.testing.assert_close(draft.probs.values_BKV[0, 0], law_after(other, (0, 2), [5, 1]), rtol=0, atol=1e-9)
    assert drafter.version == 2


def test_released_rows_leave_their_slots_to_others(llama):
    drafter = small_drafter(llama, 2)
    for _ in range(3):
        admit(drafter, [[5, 6], [7]])
        observe(drafter, [1], [2])
        drafter.propose([0], np.array([2]), Uniforms(1))
        drafter.release([0, 1])
    assert isinstance(drafter.decoder, FusedDecoder)
