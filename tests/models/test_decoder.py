from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from leadout.errors import CapacityError, ModelError
from leadout.models.decoder import FusedDecoder
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, load_policy, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.models.states import DecoderStates
from tests.models.tiny import CONFIGS, decoder, policy

DTYPES = [torch.float64, torch.float32]


def assert_logits_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The project's tolerances: 1e-9 in float64, 1e-4 + 1e-5 |logit| in float32."""
    if expected.dtype is torch.float64:
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def head(fused: FusedDecoder, states: DecoderStates) -> torch.Tensor:
    batch, width, _ = states.hidden_BNH.shape
    return fused.logits(states.hidden_BNH.flatten(0, 1)).view(batch, width, -1)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def cache(fused: FusedDecoder, num_slots: int, max_len: int = 64) -> KVSlots:
    return KVSlots(fused.spec, num_slots, max_len, fused.dtype)


@torch.no_grad()
def full_logits(model: object, tokens_BN: torch.Tensor) -> torch.Tensor:
    return model(tokens_BN).logits  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_full_pass_logits_equal_transformers(name: str, dtype: torch.dtype) -> None:
    model = policy(name, dtype)
    fused = decoder(model)
    kv = cache(fused, 3)
    tokens_BN = tokens(3, 40)
    found = head(fused, fused.forward(tokens_BN, kv, kv.allocate(3)))
    assert_logits_close(found, full_logits(model, tokens_BN))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama_yarn", "mistral", "qwen2", "qwen3"])
def test_token_by_token_logits_equal_one_full_pass(name: str, dtype: torch.dtype) -> None:
    model = policy(name, dtype)
    fused = decoder(model)
    kv = cache(fused, 2)
    slots = kv.allocate(2)
    tokens_BN = tokens(2, 24)
    steps = []
    for column in range(24):
        steps.append(head(fused, fused.forward(tokens_BN[:, column : column + 1], kv, slots)))
        kv.advance(slots, np.ones(2, np.int64))
    assert_logits_close(torch.cat(steps, 1), full_logits(model, tokens_BN))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_blocks_with_padding_and_rollback_equal_full_passes(dtype: torch.dtype) -> None:
    model = policy("qwen3", dtype)
    fused = decoder(model)
    kv = cache(fused, 5)
    slots = kv.allocate(4)
    rng = np.random.default_rng(0)
    texts: dict[int, list[int]] = {slot: [] for slot in slots}
    for _ in range(12):
        width = int(rng.integers(1, 5))
        live = kv.order([int(slot) for slot in rng.permutation(slots)[: rng.integers(1, 5)]])
        counts_B = rng.integers(0, width + 1, len(live))
        tokens_BN = torch.from_numpy(rng.integers(0, 97, (len(live), width)))
        found = head(fused, fused.forward(tokens_BN, kv, live, counts_B=counts_B))
        kv.advance(live, counts_B)
        for row, slot in enumerate(live):
            count = int(counts_B[row])
            text = texts[slot] + tokens_BN[row, :count].tolist()
            if count:
                expected = full_logits(model, torch.tensor([text]))[0, -count:]
                assert_logits_close(found[row, :count], expected)
            kept = len(text) - int(rng.integers(0, count + 1))
            kv.rollback([slot], np.array([kept]))
            texts[slot] = text[:kept]


def test_slots_out_of_physical_order_give_the_same_logits() -> None:
    fused = decoder(policy("llama", torch.float64))
    kv = cache(fused, 3)
    slots = kv.allocate(3)
    fused.forward(tokens(3, 6), kv, slots)
    kv.advance(slots, np.array([6, 4, 5]))
    block_BN = tokens(3, 2, seed=2)
    ordered = head(fused, fused.forward(block_BN, kv, slots))
    shuffled = head(fused, fused.forward(block_BN[[2, 0, 1]], kv, [slots[2], slots[0], slots[1]]))
    torch.testing.assert_close(shuffled, ordered[[2, 0, 1]], atol=1e-12, rtol=0)


