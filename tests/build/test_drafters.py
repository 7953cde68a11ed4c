from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from leadout.build.draft_info import draft_info
from leadout.build.drafter import drafter_bytes_per_slot, load_head, new_head
from leadout.build.generator import GIB, make_decoder, make_generator, num_slots
from leadout.config import Dataset, Draft, RolloutSection, SpeculativeConfig
from leadout.errors import CapacityError, LeadoutError, ModelError
from leadout.models.cut_layers import write_cut_model
from leadout.models.head_io import write_head
from leadout.models.kv import KVSlots
from leadout.models.loading import iter_weights, read_config, read_spec
from leadout.models.spec import DecoderSpec
from leadout.pipeline.generate import generate
from leadout.pipeline.requests import make_requests
from leadout.records import Prompt, SamplingParams
from leadout.text import TextCodec
from tests.build.tiny_runs import model_folder, write_questions
from tests.codecs import byte_codec

HEADS = ["eagle3", "parallel", "mtp"]
METHODS = [*HEADS, "ngram", "history", "small_model", *(f"history+{name}" for name in (*HEADS, "small_model"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model_folder(path / "policy")
    write_cut_model(path / "policy", [0, 3], path / "small")
    spec = DecoderSpec.from_config(read_config(path / "policy"))
    weights = dict(iter_weights(path / "policy"))
    decoder = make_decoder(spec, weights, dtype="float64", max_len=64, device=torch.device("cpu"))
    prompts = [Prompt(id="p", token_ids=np.array([65, 66], np.int32), text="")]
    for method in HEADS:
        draft = Draft(layer_ids=(1, 2, 3), vocab_size=100) if method != "mtp" else Draft()
        head = new_head(draft, decoder, weights, prompts, seed=0, temperature=1.0, keep=(), method=method)
        write_head(head, path / method)
    return path


def engine(folder: Path, **speculation: object):
    path = folder / "policy"
    weights = dict(iter_weights(path))
    spec = DecoderSpec.from_config(read_config(path))
    decoder = make_decoder(spec, weights, dtype="float64", max_len=64, device=torch.device("cpu"))
    section = RolloutSection(
        dtype="float64", speculative_config=SpeculativeConfig(**speculation) if speculation else None
    )
    head = None
    if section.speculative_config is not None and section.speculative_config.draft_head is not None:
        kind = section.speculative_config.draft_head
        head = load_head(folder / kind, weights, kind)
    return make_generator(decoder, TextCodec.from_pretrained(path), section, num_rows=8, head=head)


def requests():
    prompts = [
        Prompt(id=str(i), token_ids=np.array([65 + i, 66, 65 + i, 66, 65 + i], np.int32), text="") for i in range(4)
    ]
    return make_requests(prompts, SamplingParams(max_new_tokens=30, temperature=0.3), 4)


def model_of(method: str, folder: Path) -> dict[str, str]:
    return {"model": str(folder / "small")} if "small" in method else {}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_configuration_drafts(folder, method):
    generator = engine(folder, method=method, num_speculative_tokens=3, **model_of(method, folder))
    assert method in generator.capabilities.methods
    rollouts = generate(generator, requests())
    assert sum(int(rollout.rounds.drafted.sum()) for rollout in rollouts) > 0


@pytest.mark.parametrize("method", METHODS)
def test_greedy_drafts_leave_the_tokens_of_plain_decoding(folder, method):
    plain = generate(engine(folder), requests())
    chosen = {"method": method, "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    rollouts = generate(engine(folder, **chosen, **model_of(method, folder)), requests())
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in plain]


@pytest.mark.parametrize("method", ["small_model", "history+small_model"])
def test_rows_outgrow_the_context_of_a_small_model_with_the_tokens_of_plain_decoding(folder, tmp_path, method):
    short = tmp_path / "short"
    shutil.copytree(folder / "small", short)
    config = read_config(short) | {"max_position_embeddings": 24}
    (short / "config.json").write_text(json.dumps(config))
    chosen = {"method": method, "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    rollouts = generate(engine(folder, **chosen, model=str(short)), requests())
    plain = generate(engine(folder), requests())
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in plain]
    longer = [rollout for rollout in rollouts if len(rollout.prompt.token_ids) + rollout.length > 24]
    assert len(longer) > 8
    assert all(rollout.rounds.drafted.sum() > 0 for rollout in longer)
    if method == "small_model":
        for rollout in longer:
            before_R = len(rollout.prompt.token_ids) + np.cumsum([1, *(rollout.rounds.accepted[:-1] + 1)])
            assert rollout.rounds.drafted[before_R <= 24].all()
            assert not rollout.rounds.drafted[before_R > 24].any()


@pytest.mark.parametrize("method", ["ngram", "eagle3", "small_model", "history+small_model"])
def test_a_row_costs_the_memory_of_its_drafter_too(folder, method):
    generator = engine(folder, method=method, **model_of(method, folder))
    decoder = generator._parts.decoder
    speculation = SpeculativeConfig(method=method, **model_of(method, folder))
    head = load_head(folder / method, dict(iter_weights(folder / "policy")), method) if method == "eagle3" else None
    small = DecoderSpec.from_config(read_config(folder / "small"))
    of_drafter = {
        "ngram": 0,
        "eagle3": 8 * 2 * small.num_kv_heads * (64 + 32) * small.head_dim + 8 * (64 + 2) * (3 * small.hidden_size + 1),
    }.get(method, KVSlots.bytes_per_slot(small, 64, torch.float64))
    assert drafter_bytes_per_slot(speculation, decoder, head) == of_drafter
    plain = KVSlots.bytes_per_slot(decoder.spec, 64, torch.float64)
    section = RolloutSection(dtype="float64", kv_cache_memory=(3 * (plain + of_drafter) + 1) / GIB)
    assert num_slots(decoder.spec, section, 8, 64, of_drafter) == 3


def test_a_budget_that_holds_a_row_without_its_drafter_only_is_refused(folder):
    path = folder / "policy"
    weights = dict(iter_weights(path))
    spec = DecoderSpec.from_config(read_config(path))
    decoder = make_decoder(spec, weights, dtype="float64", max_len=64, device=torch.device("cpu"))
    memory = 1.01 * KVSlots.bytes_per_slot(spec, 64, torch.float64) / GIB
    section = RolloutSection(
        dtype="float64", kv_cache_memory=memory, speculative_config=SpeculativeConfig(method="eagle3")
    )
    head = load_head(folder / "eagle3", weights, "eagle3")
    with pytest.raises(CapacityError, match="holds no row of 64 tokens"):
        make_generator(decoder, TextCodec.from_pretrained(path), section, num_rows=8, head=head)


def test_a_resumed_generator_keeps_its_history(folder):
    first = engine(folder, method="history", num_speculative_tokens=3)
    generate(first, requests())
    second = engine(folder, method="history", num_speculative_tokens=3)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert len(first.state_dict()["history"]["prompts"]) == 4


def test_a_small_model_with_another_tokenizer_is_refused(folder, tmp_path):
    write_cut_model(folder / "policy", [0], tmp_path / "other")
    byte_codec(merges=(("a", "b"),))._tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"speculative_config\.model: expected a model with the policy's tokenizer"):
        engine(folder, method="small_model", model=str(tmp_path / "other"))


def test_a_small_model_that_is_not_there_is_refused_by_name(folder):
    with pytest.raises(LeadoutError, match="no such folder"):
        engine(folder, method="small_model", model="./nowhere")


def test_a_small_model_must_be_named():
    with pytest.raises(ValueError, match="method history\\+small_model needs `model`"):
        SpeculativeConfig(method="history+small_model")


def test_the_info_of_a_head_tells_layers_vocabulary_and_rope(folder):
    info = draft_info(str(folder / "eagle3"), str(folder / "policy"))
    assert info["layers"] == "states entering 1, 2, 3"
    assert info["vocabulary"].startswith("100 of 257 tokens, ids ")
    assert (info["kind"], info["drafts"]) == ("EAGLE-3 head (method eagle3)", "one after another")
    assert info["rope"].startswith("default theta=10000.0")
    assert info["policy"].startswith("fits")


def test_the_info_of_a_parallel_head_says_that_it_drafts_in_one_pass(folder):
    info = draft_info(str(folder / "parallel"), str(folder / "policy"))
    assert (info["kind"], info["drafts"]) == ("parallel EAGLE-3 head (method parallel)", "all in one pass")


def test_the_info_of_a_multi_token_head_tells_its_layer_and_vocabulary(folder):
    info = draft_info(str(folder / "mtp"), str(folder / "policy"))
    assert (info["kind"], info["layers"]) == ("multi-token head (method mtp)", "states entering 4")
    assert info["vocabulary"] == "all 257 tokens"


def test_a_head_of_another_kind_than_the_method_is_refused(folder):
    weights = dict(iter_weights(folder / "policy"))
    with pytest.raises(ModelError, match=r"expected a head for method eagle3, got .* with one for parallel"):
        load_head(folder / "parallel", weights, "eagle3")


def test_the_info_of_a_small_model_tells_its_size(folder):
    info = draft_info(str(folder / "small"), str(folder / "policy"))
    assert (info["kind"], info["layers"]) == ("small model of family llama", "2")
    assert info["policy"].startswith("same tokenizer")


def test_the_info_of_a_head_for_a_deeper_policy_names_its_layers(folder, tmp_path):
    model_folder(tmp_path / "shallow", layers=2)
    with pytest.raises(ModelError, match=r"to lie in 0\.\.2 \(the state entering each layer\), got \[1, 2, 3\]"):
        draft_info(str(folder / "eagle3"), str(tmp_path / "shallow"))


def test_the_info_of_a_missing_tensor_names_it(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "eagle3" / "model.safetensors")
    tensors.pop("d2t")
    tensors.pop("t2d")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "eagle3" / "config.json").read_text())
    with pytest.raises(ModelError, match="missing d2t, t2d"):
        draft_info(str(tmp_path))


