from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.train import chains as chains_module
from leadout.train.chains import build_chains, unroll, written_out_attention
from tests.train.learner_fakes import KINDS, make_forward, make_group, random_groups, tiny_draft_head, tiny_policy

STEPS = 3


class CachedDrafting:
    """Drafting as an engine does it: one entry at a time, keys and values appended, the chain's own dropped again."""

    def __init__(self, head, model):
        self.head = head
        self.embedding = model.model.embed_tokens.weight
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def push(self, state_H, token: int, position: int, *, deeper: bool = False):
        """An entry from a feature, or `deeper` from the output of the entry before."""
        head = self.head
        embedded = head.embed(torch.tensor([token]), self.embedding)
        entry = head.deeper(state_H[None], embedded) if deeper else head.entry(state_H[None], embedded)
        rotary = head.rotary(torch.tensor([position]))
        query = head.queries(entry.input_NE, rotary)[0]
        key, value = head.keys_values(entry.input_NE, rotary)
        self.keys.append(key[0])
        self.values.append(value[0])
        repeat = head.spec.num_heads // head.spec.num_kv_heads
        keys = torch.stack(self.keys).repeat_interleave(repeat, dim=1)
        values = torch.stack(self.values).repeat_interleave(repeat, dim=1)
        weights = (torch.einsum("qd,nqd->qn", query, keys) / head.spec.head_dim**0.5).softmax(-1)
        attended = torch.einsum("qn,nqd->qd", weights, values)
        return head.complete(attended[None], entry.residual_NH)[0]


def slow_logits(head, model, prompt: list[int], completion: list[int]) -> dict[tuple[int, int], torch.Tensor]:
    """Draft logits by (step, index of the predicted completion token), every chain drafted by itself."""
    tokens = prompt + completion
    hidden = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    if head.method == "mtp":
        features = last_stream(model, tokens)
    else:
        features = head.fuse(torch.cat([hidden[layer][0] for layer in head.spec.layer_ids], dim=-1))
    result = {}
    for start in range(len(prompt), len(tokens) - 1):
        engine = CachedDrafting(head, model)
        for j in range(1, start + 1):
            state = engine.push(features[j - 1], tokens[j], j - 1)
        for step in range(1, STEPS + 1):
            target = start + step
            if target >= len(tokens):
                break
            if step > 1:
                state = engine.push(state, tokens[target - 1], target - 2, deeper=True)
            result[step, target - len(prompt)] = head.logits(state[None], model.lm_head.weight)[0]
    return result


def last_stream(model, tokens: list[int]):
    """What leaves the last layer, ahead of the final norm (transformers' last hidden state is after it)."""
    kept = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
    model(input_ids=torch.tensor([tokens]))
    hook.remove()
    return kept[0]


def unrolled_logits(head, model, groups, rows):
    forward = make_forward(model, max_completions=16)
    (batch,) = forward.pack(groups, [np.zeros(len(group.rollouts)) for group in groups])
    output = forward.run(batch, taps=head.spec.layer_ids)
    chains = build_chains(batch, rows)
    hidden = unroll(head, chains, output.taps_TF, batch.token_ids_T, forward.embedding_VH, STEPS)
    return batch, chains, [head.logits(hidden_BLH, model.lm_head.weight) for hidden_BLH in hidden]


@pytest.mark.parametrize("few_scores", [chains_module.FEW_SCORES, 0])
@pytest.mark.parametrize("kind", [*KINDS, "norm before the residual"])
def test_unrolled_logits_equal_those_of_cached_drafting(kind, few_scores, monkeypatch):
    monkeypatch.setattr(chains_module, "FEW_SCORES", few_scores)
    model = tiny_policy()
    head = tiny_draft_head(model, kind=kind)
    if kind not in KINDS:
        object.__setattr__(head.spec, "norm_before_residual", True)
    groups = random_groups([[6, 2, 4], [3, 5], [4]], prompt_lengths=(5, 3, 1))
    rows = [0, 1, 2, 4, 5]
    _, chains, logits = unrolled_logits(head, model, groups, rows)
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    for row, number in enumerate(rows):
        group, rollout = rollouts[number]
        slow = slow_logits(head, model, group.prompt.token_ids.tolist(), rollout.token_ids.tolist())
        valid = {
            (step, column + 1)
            for step in range(1, STEPS + 1)
            for column in chains.valid_BL(step)[row].nonzero().squeeze(-1).tolist()
        }
        assert valid == set(slow)
        for (step, target), expected in slow.items():
            torch.testing.assert_close(logits[step - 1][row, target - 1], expected, rtol=0, atol=1e-9)