def test_rows_that_share_a_copied_prefix_continue_like_rows_of_their_own() -> None:
    model = policy("qwen2", torch.float64)
    fused = decoder(model)
    kv = cache(fused, 4)
    source, *targets = kv.allocate(4)
    prompt_P = tokens(11)
    fused.prefill(prompt_P, kv, source)
    kv.copy_prefix(source, targets, 11)
    rest_BN = tokens(4, 5, seed=3)
    found = head(fused, fused.forward(rest_BN, kv, [source, *targets]))
    expected = full_logits(model, torch.cat((prompt_P.expand(4, -1), rest_BN), 1))[:, 11:]
    assert_logits_close(found, expected)


def test_prefill_in_chunks_equals_one_pass() -> None:
    model = policy("llama_llama3", torch.float64)
    fused = decoder(model)
    kv = cache(fused, 1)
    prompt_P = tokens(37)
    last_1H, taps_PF = fused.prefill(prompt_P, kv, kv.allocate(1)[0], taps=(1, 3), chunk=8)
    with torch.no_grad():
        expected = model.model(prompt_P[None], output_hidden_states=True)
    assert kv.lengths.tolist() == [37]
    torch.testing.assert_close(last_1H, expected.last_hidden_state[0, -1:], atol=1e-9, rtol=0)
    assert taps_PF is not None
    torch.testing.assert_close(taps_PF[:, :48], expected.hidden_states[1][0], atol=1e-9, rtol=0)


def test_taps_are_the_inputs_of_their_layers_in_the_order_asked_for() -> None:
    model = policy("mistral", torch.float64)
    fused = decoder(model)
    kv = cache(fused, 2)
    tokens_BN = tokens(2, 9)
    captured: dict[int, torch.Tensor] = {}
    for index in (0, 2):
        model.model.layers[index].register_forward_pre_hook(
            lambda module, inputs, index=index: captured.__setitem__(index, inputs[0])
        )
    model.model.norm.register_forward_pre_hook(lambda module, inputs: captured.__setitem__(3, inputs[0]))
    full_logits(model, tokens_BN)
    found = fused.forward(tokens_BN, kv, kv.allocate(2), taps=(2, 0, 3)).taps_BNF
    expected = torch.cat([captured[2], captured[0], captured[3]], -1)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_padding_past_the_end_of_a_slot_touches_no_other_row() -> None:
    model = policy("llama", torch.float64)
    fused = decoder(model, max_len=16)
    kv = cache(fused, 2, max_len=16)
    slots = kv.allocate(2)
    texts_BN = tokens(2, 15)
    fused.forward(texts_BN, kv, slots)
    kv.advance(slots, np.array([15, 9]))
    block_BN = tokens(2, 4, seed=5)
    found = head(fused, fused.forward(block_BN, kv, slots, counts_B=np.array([1, 4])))
    first = full_logits(model, torch.cat((texts_BN[0], block_BN[0, :1]))[None])[0, -1:]
    second = full_logits(model, torch.cat((texts_BN[1, :9], block_BN[1]))[None])[0, -4:]
    assert_logits_close(found[0, :1], first)
    assert_logits_close(found[1], second)


def test_a_block_that_does_not_fit_is_refused() -> None:
    fused = decoder(policy("llama", torch.float32), max_len=16)
    kv = cache(fused, 1, max_len=16)
    with pytest.raises(CapacityError, match="at most 16 tokens in a row, got 17"):
        fused.forward(tokens(1, 17), kv, kv.allocate(1))


def test_loading_again_takes_the_new_weights_and_keeps_no_link_to_the_old() -> None:
    model, other = policy("llama", torch.float64), policy("llama", torch.float64, seed=9)
    fused = decoder(model)
    tokens_BN = tokens(1, 7)
    expected = full_logits(other, tokens_BN)
    fused.load(dict(other.named_parameters()))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    kv = cache(fused, 1)
    assert_logits_close(head(fused, fused.forward(tokens_BN, kv, kv.allocate(1))), expected)


