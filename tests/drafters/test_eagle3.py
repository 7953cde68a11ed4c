"""The cached drafter against a slow evaluation of the same head that knows no cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from leadout.drafters.head_drafter import HeadDrafter
from leadout.errors import RefitError
from leadout.models.draft_head import DraftHead, Entry
from leadout.models.rope import RopeSpec
from leadout.models.sampling import Law
from leadout.records import Prompt, Request, RolloutId, SamplingParams
from tests.models.eagle3_fakes import DRAFT_IDS, SPEC, policy_tensors, tiny_head, tiny_mtp_head
from tests.models.test_eagle3 import attended_over

EMBEDDING = policy_tensors()["model.embed_tokens.weight"].double()
OUTPUT = torch.randn(EMBEDDING.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
YARN = RopeSpec(rope_type="yarn", theta=10000.0, dim=4, factor=4.0, original_max_position=16, attention_factor=1.2)


def drafter_of(head: DraftHead, num_slots: int = 4, max_len: int = 64, **options) -> HeadDrafter:
    return HeadDrafter(
        copy.deepcopy(head),
        policy_embedding=lambda: EMBEDDING,
        policy_logits=lambda hidden: hidden @ OUTPUT.T,
        num_slots=num_slots,
        max_len=max_len,
        dtype=torch.float64,
        device=torch.device("cpu"),
        **options,
    )


@dataclass
class Numbers:
    """Uniforms by row and depth, made ahead so that the slow evaluation sees the same."""

    values_BK: torch.Tensor

    def draft_uniforms(self, depth: int) -> torch.Tensor:
        return self.values_BK[:, depth]


@dataclass
class Policy:
    """Tapped states of a policy that has seen a row's tokens: a function of the tokens so far."""

    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    width: int = 3 * SPEC.target_hidden_size

    def taps(self, count: int) -> torch.Tensor:
        """[count, F]: the states of the first `count` tokens."""
        rows = []
        for end in range(1, count + 1):
            key = sum((i + 1) * (t + 7) ** 2 for i, t in enumerate(self.tokens[:end]))
            rows.append(torch.randn(self.width, generator=torch.Generator().manual_seed(key), dtype=torch.float64))
        return torch.stack(rows)

    def request(self, draw: int = 0) -> Request:
        prompt = Prompt(id="p", token_ids=np.array(self.tokens, np.int32), text="")
        return Request(rollout_id=RolloutId(draw, 0), prompt=prompt, params=self.params)


def slow_laws(head: DraftHead, row: Policy, drafts: list[int], temperature: float = 1.0) -> list[torch.Tensor]:
    """Law of each draft given the ones before: true entries of every token but the first, then the head's own."""
    tokens = torch.tensor(row.tokens)
    laws: list[torch.Tensor] = []
    entry = head.entry(head.fuse(row.taps(len(row.tokens) - 1)), EMBEDDING[tokens[1:]])
    for draft in [*drafts, -1]:
        hidden = attended_over(head, entry, torch.arange(entry.input_NE.shape[0]))
        laws.append((head.logits(hidden[-1], OUTPUT) / temperature).softmax(-1))
        if draft >= 0:
            next_one = head.deeper(hidden[-1:], EMBEDDING[draft][None])
            entry = Entry(*(torch.cat(parts) for parts in zip(entry, next_one, strict=True)))
    return laws


