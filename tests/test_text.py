from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadout.errors import ConfigError, DataError, ModelError
from leadout.text import TextCodec, cut_at_stop, first_stop, last_number
from tests.codecs import byte_codec, metaspace_codec

BYTES = byte_codec()
LLAMA = metaspace_codec()


def slow_first_hit(codec: TextCodec, token_ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    """Decodes everything again at every token."""
    for count in range(1, len(token_ids) + 1):
        hit = first_stop(codec.decode(token_ids[:count]).rstrip("\ufffd"), stops)
        if hit is not None:
            return count, hit[1]
    return None


def watched_first_hit(codec: TextCodec, token_ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    watch = codec.stop_watch(stops)
    for count, token_id in enumerate(token_ids, start=1):
        hit = watch.push(token_id)
        if hit is not None:
            return count, hit
    return None


def test_decoding_what_was_encoded_gives_the_text_back() -> None:
    assert BYTES.decode(BYTES.encode("2 + 3 = 5, né 漢字")) == "2 + 3 = 5, né 漢字"


def test_encoded_ids_are_int32_in_order() -> None:
    ids = BYTES.encode("ab")
    assert ids.dtype == np.int32
    assert [BYTES.decode([i]) for i in ids] == ["a", "b"]


def test_special_tokens_are_left_out_of_decoded_text() -> None:
    eos = BYTES.eos_token_ids[0]
    ids = [*BYTES.encode("ab"), eos]
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, special=True) == "ab<eos>"


def test_messages_are_rendered_up_to_the_assistants_turn() -> None:
    text, ids = BYTES.render([{"role": "user", "content": "hi"}])
    assert text == "<|user|>hi\n<|assistant|>"
    assert BYTES.decode(ids) == text


def test_a_system_prompt_goes_in_front_of_the_messages() -> None:
    text, _ = BYTES.render([{"role": "user", "content": "hi"}], "be brief")
    assert text == "<|system|>be brief\n<|user|>hi\n<|assistant|>"


def test_a_row_with_its_own_system_message_keeps_it() -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert BYTES.render(messages, "other")[0] == "<|system|>own\n<|user|>hi\n<|assistant|>"


def test_template_arguments_reach_the_template() -> None:
    codec = byte_codec(template="{{ mood }}:{{ messages[0].content }}")
    assert codec.render([{"role": "user", "content": "hi"}], None, {"mood": "calm"})[0] == "calm:hi"


def test_messages_without_a_template_name_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template: false"):
        byte_codec(template=None).render([{"role": "user", "content": "hi"}])


def test_messages_that_the_template_refuses_are_a_data_error() -> None:
    codec = byte_codec(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        codec.render([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer in"):
        TextCodec.from_pretrained(tmp_path)


def test_end_ids_are_the_tokenizers_and_those_of_the_generation_config(tmp_path: Path) -> None:
    BYTES._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256]}))
    assert TextCodec.from_pretrained(tmp_path).eos_token_ids == (256, 7)


def test_special_tokens_are_those_that_stand_for_no_text_and_the_ends(tmp_path: Path) -> None:
    BYTES._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256]}))
    assert TextCodec.from_pretrained(tmp_path).special_token_ids == (7, 256)


def test_a_single_end_id_in_the_generation_config_is_taken(tmp_path: Path) -> None:
    BYTES._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    codec = TextCodec.from_pretrained(tmp_path)
    assert codec.eos_token_ids == (256, 9)
    assert codec.vocab_size == 257


def test_a_stop_string_that_spans_tokens_is_hit_by_its_last_token() -> None:
    ids = [int(i) for i in BYTES.encode("go\nStop!")]
    assert watched_first_hit(BYTES, ids, ["\nStop"]) == (7, "\nStop")


def test_a_stop_string_of_a_multi_byte_character_is_hit_by_its_last_byte() -> None:
    ids = [int(i) for i in BYTES.encode("ab漢c")]
    assert watched_first_hit(BYTES, ids, ["漢"]) == (5, "漢")


def test_a_stop_string_across_a_split_character_is_found() -> None:
    codec = byte_codec(merges=(("Ã", "©"), ("a", "Ã")))
    ids = [codec.encode("a")[0], codec.encode("é")[0]]
    assert watched_first_hit(codec, [int(i) for i in ids], ["aé"]) == (2, "aé")


def test_a_stop_string_is_seen_in_front_of_bytes_that_are_no_character_yet() -> None:
    ids = [int(i) for i in BYTES.encode("x;漢")][:3]
    assert watched_first_hit(BYTES, ids, [";"]) == (2, ";")


def test_of_several_stops_in_one_token_the_first_in_the_text_is_named() -> None:
    codec = byte_codec(merges=(("b", "c"), ("bc", "d")))
    ids = [int(i) for i in codec.encode("abcd")]
    assert len(ids) == 2
    assert watched_first_hit(codec, ids, ["c", "bcd"]) == (2, "bcd")