def test_missing_and_unknown_tensors_are_named() -> None:
    model = policy("llama", torch.float32)
    tensors = dict(model.named_parameters())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.extra"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"missing model.layers.1.mlp.up_proj.weight; unknown model.extra"):
        decoder(model).load(tensors)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    model = policy("llama", torch.float32)
    tensors = dict(model.named_parameters()) | {"model.norm.weight": torch.zeros(47)}
    with pytest.raises(ModelError, match=r"model.norm.weight of shape \(48,\), got \(47,\)"):
        decoder(model).load(tensors)


def test_a_failed_load_leaves_the_old_weights_in_place() -> None:
    model = policy("llama_tied", torch.float64)
    fused = decoder(model)
    with pytest.raises(ModelError):
        fused.load({"model.norm.weight": torch.zeros(48)})
    kv = cache(fused, 1)
    found = head(fused, fused.forward(tokens(1, 5), kv, kv.allocate(1)))
    assert_logits_close(found, full_logits(model, tokens(1, 5)))


def test_a_tied_head_may_come_along_only_if_it_is_the_embedding() -> None:
    model = policy("llama_tied", torch.float32)
    tensors = dict(model.named_parameters())
    embedding = tensors["model.embed_tokens.weight"]
    fused = decoder(model)
    fused.load(tensors | {"lm_head.weight": embedding.detach().clone()})
    with pytest.raises(ModelError, match="tied"):
        fused.load(tensors | {"lm_head.weight": embedding + 1})


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_expected_shapes_are_those_of_the_transformers_model(name: str) -> None:
    model = policy(name, torch.float32)
    shapes = decoder(model).expected_shapes()
    assert shapes == {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_bfloat16_logits_are_float32_and_not_rounded_to_bfloat16() -> None:
    model = policy("llama_tied", torch.bfloat16)
    fused = decoder(model)
    hidden_XH = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = hidden_XH.double() @ model.lm_head.weight.detach().double().t()
    torch.testing.assert_close(fused.logits(hidden_XH).double(), exact, atol=1e-5, rtol=1e-6)


def test_bfloat16_decoding_stays_near_the_float32_model() -> None:
    wide = policy("qwen3", torch.float32)
    fused = decoder(wide.to(torch.bfloat16))
    kv = cache(fused, 2)
    tokens_BN = tokens(2, 12)
    found = head(fused, fused.forward(tokens_BN, kv, kv.allocate(2))).log_softmax(-1)
    expected = full_logits(wide.to(torch.float32), tokens_BN).log_softmax(-1)
    assert float((found - expected).abs().mean()) < 0.1


@pytest.mark.integration
def test_smollm2_logits_equal_transformers_in_float32() -> None:
    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    model = load_policy(path, torch.float32)
    spec = DecoderSpec.from_config(read_config(path))
    fused = FusedDecoder(spec, dtype=torch.float32, max_len=96)
    fused.load(dict(iter_weights(path)))
    kv = KVSlots(spec, 2, 96, torch.float32)
    slots = kv.allocate(2)
    texts = ["The lead-out rider goes in front at full speed so that the sprinter behind can finish. " * 3] * 2
    tokens_BN = torch.tensor(AutoTokenizer.from_pretrained(path)(texts).input_ids)
    tokens_BN[1] = tokens_BN[1].flip(0)
    width = tokens_BN.shape[1] - 4
    prefix = head(fused, fused.forward(tokens_BN[:, :width], kv, slots))
    kv.advance(slots, np.array([width, width]))
    block = head(fused, fused.forward(tokens_BN[:, width:], kv, slots))
    torch.testing.assert_close(torch.cat((prefix, block), 1), full_logits(model, tokens_BN), atol=1e-4, rtol=1e-5)
