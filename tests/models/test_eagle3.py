from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from leadout.errors import ModelError
from leadout.models.eagle3 import Eagle3Head, Eagle3Spec, initial_head
from tests.models.eagle3_fakes import DRAFT_IDS, SPEC, policy_tensors, tiny_head

NAMES = {
    "fc.weight",
    "fc_norm.0.weight",
    "fc_norm.1.weight",
    "fc_norm.2.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
}


def causal_forward(head, taps_SF, embeddings_SH, positions_S):
    """One causal pass of the head over a whole sequence of true entries."""
    return attended_over(head, head.entry(head.fuse(taps_SF), embeddings_SH), positions_S)


def attended_over(head, entry, positions_S):
    """The layer over a whole sequence of entries, each seeing those before it."""
    rotary = head.rotary(positions_S)
    query = head.queries(entry.input_NE, rotary)
    key, value = head.keys_values(entry.input_NE, rotary)
    repeat = head.spec.num_heads // head.spec.num_kv_heads
    key, value = (part.repeat_interleave(repeat, dim=1).transpose(0, 1) for part in (key, value))
    attended = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, is_causal=True).transpose(0, 1)
    return head.complete(attended, entry.residual_NH)


def hugging_face_layer(head) -> tuple[LlamaDecoderLayer, LlamaRotaryEmbedding]:
    """A stock Llama layer with the head's weights; its attention is made to take the doubled input."""
    spec = head.spec
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        setattr(layer.self_attn, name, torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    layer.self_attn.load_state_dict(head.midlayer.self_attn.state_dict())
    layer.mlp.load_state_dict(head.midlayer.mlp.state_dict())
    layer.post_attention_layernorm.load_state_dict(head.midlayer.post_attention_layernorm.state_dict())
    return layer.double(), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_layer_equals_a_hugging_face_llama_layer_fed_with_embedding_and_feature(norm_before_residual):
    head = tiny_head(dtype=torch.float64, norm_before_residual=norm_before_residual)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(7, 48, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(7, 16, generator=generator, dtype=torch.float64)
    positions = torch.arange(7)

    feature = head.fuse(taps)
    normed = head.midlayer.hidden_norm(feature)
    joined = torch.cat([head.midlayer.input_layernorm(embeddings), normed], dim=-1)[None]
    layer, rotary = hugging_face_layer(head)
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    attended, _ = layer.self_attn(joined, rotary(joined, positions[None]), mask)
    hidden = (normed if norm_before_residual else feature) + attended[0]
    expected = hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    # transformers takes norms and softmax in float32 even in a float64 model.
    torch.testing.assert_close(causal_forward(head, taps, embeddings, positions), expected, rtol=0, atol=1e-5)


def test_fc_norm_norms_every_tap_by_itself():
    head = tiny_head(dtype=torch.float64)
    taps = torch.randn(3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parts = [F.rms_norm(taps[:, 16 * i : 16 * (i + 1)], (16,), head.fc_norm[i].weight, eps=1e-5) for i in range(3)]
    torch.testing.assert_close(head.fuse(taps), torch.cat(parts, -1) @ head.fc.weight.T, rtol=0, atol=1e-12)


def test_norm_before_fc_norms_the_concatenation_once():
    head = tiny_head(dtype=torch.float64, fc_norm=False, norm_before_fc=True)
    taps = torch.randn(3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    normed = F.rms_norm(taps, (48,), head.input_norm.weight, eps=1e-5)
    torch.testing.assert_close(head.fuse(taps), normed @ head.fc.weight.T, rtol=0, atol=1e-12)


def test_the_state_dict_has_the_published_names():
    assert set(tiny_head(draft_vocab_size=40).state_dict()) == NAMES
    assert set(tiny_head().state_dict()) == NAMES | {"d2t", "t2d"}


def test_d2t_holds_offsets_and_t2d_marks_the_draft_vocabulary():
    head = tiny_head()
    assert head.d2t.tolist() == [0, 0, 1, 1, 4, 4, 5, 13, 13, 21, 28, 28]
    assert head.draft_token_ids().tolist() == DRAFT_IDS.tolist()
    assert head.t2d.nonzero().squeeze(-1).tolist() == DRAFT_IDS.tolist()


def test_a_full_vocabulary_has_no_map():
    assert tiny_head(draft_vocab_size=40).draft_token_ids() is None


def test_a_fresh_head_starts_from_the_policys_rows_and_a_fifth_of_its_final_norm():
    policy = policy_tensors()
    head = initial_head(SPEC, policy, torch.Generator().manual_seed(0), token_ids_V=DRAFT_IDS)
    assert torch.equal(head.lm_head.weight, policy["model.embed_tokens.weight"][DRAFT_IDS])
    assert torch.equal(head.norm.weight, policy["model.norm.weight"] * 0.2)
    assert torch.equal(head.midlayer.hidden_norm.weight, torch.ones(16))
    assert 0.018 < float(head.fc.weight.std()) < 0.022


def test_an_untied_policy_lends_its_output_rows():
    policy = policy_tensors() | {"lm_head.weight": torch.full((40, 16), 3.0)}
    head = initial_head(SPEC, policy, torch.Generator().manual_seed(0), token_ids_V=DRAFT_IDS)
    assert torch.equal(head.lm_head.weight, torch.full((12, 16), 3.0))


def test_a_random_start_takes_nothing_from_the_policy():
    head = initial_head(SPEC, {}, torch.Generator().manual_seed(0), token_ids_V=DRAFT_IDS, init="random")
    assert torch.equal(head.norm.weight, torch.ones(16))
    assert 0.015 < float(head.lm_head.weight.std()) < 0.025


def test_a_reduced_vocabulary_without_a_map_is_refused():
    with pytest.raises(ModelError, match="expected a draft vocabulary"):
        initial_head(SPEC, policy_tensors(), torch.Generator())


def test_a_repeated_id_in_the_draft_vocabulary_is_refused():
    with pytest.raises(ModelError, match="12 distinct policy ids"):
        initial_head(SPEC, policy_tensors(), torch.Generator(), token_ids_V=torch.zeros(12, dtype=torch.int64))


def test_positions_beyond_the_models_context_still_rotate():
    head = tiny_head(dtype=torch.float64)
    cos, _ = head.rotary(torch.tensor([100_000]))
    frequencies = head.spec.rope.inverse_frequencies()
    assert torch.allclose(cos[0, :2], (torch.tensor(100_000.0) * frequencies).cos().double())


def test_embeddings_take_no_gradient():
    head = tiny_head()
    table = policy_tensors()["model.embed_tokens.weight"].requires_grad_()
    assert not head.embed(torch.tensor([1, 2]), table).requires_grad


def test_a_head_of_another_width_needs_its_own_embeddings():
    with pytest.raises(ModelError, match=r"expected embed_tokens\.weight"):
        Eagle3Head(_replace(target_hidden_size=32))
    head = Eagle3Head(_replace(target_hidden_size=32), own_embeddings=True)
    assert torch.equal(head.embed(torch.tensor([3]), torch.zeros(40, 32))[0], head.embed_tokens.weight[3])


def test_the_draft_spec_names_taps_vocabulary_and_rope():
    spec = tiny_head().draft_spec()
    assert spec.layer_ids == (1, 2, 3)
    assert spec.vocab_size == 12
    assert spec.vocab_map_crc32 == zlib.crc32(DRAFT_IDS.numpy().tobytes())
    assert spec.rope == SPEC.rope.text
    assert tiny_head(draft_vocab_size=40).draft_spec().vocab_map_crc32 == 0


def _replace(**changes: object) -> Eagle3Spec:
    return dataclasses.replace(SPEC, **changes)
