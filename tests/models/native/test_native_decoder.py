from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from leadout.errors import ModelError
from leadout.models.decoder import FusedDecoder
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, load_policy, read_config, resolve
from leadout.models.spec import DecoderSpec
from tests.models import tiny
from tests.models.native.models import CONFIGS, decoder, distance, needs_kernels, policy

pytestmark = needs_kernels

# One rounding to bfloat16 is 2 ** -9 on average; a few layers add up to a few of them.
NEAR = 0.02


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 613, shape, generator=torch.Generator().manual_seed(seed))


def cache(fused: FusedDecoder, num_slots: int) -> KVSlots:
    return KVSlots(fused.spec, num_slots, 96, torch.bfloat16)


@torch.no_grad()
def states(model: object, tokens_BN: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = model.model(tokens_BN, output_hidden_states=True)  # type: ignore[attr-defined]
    return (*out.hidden_states[:-1], out.last_hidden_state)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_full_pass_is_nearer_to_float32_than_the_torch_path_or_near_enough(name: str) -> None:
    model = policy(name)
    tokens_BN = tokens(3, 40)
    expected = states(model, tokens_BN)[-1]
    gaps = []
    for native in (None, False):
        fused = decoder(model, native=native)
        assert fused.is_native == (native is None)
        kv = cache(fused, 3)
        gaps.append(distance(fused.forward(tokens_BN, kv, kv.allocate(3)).hidden_BNH, expected))
    assert gaps[0] < max(gaps[1], NEAR)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_ragged_blocks_with_padding_and_rollback_equal_full_passes(name: str) -> None:
    model = policy(name)
    fused = decoder(model, native=None)
    kv = cache(fused, 5)
    slots = kv.allocate(4)
    rng = np.random.default_rng(0)
    texts: dict[int, list[int]] = {slot: [] for slot in slots}
    for turn in range(8):
        width = 20 if turn == 0 else int(rng.integers(1, 10))
        live = [int(slot) for slot in rng.permutation(slots)[: rng.integers(1, 5)]]
        counts_B = rng.integers(0, width + 1, len(live))
        tokens_BN = torch.from_numpy(rng.integers(0, 613, (len(live), width)))
        found = fused.forward(tokens_BN, kv, live, counts_B=counts_B).hidden_BNH
        kv.advance(live, counts_B)
        for row, slot in enumerate(live):
            count = int(counts_B[row])
            text = texts[slot] + tokens_BN[row, :count].tolist()
            if count:
                expected = states(model, torch.tensor([text]))[-1][0, -count:]
                assert distance(found[row, :count], expected) < NEAR
            kept = len(text) - int(rng.integers(0, count + 1))
            kv.rollback([slot], np.array([kept]))
            texts[slot] = text[:kept]


@pytest.mark.parametrize("taps", [(), (0, 2), (1, 3)])
@pytest.mark.parametrize("counts", [[25, 3, 0], [1, 2, 9]])
def test_only_the_newest_states_are_the_last_ones_of_a_whole_pass(taps: tuple[int, ...], counts: list[int]) -> None:
    fused = decoder(policy("qwen3"), native=None)
    tokens_BN, after_B1 = tokens(3, max(counts)), tokens(3, 1, seed=2)
    results = []
    for newest in (False, True):
        kv = cache(fused, 3)
        slots = kv.allocate(3)
        states_of = fused.forward(tokens_BN, kv, slots, taps, np.array(counts), newest=newest)
        kv.advance(slots, np.array(counts))
        results.append((states_of, fused.forward(after_B1, kv, slots).hidden_BNH))
    (whole, after_whole), (newest_only, after_newest) = results
    assert newest_only.hidden_BNH.shape == (3, 1, 48)
    for row, count in enumerate(counts):
        if count:
            assert torch.equal(newest_only.hidden_BNH[row, 0], whole.hidden_BNH[row, count - 1])
            if taps:
                assert newest_only.taps_BNF is not None and whole.taps_BNF is not None
                assert torch.equal(newest_only.taps_BNF[row, :count], whole.taps_BNF[row, :count])
    assert torch.equal(after_newest, after_whole)


def test_taps_are_the_inputs_of_their_layers_in_the_order_asked_for() -> None:
    model = policy("qwen3")
    fused = decoder(model, native=None)
    kv = cache(fused, 2)
    tokens_BN = tokens(2, 9)
    captured: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))
    expected = states(model, tokens_BN)
    found = fused.forward(tokens_BN, kv, kv.allocate(2), taps=(2, 0, 3)).taps_BNF
    assert found is not None
    for part, layer_input in zip(found.split(48, -1), (expected[2], expected[0], captured[0]), strict=True):
        assert distance(part, layer_input) < NEAR


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 13, 14, 30, 261, 530])
def test_logits_are_float32_sums_of_bfloat16_products(num_rows: int) -> None:
    model = policy("llama")
    fused = decoder(model, native=None)
    hidden_XH = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = hidden_XH.double() @ model.lm_head.weight.detach().double().t()
    torch.testing.assert_close(fused.logits(hidden_XH).double(), exact, atol=1e-5, rtol=1e-5)