def test_attention_written_out_has_the_values_and_gradients_of_pytorchs():
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(2, 1, 6, 5, generator=generator) < 0.5
    visible[..., 0] = True
    results = []
    for attention in (written_out_attention, torch.nn.functional.scaled_dot_product_attention):
        generator.manual_seed(1)
        inputs = [torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for n in (6, 5, 5)]
        out = attention(*(tensor.requires_grad_() for tensor in inputs), visible)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_attention_written_out_rounds_to_bfloat16_only_at_the_end():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, n, 4, generator=generator).bfloat16() for n in (6, 5, 5)]
    visible = torch.ones(2, 1, 6, 5, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = written_out_attention(*inputs, visible)
    exact = written_out_attention(*(tensor.double() for tensor in inputs), visible)
    torch.testing.assert_close(low.double(), exact, rtol=2**-8, atol=1e-3)
    assert low.dtype is torch.bfloat16


def test_queries_that_count_at_a_deeper_step_are_the_last_ones():
    groups = [make_group(0, [1, 5], [[7, 2, 9, 3], [4, 6, 1]], [0.0] * 2, given=2)]
    _, chains, _ = unrolled_logits(tiny_draft_head(tiny_policy()), tiny_policy(), groups, [0, 1])
    queries = chains.counted()
    for step in range(1, STEPS + 2):
        own = queries.from_step(step)
        found = set(zip(queries.row_N[own].tolist(), queries.column_N[own].tolist()))
        assert found == set(map(tuple, (chains.valid_BL(step) & chains.wanted_BL).nonzero().tolist()))
    assert torch.equal(queries.target_N, chains.target_BL[queries.row_N, queries.column_N])


def test_targets_are_the_completions_tokens_but_the_first():
    groups = [make_group(0, [1, 5], [[7, 2, 9], [8], [4, 6]], [0.0] * 3)]
    batch, chains, _ = unrolled_logits(tiny_draft_head(tiny_policy()), tiny_policy(), groups, [0, 1, 2])
    targets = batch.token_ids_T[batch.response_R][chains.target_BL]
    assert torch.where(chains.real_BL, targets, -1).tolist() == [[2, 9], [6, -1]]


def test_given_tokens_are_no_targets():
    groups = [make_group(0, [1, 5], [[7, 2, 9, 4]], [0.0], given=2)]
    _, chains, _ = unrolled_logits(tiny_draft_head(tiny_policy()), tiny_policy(), groups, [0])
    assert chains.wanted_BL.tolist() == [[False, True, True]]


def test_rollouts_too_short_to_draft_in_give_no_chains():
    groups = [make_group(0, [1, 5], [[7], []], [0.0] * 2)]
    forward = make_forward(tiny_policy())
    (batch,) = forward.pack(groups, [np.zeros(2)])
    assert build_chains(batch, [0, 1]) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changed", ["sibling", "other group", "later token"])
def test_nothing_leaks_over_borders_of_packed_rollouts(changed, kind):
    model = tiny_policy()
    head = tiny_draft_head(model, kind=kind)
    completions = [[7, 2, 9, 4], [8, 3, 3, 1]]
    groups = [make_group(0, [1, 5], completions, [0.0] * 2), make_group(1, [4, 4], [[6, 6, 6]], [0.0])]
    _, _, before = unrolled_logits(head, model, groups, [0, 1, 2])
    if changed == "sibling":
        groups[0] = make_group(0, [1, 5], [completions[0], [9, 9, 9, 9]], [0.0] * 2)
    elif changed == "other group":
        groups[1] = make_group(1, [2, 3], [[1, 1, 1]], [0.0])
    else:
        groups[0] = make_group(0, [1, 5], [[7, 2, 9, 33], completions[1]], [0.0] * 2)
    _, _, after = unrolled_logits(head, model, groups, [0, 1, 2])
    for step in range(STEPS):
        torch.testing.assert_close(after[step][0], before[step][0], rtol=0, atol=1e-9)


def test_padding_does_not_change_a_shorter_rollout():
    model = tiny_policy()
    head = tiny_draft_head(model)
    groups = [make_group(0, [1, 5], [[7, 2, 9], [8, 3, 3, 1, 4, 4]], [0.0] * 2)]
    _, _, alone = unrolled_logits(head, model, groups, [0])
    _, _, beside = unrolled_logits(head, model, groups, [0, 1])
    for step in range(STEPS):
        torch.testing.assert_close(beside[step][0, :2], alone[step][0], rtol=0, atol=1e-9)
        assert bool(beside[step].isfinite().all())