def check(drafter: HeadDrafter, head: DraftHead, slots, rows, lengths, seed=0, temperature=1.0, atol=1e-9):
    """Draft, and hold every q and every drawn token against the slow evaluation; returns the drafts."""
    width = max(lengths)
    numbers = torch.rand(len(slots), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    draft = drafter.propose(slots, np.array(lengths, np.int64), Numbers(numbers))
    assert draft.counts_B.tolist() == list(lengths)
    ids = head.draft_token_ids()
    for b, row in enumerate(rows):
        tokens = draft.tokens_BK[b, : lengths[b]].tolist()
        for depth, law in enumerate(slow_laws(head, row, tokens, temperature * row.params.temperature)[: lengths[b]]):
            if draft.probs is None:
                column = int(law.argmax())
            else:
                torch.testing.assert_close(draft.probs.values_BKV[b, depth], law, rtol=0, atol=atol)
                column = int(Law.from_weights(law[None].clone()).draw(numbers[b, depth : depth + 1]))
                assert int(draft.probs.columns_BK[b, depth]) == column
            assert tokens[depth] == (column if ids is None else int(ids[column]))
    return draft


def admit(drafter: HeadDrafter, slots, row: Policy) -> None:
    drafter.admit(slots, [row.request(i) for i in range(len(slots))], row.taps(len(row.tokens)))


def first(drafter: HeadDrafter, slots, rows, tokens) -> None:
    """The token drawn from the prefill."""
    drafter.observe(slots, torch.tensor(tokens)[:, None], np.ones(len(slots), np.int64), None)
    for row, token in zip(rows, tokens, strict=True):
        row.tokens.append(token)


def commit(drafter: HeadDrafter, slots, rows, tokens) -> None:
    """Ragged committed tokens with the states of the positions before them; the padding is rubbish."""
    counts = np.array([len(t) for t in tokens])
    padded = torch.full((len(slots), int(counts.max())), 39)
    taps = torch.full((len(slots), int(counts.max()), rows[0].width), 1e3, dtype=torch.float64)
    for b, (row, new) in enumerate(zip(rows, tokens, strict=True)):
        before = len(row.tokens)
        row.tokens += new
        padded[b, : len(new)] = torch.tensor(new)
        taps[b, : len(new)] = row.taps(before + len(new) - 1)[before - 1 :]
    drafter.observe(slots, padded, counts, taps)


def made(**changes) -> Callable[[], DraftHead]:
    return lambda: tiny_head(dtype=torch.float64, **changes)


HEADS = {
    "reduced": made(),
    "full vocabulary": made(draft_vocab_size=40),
    "normed residual": made(norm_before_residual=True),
    "one norm before": made(fc_norm=False, norm_before_fc=True),
    "scaled rope": made(rope=YARN),
    "parallel": made(mask_token_id=5),
    "parallel, full vocabulary": made(mask_token_id=39, draft_vocab_size=40, fc_norm=False),
    "multi-token": lambda: tiny_mtp_head(dtype=torch.float64),
}


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("options", [{}, {"greedy": True}, {"temperature": 0.7}], ids=["sampled", "greedy", "cooler"])
def test_after_many_rounds_with_rejections_drafts_are_those_of_a_head_without_a_cache(kind, options):
    head = HEADS[kind]()
    drafter = drafter_of(head, **options)
    rng = np.random.default_rng(1)
    width = head.spec.fused_size
    rows = [
        Policy([3, 9, 1, 1], width=width),
        Policy([5], width=width),
        Policy([8, 30], SamplingParams(temperature=0.6), width),
    ]
    for slot, row in enumerate(rows):
        admit(drafter, [slot], row)
    first(drafter, [0, 1, 2], rows, [7, 0, 39])
    for turn in range(8):
        lengths = [4, 1, 3] if turn % 2 else [2, 4, 0]
        draft = check(drafter, head, [0, 1, 2], rows, lengths, seed=turn, temperature=options.get("temperature", 1.0))
        tokens = []
        for b in range(3):
            kept = int(rng.integers(0, lengths[b] + 1))
            tokens.append([*draft.tokens_BK[b, :kept].tolist(), int(rng.integers(0, 40))])
        commit(drafter, [0, 1, 2], rows, tokens)


@pytest.mark.parametrize("kind", ["reduced", "parallel", "multi-token"])
def test_rejected_drafts_leave_no_mark(kind):
    head = HEADS[kind]()
    seen, fresh = drafter_of(head), drafter_of(head)
    row, twin = (Policy([3, 9, 1], width=head.spec.fused_size) for _ in range(2))
    admit(seen, [0], row)
    admit(fresh, [0], twin)
    first(seen, [0], [row], [4])
    first(fresh, [0], [twin], [4])
    for turn in range(3):
        check(seen, head, [0], [row], [4], seed=turn)
        commit(seen, [0], [row], [[11]])
        commit(fresh, [0], [twin], [[11]])
    numbers = Numbers(torch.rand(1, 4, dtype=torch.float64))
    one, other = (d.propose([0], np.array([4]), numbers) for d in (seen, fresh))
    torch.testing.assert_close(one.probs.values_BKV, other.probs.values_BKV, rtol=0, atol=1e-12)
    assert torch.equal(one.tokens_BK, other.tokens_BK)


@pytest.mark.parametrize("kind", ["reduced", "parallel", "multi-token"])
def test_a_backlog_gathered_while_off_gives_the_drafts_of_one_that_was_always_on(kind):
    head = HEADS[kind]()
    drafter = drafter_of(head)
    rows = [Policy(tokens, width=head.spec.fused_size) for tokens in ([3, 9, 1], [2, 2])]
    for slot, row in enumerate(rows):
        admit(drafter, [slot], row)
    first(drafter, [0, 1], rows, [4, 6])
    for token in range(20):
        commit(drafter, [0, 1], rows, [[token], [39 - token]])
    commit(drafter, [0, 1], rows, [[1, 2, 3], [9]])
    check(drafter, head, [0, 1], rows, [3, 3])


@pytest.mark.parametrize("kind", ["reduced", "parallel", "multi-token"])
def test_siblings_that_share_a_prompt_draft_as_if_they_had_one_each(kind):
    head = HEADS[kind]()
    drafter = drafter_of(head)
    rows = [Policy([3, 9, 1, 20, 7], width=head.spec.fused_size) for _ in range(3)]
    admit(drafter, [2, 0, 3], rows[0])
    first(drafter, [2, 0, 3], rows, [4, 6, 4])
    check(drafter, head, [2, 0, 3], rows, [3, 2, 3])
    commit(drafter, [2, 0, 3], rows, [[1], [2, 3], [5]])
    check(drafter, head, [2, 0, 3], rows, [3, 2, 3], seed=1)


def test_siblings_outlive_the_one_that_held_their_prompt():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head)
    rows = [Policy([3, 9, 1, 20, 7]) for _ in range(3)]
    admit(drafter, [0, 1, 2], rows[0])
    first(drafter, [0, 1, 2], rows, [4, 6, 4])
    drafter.release([0])
    newcomer = Policy([8, 8])
    admit(drafter, [0], newcomer)
    first(drafter, [0], [newcomer], [5])
    check(drafter, head, [1, 0, 2], [rows[1], newcomer, rows[2]], [3, 3, 3])