def test_logits_of_two_calls_do_not_share_memory() -> None:
    fused = decoder(policy("llama"), native=None)
    hidden_XH = torch.ones(2, 48, dtype=torch.bfloat16)
    first = fused.logits(hidden_XH)
    kept = first.clone()
    fused.logits(2 * hidden_XH)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    model = policy("qwen2")
    tokens_BN = tokens(3, 30)
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            fused = decoder(model, native=None)
            kv = cache(fused, 3)
            results.append(fused.forward(tokens_BN, kv, kv.allocate(3)).hidden_BNH)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_rows_do_not_feel_the_rest_of_the_batch() -> None:
    fused = decoder(policy("mistral"), native=None)
    kv = cache(fused, 9)
    slots = kv.allocate(9)
    tokens_BN = tokens(9, 5)
    together = fused.forward(tokens_BN, kv, slots).hidden_BNH
    alone = torch.cat([fused.forward(tokens_BN[i : i + 1], kv, slots[i : i + 1]).hidden_BNH for i in range(9)])
    assert distance(together, alone) < 1e-3


def test_loading_again_takes_the_new_weights() -> None:
    other = policy("llama", seed=5)
    fused = decoder(policy("llama"), native=None)
    fused.load(dict(other.named_parameters()))
    kv = cache(fused, 1)
    tokens_BN = tokens(1, 12)
    found = fused.forward(tokens_BN, kv, kv.allocate(1)).hidden_BNH
    assert distance(found, states(other, tokens_BN)[-1]) < NEAR


def test_a_model_without_kernels_takes_the_torch_path_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fused = tiny.decoder(tiny.policy("llama", torch.bfloat16))
    assert not fused.is_native
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels are off for this model: hidden and intermediate size must be multiples of 16 and head_dim one "
        "of 16, 32, 48, 64, 80, 96, 112, 128, 256; got 48, 64 and 8"
    ]


@pytest.mark.integration
def test_smollm2_laws_are_within_two_percent_of_float32() -> None:
    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    model = load_policy(path, torch.float32)
    spec = DecoderSpec.from_config(read_config(path))
    fused = FusedDecoder(spec, dtype=torch.bfloat16, max_len=256)
    fused.load(dict(iter_weights(path)))
    text = "Question: A train of 12 wagons carries 30 people in each. At the next stop 45 leave and 17 enter. " * 6
    tokens_1N = torch.tensor([AutoTokenizer.from_pretrained(path)(text).input_ids[:120]])
    kv = KVSlots(spec, 1, 256, torch.bfloat16)
    slots = kv.allocate(1)
    parts = []
    for piece in tokens_1N.split([40, *[1] * 20, *[4] * 15], 1):
        parts.append(fused.logits(fused.forward(piece, kv, slots).hidden_BNH[0]))
        kv.advance(slots, np.array([piece.shape[1]]))
    with torch.no_grad():
        expected = model(tokens_1N).logits[0].softmax(-1)
    total_variation = 0.5 * (torch.cat(parts).softmax(-1) - expected).abs().sum(-1)
    assert float(total_variation.mean()) < 0.02
