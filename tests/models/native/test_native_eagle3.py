from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from leadout.drafters.head_cache import HeadCache
from leadout.drafters.head_drafter import HeadDrafter
from leadout.errors import ModelError
from leadout.models.eagle3 import Eagle3Spec, make_head
from leadout.models.rope import RopeSpec
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.models.native.models import distance, needs_kernels

pytestmark = needs_kernels

NORMS = [{}, {"fc_norm": False}, {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True}]


def spec_of(mask: int | None = None, draft_vocab_size: int = 120, **norms: bool) -> Eagle3Spec:
    return Eagle3Spec(
        hidden_size=96,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=112,
        rms_norm_eps=1e-6,
        rope=RopeSpec(rope_type="default", theta=1e4, dim=32),
        max_position_embeddings=64,
        vocab_size=300,
        draft_vocab_size=draft_vocab_size,
        layer_ids=(0, 1, 2),
        target_hidden_size=96,
        mask_token_id=mask,
        **norms,
    )


def caches(mask: int | None = None, **norms: bool) -> tuple[HeadCache, HeadCache]:
    """The same head natively in bfloat16 and by PyTorch in float32."""
    spec = spec_of(mask, **norms)
    torch.manual_seed(0)
    head = make_head(spec).to(torch.bfloat16).requires_grad_(False)
    for parameter in head.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    wide = make_head(spec).requires_grad_(False)
    wide.load_state_dict(head.state_dict())
    common = {"num_slots": 3, "max_len": 64, "device": torch.device("cpu")}
    return HeadCache(head, dtype=torch.bfloat16, **common), HeadCache(wide, dtype=torch.float32, **common)


@pytest.mark.parametrize("norms", NORMS)
def test_all_drafts_of_one_pass_equal_those_of_the_float32_head(norms: dict[str, bool]) -> None:
    native, wide = caches(mask=7, **norms)
    generator = torch.Generator().manual_seed(1)
    for width, counts, drafts in ((20, [20, 7], 3), (3, [1, 3], 5), (1, [1, 1], 1), (2, [2, 1], 2)):
        taps = torch.randn(2, width, 288, generator=generator).to(torch.bfloat16)
        embeddings = torch.randn(2, width, 96, generator=generator).to(torch.bfloat16)
        results = [
            cache.run_parallel([2, 0], taps.to(dtype), embeddings.to(dtype), np.array(counts), drafts)
            for cache, dtype in ((native, torch.bfloat16), (wide, torch.float32))
        ]
        assert results[0].shape == (2, drafts, 96)
        assert distance(*results) < 0.01


@pytest.mark.parametrize("norms", NORMS)
def test_true_entries_and_drafts_equal_those_of_the_float32_head(norms: dict[str, bool]) -> None:
    native, wide = caches(**norms)
    generator = torch.Generator().manual_seed(1)
    slots = [2, 0]
    for width, counts in ((20, [20, 7]), (3, [1, 3]), (1, [1, 1])):
        taps = torch.randn(2, width, 288, generator=generator).to(torch.bfloat16)
        embeddings = torch.randn(2, width, 96, generator=generator).to(torch.bfloat16)
        drafted = torch.randn(2, 96, generator=generator).to(torch.bfloat16)
        results = []
        for cache, dtype in ((native, torch.bfloat16), (wide, torch.float32)):
            hidden = cache.run(slots, taps.to(dtype), embeddings.to(dtype), np.array(counts))
            first = cache.extend(slots, hidden, drafted.to(dtype), 0)
            second = cache.extend(slots, first, drafted.to(dtype), 1)
            results.append((hidden, cache.logits(hidden), first, second))
        assert max(distance(a, b) for a, b in zip(*results, strict=True)) < 0.01


def test_a_copied_prompt_continues_like_its_source() -> None:
    native, _ = caches()
    taps, embeddings = torch.randn(1, 9, 288), torch.randn(1, 9, 96)
    native.run([0], taps, embeddings, np.array([9]))
    native.copy(0, [1, 2])
    after = native.run([0, 2], taps[:, :1].expand(2, -1, -1), embeddings[:, :1].expand(2, -1, -1), np.array([1, 1]))
    assert torch.equal(after[0], after[1])
    assert native.lengths.tolist() == [10, 9, 10]