def test_a_slot_used_again_knows_nothing_of_its_first_row():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head, num_slots=1)
    old = Policy([3] * 30)
    admit(drafter, [0], old)
    first(drafter, [0], [old], [4])
    check(drafter, head, [0], [old], [4])
    commit(drafter, [0], [old], [[1, 2, 3]])
    drafter.release([0])
    new = Policy([9])
    admit(drafter, [0], new)
    first(drafter, [0], [new], [2])
    check(drafter, head, [0], [new], [4])


def test_steps_noted_while_off_reach_the_rows_they_belong_to_when_a_slot_is_used_again():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head)
    rows = [Policy([3, 9, 1]), Policy([2, 2])]
    for slot, row in enumerate(rows):
        admit(drafter, [slot], row)
    first(drafter, [0, 1], rows, [4, 6])
    for token in range(5):
        commit(drafter, [0, 1], rows, [[token], [39 - token]])
    drafter.release([0])
    commit(drafter, [1], rows[1:], [[7]])
    newcomer = Policy([8, 8, 5])
    admit(drafter, [0], newcomer)
    first(drafter, [0], [newcomer], [11])
    for token in range(35):
        commit(drafter, [1, 0], [rows[1], newcomer], [[token % 9], [token % 7]])
    check(drafter, head, [0, 1], [newcomer, rows[1]], [3, 3])


@pytest.mark.parametrize("kind", ["reduced", "parallel", "multi-token"])
def test_drafts_run_past_the_context_of_the_drafts_own_config(kind):
    head = HEADS[kind]()
    head.spec = dataclasses.replace(head.spec, max_position_embeddings=8)
    drafter = drafter_of(head, max_len=64)
    row = Policy(list(range(30)) + list(range(20)), width=head.spec.fused_size)
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    check(drafter, head, [0], [row], [8])