def test_a_space_before_a_word_counts_in_llama_like_tokenizers() -> None:
    ids = [LLAMA._tokenizer.convert_tokens_to_ids(word) for word in ("▁a", "▁stop", "now")]
    assert LLAMA.decode(ids) == "a stopnow"
    assert watched_first_hit(LLAMA, ids, ["a stop"]) == (2, "a stop")


def test_a_stop_string_that_is_a_special_token_is_hit_by_its_id() -> None:
    watch = BYTES.stop_watch(["<eos>", "zz"])
    assert watch.push(int(BYTES.encode("a")[0])) is None
    assert watch.push(BYTES.eos_token_ids[0]) == "<eos>"


def test_a_stop_string_around_a_special_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="name <eos> alone"):
        BYTES.stop_watch(["\n<eos>"])


def test_a_watch_without_stops_never_hits() -> None:
    assert watched_first_hit(BYTES, list(range(256)), []) is None


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    token_ids=st.lists(
        st.sampled_from([int(i) for i in BYTES.encode("abé漢 ")] + [BYTES.eos_token_ids[0], 200]), max_size=40
    ),
    stops=st.lists(st.sampled_from(["ab", "é", "b漢", "a a", "bab", "éé", "  "]), min_size=1, max_size=3, unique=True),
)
def test_the_watch_agrees_with_decoding_everything_again_at_every_token(token_ids: list[int], stops: list[str]) -> None:
    assert watched_first_hit(BYTES, token_ids, stops) == slow_first_hit(BYTES, token_ids, stops)


LLAMA_WORDS = ["▁", "▁a", "▁b", "▁stop", "now", ".", "</s>", "<0xC3>", "<0xA9>"]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    words=st.lists(st.sampled_from(LLAMA_WORDS), max_size=30),
    stops=st.lists(st.sampled_from([" a b", ".", "é", "b stop", "nowé", "  "]), min_size=1, max_size=3, unique=True),
)
def test_the_watch_agrees_with_decoding_everything_for_llama_like_tokenizers(
    words: list[str], stops: list[str]
) -> None:
    token_ids = [int(LLAMA._tokenizer.convert_tokens_to_ids(word)) for word in words]
    assert watched_first_hit(LLAMA, token_ids, stops) == slow_first_hit(LLAMA, token_ids, stops)


def test_the_work_of_a_watch_stays_bounded_on_bytes_that_never_form_a_character() -> None:
    watch = BYTES.stop_watch(["never"])
    invalid = int(BYTES.encode("漢")[1])
    for _ in range(500):
        watch.push(invalid)
    assert len(watch._ids) <= 40


def test_text_is_cut_before_the_first_stop() -> None:
    assert cut_at_stop("one\ntwo;three", [";", "\n"]) == "one"
    assert cut_at_stop("one", [";"]) == "one"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 30 = 42.", "42"),
        ("9-5", "5"),
        ("is -4", "-4"),
        ("= -4", "-4"),
        ("$1,234.50 left", "1234.50"),
        ("1,2", "2"),
        ("007", "7"),
        ("x2", "2"),
        ("3.5.", "3.5"),
        ("12,345,678", "12345678"),
        ("1,2345", "2345"),
        ("5 - 9 = \u22124", "-4"),
        ("9\u22125", "5"),
        ("about .5", "0.5"),
        ("-.25", "-0.25"),
        ("v1.2.5", "5"),
        ("1e5 metres", "100000"),
        ("2.5E-3", "0.0025"),
        ("1e5x", "5"),
        ("total 1 000", "1000"),
        ("1\u202f234\u00a0567.5 left", "1234567.5"),
        ("12 30", "30"),
        ("2 0000", "0"),
        ("1234 567", "567"),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_a_text_without_digits_has_no_last_number() -> None:
    assert last_number("forty-two") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"generation_config\.json: expected JSON, got"),
        ("[1]", r"generation_config\.json: expected a JSON object, got list"),
        ('{"eos_token_id": "end"}', r"expected a token id in 0\.\.256 or a list of them, got 'end'"),
        ('{"eos_token_id": [3, 257]}', r"expected a token id in 0\.\.256 or a list of them, got 257"),
        ('{"eos_token_id": -1}', r"expected a token id in 0\.\.256 or a list of them, got -1"),
        ('{"eos_token_id": true}', r"expected a token id in 0\.\.256 or a list of them, got True"),
    ],
)
def test_a_broken_generation_config_is_a_model_error(tmp_path: Path, content: str, message: str) -> None:
    BYTES._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        TextCodec.from_pretrained(tmp_path)


def test_a_broken_tokenizer_file_is_a_model_error(tmp_path: Path) -> None:
    BYTES._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ModelError, match=r"tokenizer\.json: expected JSON"):
        TextCodec.from_pretrained(tmp_path)