def test_logits_of_strided_states_outlive_whatever_takes_memory_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    native, _ = caches(mask=7)
    runner = native._native
    assert runner is not None
    hidden_BH = torch.randn(16, 4, 96).unbind(1)[2]
    expected = native.logits(hidden_BH.contiguous()).clone()
    real = runner._library.functions.lo_head_logits

    def amid_others(*arguments: object) -> object:
        taken = [torch.full((16, 96), torch.nan) for _ in range(64)]
        result = real(*arguments)
        assert len(taken) == 64
        return result

    monkeypatch.setattr(runner._library.functions, "lo_head_logits", amid_others)
    assert torch.equal(native.logits(hidden_BH), expected)


def drafters(at_once: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, vocab: int = 120) -> list[HeadDrafter]:
    """Native drafters of one head; those that are not `at_once` take one call per pass and per law."""
    spec = spec_of(draft_vocab_size=vocab)
    embedding = torch.randn(300, 96, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    torch.manual_seed(0)
    head = make_head(spec)
    made = []
    for whole in at_once:
        drafter = HeadDrafter(
            copy.deepcopy(head),
            policy_embedding=lambda: embedding,
            num_slots=3,
            max_len=64,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            temperature=1.3,
        )
        assert drafter._cache.drafts_at_once
        if not whole:
            slow = type("Slow", (HeadCache,), {"drafts_at_once": False})
            monkeypatch.setattr(drafter._cache, "__class__", slow)
        made.append(drafter)
    return made


@dataclass
class Numbers:
    """Uniforms by row and depth."""

    values_BK: torch.Tensor

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        return self.values_BK[:, depth]


@pytest.mark.parametrize("vocab", [120, 300])
def test_drafts_made_in_one_call_are_those_made_pass_by_pass(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    both = drafters((True, False), monkeypatch, vocab)
    generator = torch.Generator().manual_seed(5)
    requests = {
        slot: Request(
            rollout_id=RolloutId(slot, 0),
            prompt=Prompt(id=str(slot), token_ids=np.arange(4 + 3 * slot, dtype=np.int32), text=""),
            params=SamplingParams(temperature=0.7 + 0.3 * slot),
        )
        for slot in range(3)
    }
    for slot, request in requests.items():
        taps_PF = torch.randn(len(request.prompt.token_ids), 288, generator=generator).to(torch.bfloat16)
        for drafter in both:
            drafter.admit([slot], [request], taps_PF)
            drafter.observe([slot], torch.tensor([[slot]]), np.ones(1, np.int64), None)
    for turn, (slots, lengths) in enumerate([([2, 0, 1], [3, 1, 2]), ([1, 0], [4, 4]), ([0, 1, 2], [1, 1, 1])]):
        numbers = Numbers(torch.rand(len(slots), max(lengths), dtype=torch.float64, generator=generator))
        found, expected = (drafter.propose(slots, np.array(lengths), numbers) for drafter in both)
        assert torch.equal(found.tokens_BK, expected.tokens_BK)
        assert found.probs is not None and expected.probs is not None
        assert torch.equal(found.probs.columns_BK, expected.probs.columns_BK)
        assert torch.equal(found.probs.values_BKV, expected.probs.values_BKV)
        counts = np.array([1 + (turn + row) % 3 for row in range(len(slots))])
        tokens_BN = torch.randint(0, 300, (len(slots), 3), generator=generator)
        taps_BNF = torch.randn(len(slots), 3, 288, generator=generator).to(torch.bfloat16)
        for drafter in both:
            drafter.observe(slots, tokens_BN, counts, taps_BNF)


def test_a_draft_of_weights_that_are_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafters((True,), monkeypatch)[0]
    weights = {name: weight.clone() for name, weight in drafter._head.state_dict().items()}
    weights["lm_head.weight"][5, 7] = torch.nan
    drafter.load(weights, 1)
    request = Request(
        rollout_id=RolloutId(0, 0),
        prompt=Prompt(id="p", token_ids=np.arange(3, dtype=np.int32), text=""),
        params=SamplingParams(),
    )
    drafter.admit([0], [request], torch.ones(3, 288, dtype=torch.bfloat16))
    drafter.observe([0], torch.tensor([[1]]), np.ones(1, np.int64), None)
    with pytest.raises(ModelError, match="not finite"):
        drafter.propose([0], np.array([2]), Numbers(torch.full((1, 2), 0.5, dtype=torch.float64)))