@pytest.mark.parametrize("changes", [{}, {"mask_token_id": 5}])
def test_drafts_reach_to_the_last_token_of_the_context(changes):
    head = tiny_head(dtype=torch.float64, **changes)
    drafter = drafter_of(head, max_len=16)
    row = Policy([i % 5 for i in range(15)])
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    check(drafter, head, [0], [row], [16])


def test_a_scaled_rope_changes_the_drafts():
    drafters = [drafter_of(tiny_head(dtype=torch.float64, rope=rope)) for rope in (SPEC.rope, YARN)]
    laws = []
    for drafter in drafters:
        row = Policy([3, 9, 1, 20, 7])
        admit(drafter, [0], row)
        first(drafter, [0], [row], [4])
        laws.append(drafter.propose([0], np.array([1]), Numbers(torch.rand(1, 1).double())).probs.values_BKV)
    assert float((laws[0] - laws[1]).abs().max()) > 1e-4


def test_probabilities_of_a_reduced_vocabulary_belong_to_the_ids_of_the_map():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head)
    row = Policy([3, 9])
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    draft = drafter.propose([0], np.array([3]), Numbers(torch.rand(1, 3).double()))
    assert draft.probs.values_BKV.shape == (1, 3, 12)
    torch.testing.assert_close(draft.probs.values_BKV.sum(-1), torch.ones(1, 3, dtype=torch.float64))
    assert draft.probs.token_ids_V.tolist() == DRAFT_IDS.tolist()
    assert draft.tokens_BK.tolist() == DRAFT_IDS[draft.probs.columns_BK].tolist()


def test_filters_of_the_row_act_on_its_drafts_too():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head)
    row = Policy([3, 9], SamplingParams(top_k=3))
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    q_V = drafter.propose([0], np.array([1]), Numbers(torch.rand(1, 1).double())).probs.values_BKV[0, 0]
    full_V = slow_laws(head, row, [])[0]
    kept = full_V.topk(3)
    torch.testing.assert_close(q_V[kept.indices], kept.values / kept.values.sum(), rtol=0, atol=1e-9)
    assert int((q_V > 0).sum()) == 3


def test_a_greedy_row_drafts_the_argmax_with_certainty():
    head = tiny_head(dtype=torch.float64)
    drafter = drafter_of(head)
    row = Policy([3, 9], SamplingParams(temperature=0.0))
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    draft = drafter.propose([0], np.array([2]), Numbers(torch.rand(1, 2).double()))
    best = slow_laws(head, row, [int(draft.tokens_BK[0, 0])])
    assert draft.probs.columns_BK[0].tolist() == [int(law.argmax()) for law in best]
    assert draft.probs.values_BKV.amax(-1).tolist() == [[1.0, 1.0]]


def test_new_weights_are_used_from_the_next_draft_on():
    head, other = tiny_head(dtype=torch.float64), tiny_head(seed=5, dtype=torch.float64)
    drafter = drafter_of(head)
    drafter.load(other.state_dict(), 3)
    assert drafter.version == 3
    row = Policy([3, 9, 1])
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    check(drafter, other, [0], [row], [3])


@pytest.mark.parametrize("damage", ["misshapen", "missing", "extra"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_kept(damage):
    head, other = tiny_head(dtype=torch.float64), tiny_head(seed=5, dtype=torch.float64)
    drafter = drafter_of(head)
    weights = dict(other.state_dict())
    name = "midlayer.mlp.up_proj.weight"
    if damage == "misshapen":
        weights[name] = weights[name][:-1]
    elif damage == "missing":
        del weights[name]
    else:
        name = "extra.weight"
        weights[name] = torch.zeros(1)
    with pytest.raises(RefitError, match=name.replace(".", r"\.")):
        drafter.load(weights, 3)
    assert drafter.version == 0
    row = Policy([3, 9, 1])
    admit(drafter, [0], row)
    first(drafter, [0], [row], [4])
    check(drafter, head, [0], [row], [3])


def test_taps_are_the_heads_layers():
    assert drafter_of(tiny_head()).taps == (1, 2, 3)