def test_a_head_that_rotates_otherwise_is_taken_with_a_warning(folder, tmp_path, caplog):
    weights, rope = dict(iter_weights(folder / "policy")), read_spec(folder / "policy").rope
    load_head(folder / "eagle3", weights, "eagle3", rope=rope)
    assert not caplog.messages
    load_head(folder / "eagle3", weights, "eagle3", rope=replace(rope, theta=5e5))
    (message,) = caplog.messages
    assert message.startswith(f"{folder / 'eagle3'} rotates by {rope.text}, the policy by default theta=500000.0")


def test_the_info_names_a_rotation_that_differs_in_one_factor(folder, tmp_path):
    scaled = model_folder(tmp_path / "scaled")
    config = json.loads((scaled / "config.json").read_text())
    config.pop("rope_parameters", None)
    (scaled / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    with pytest.raises(ModelError, match="expected the policy's rope"):
        draft_info(str(folder / "eagle3"), str(scaled))


def test_the_info_of_no_folder_says_so():
    with pytest.raises(ModelError, match="which is not there"):
        draft_info("./nowhere")


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_an_untrained_head_is_measured_and_named_as_accepted_next_to_never(folder, tmp_path, method):
    from leadout.build.draft_measure import measure_head

    dataset = Dataset(path=write_questions(tmp_path / "sums.jsonl"), prompt_key="question")
    options = {"num_rollouts": 4, "max_completion_length": 12, "temperature": 0.2}
    figures = measure_head(str(folder / method), str(folder / "policy"), "sums", dataset, **options)
    assert "trained on other layers" in figures["warning"]
    assert figures["acceptance"].startswith("length 1.0")
    assert figures["speedup"].endswith("at batch 8")
