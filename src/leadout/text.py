"""The one tokenizer wrapper: text and chat messages to token ids and back, and stop strings.

``data`` renders prompts with it, the generating engine watches for stop strings with it, ``reward`` decodes
completions with it. Nothing else touches a tokenizer, so all three agree on what the text of a token is.

Text of a completion leaves special tokens out, and stop strings are looked for in that text. A stop string that *is*
a special token (``<|im_end|>``) is watched by its id instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer

from leadout.errors import ConfigError, DataError, ModelError
from leadout.records import IntArray

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""

_NUMBER = re.compile(
    r"(?:(?<![\w.])[-\u2212])?"  # a sign: hyphen or minus
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?:[ \u00a0\u2009\u202f]\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
    r"|(?<![\w.])\.\d+)"
    r"(?:[eE][-+]?\d{1,4}(?!\w))?",
    re.ASCII,
)
_SEPARATORS = str.maketrans({"\u2212": "-", **dict.fromkeys(", \u00a0\u2009\u202f")})

MAX_PENDING = 16
"""Tokens held back while their text ends inside a character; a character has at most four bytes."""


class TextCodec:
    """Encodes, renders and decodes with one tokenizer.

    Example: ``codec = TextCodec.from_pretrained("models/smollm2-135m"); codec.decode(codec.encode("2 + 3"))``
    """

    def __init__(self, tokenizer: Any, *, extra_eos_token_ids: Sequence[int] = (), source: str = "") -> None:
        self._tokenizer = tokenizer
        self._source = source or str(getattr(tokenizer, "name_or_path", "tokenizer"))
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._eos_token_ids = tuple(dict.fromkeys([*own, *extra_eos_token_ids]))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> TextCodec:
        """Load the tokenizer of a local folder or hub id, and the end-of-sequence ids of its generation config.

        Raises:
            ModelError: there is no tokenizer there, or a generation config that names no token ids.

        """
        name = str(source)
        _read_object(Path(name) / "tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"no tokenizer in {name}: expected a folder or hub id with tokenizer.json") from error
        return cls(tokenizer, extra_eos_token_ids=_generation_eos(name, len(tokenizer)), source=name)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._tokenizer)

    def difference(self, other: TextCodec) -> str | None:
        """The first token whose id differs from another tokenizer's, in words; None if all are the same."""
        own, others = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        if own == others:
            return None
        token = min(dict(own.items() ^ others.items()), key=lambda t: min(own.get(t, 1 << 40), others.get(t, 1 << 40)))
        return f"token {token!r} has id {own.get(token, 'none')} here and {others.get(token, 'none')} there"

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._tokenizer.chat_template is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: the tokenizer's own, then those of the generation config."""
        return self._eos_token_ids

    def encode(self, text: str, *, special: bool = True) -> IntArray:
        """Token ids of plain text, i32[P]; `special` adds what the tokenizer puts around a text (a BOS, if any)."""
        return np.asarray(self._tokenizer(text, add_special_tokens=special)["input_ids"], np.int32).reshape(-1)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, IntArray]:
        """Chat messages through the template, up to where the assistant begins: the text and its ids, i32[P].

        `system_prompt` is put in front unless the messages bring a system message of their own.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the template refuses the messages.

        """
        if not self.has_chat_template:
            raise ConfigError(
                f"the tokenizer of {self._source} has no chat template, got chat messages; "
                "set data.apply_chat_template: false or use a tokenizer with a template"
            )
        chat = [dict(message) for message in messages]
        if system_prompt is not None and (not chat or chat[0].get("role") != "system"):
            chat.insert(0, {"role": "system", "content": system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **dict(template_kwargs or {})
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in chat)
            raise DataError(
                f"the chat template of {self._source} refuses messages with roles {roles}: {error}"
            ) from error
        return str(text), self.encode(str(text), special=False)

    def decode(self, token_ids: Sequence[int] | IntArray, *, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `special`."""
        ids = [int(token_id) for token_id in token_ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)

    def stop_watch(self, stops: Sequence[str]) -> StopWatch:
        """A fresh watch over one completion.

        Raises:
            ConfigError: a stop string mixes other text with a special token, which no completion text shows.

        """
        special = self._special_tokens()
        by_id: dict[int, str] = {}
        for stop in stops:
            if stop in special:
                by_id[special[stop]] = stop
            elif mixed := next((token for token in special if token and token in stop), None):
                raise ConfigError(f"stop string {stop!r} mixes text with the special token {mixed}; name {mixed} alone")
        return StopWatch(self, [stop for stop in stops if stop not in special], by_id)

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for no text, in rising order: turns, ends, padding."""
        return tuple(sorted({*self._special_tokens().values(), *self.eos_token_ids}))

    def _special_tokens(self) -> dict[str, int]:
        pairs = zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True)
        return {str(token): int(token_id) for token, token_id in pairs}


class StopWatch:
    """Finds the first token that completes a stop string, one completion, token by token.

    Tokens are decoded together with the few before them, which end in a whole character, so that a character or a stop
    string may span tokens and the work per token stays bounded. Bytes that do not form a character yet are held back.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str], stop_ids: Mapping[int, str]) -> None:
        self._codec = codec
        self._stops = tuple(stops)
        self._stop_ids = dict(stop_ids)
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._ids: list[int] = []
        self._context = 0
        self._known = ""
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """Take the next token; the stop string it completes, or None.

        Of several completed by one token, the one that begins first in the text is named: what `cut_at_stop` cuts at.
        """
        if token_id in self._stop_ids:
            return self._stop_ids[token_id]
        if not self._stops:
            return None
        self._ids.append(int(token_id))
        text = self._codec.decode(self._ids)
        visible = text.rstrip(REPLACEMENT)
        window = self._tail + visible[len(self._known) :]
        hit = first_stop(window, self._stops)
        is_whole = visible == text and len(visible) > len(self._known)
        if hit is None and (is_whole or len(self._ids) - self._context > MAX_PENDING):
            self._settle(window)
        return None if hit is None else hit[1]

    def _settle(self, window: str) -> None:
        """Keep the newest tokens as context of the next decode, and only as much text as a stop string can need."""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._known = self._codec.decode(self._ids).rstrip(REPLACEMENT)
        self._tail = window[-self._keep :] if self._keep else ""


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string begins, and which it is (the shortest that begins there); None without one."""
    found = [(position, len(stop), stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return None
    position, _, stop = min(found)
    return position, stop


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string; the whole text when there is none."""
    hit = first_stop(text, stops)
    return text if hit is None else text[: hit[0]]


def last_number(text: str) -> Decimal | None:
    """The last number in a text: ``"12 + 30 = 42."`` gives 42, ``"$1,234.50"`` gives 1234.50; None without one.

    A minus sign belongs to a number unless a digit or letter stands right before it (``9-5`` ends in 5). Thousands may
    be set off by commas or spaces (``1 000``), and ``.5`` and ``1e5`` are numbers too.
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].translate(_SEPARATORS)) if found else None


def checked_token_ids(value: object, vocab_size: int | None, where: str) -> tuple[int, ...]:
    """Token ids as a config gives them: none, one or a list.

    Raises:
        ModelError: something else, or an id outside of the vocabulary; the message begins with `where`.

    """
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        is_whole = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_whole or token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            known = "from 0" if vocab_size is None else f"in 0..{vocab_size - 1}"
            raise ModelError(
                f"{where}: expected a token id {known} or a list of them, got {token_id!r:.60}; correct it"
            )
    return tuple(ids)


def _generation_eos(source: str, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of ``generation_config.json``; none when a local folder has no such file."""
    path = Path(source) / "generation_config.json"
    if not Path(source).is_dir():
        return checked_token_ids(_hub_generation_eos(source), vocab_size, f"{source}: eos_token_id")
    return checked_token_ids(_read_object(path).get("eos_token_id"), vocab_size, f"{path}: eos_token_id")


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON, got {str(error).splitlines()[0]}; copy the file again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(found).__name__}; copy the file again")
    return found


def _hub_generation_eos(source: str) -> object:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(source)
    except OSError:
        return None  # the repository has none
    return config.eos_token_id
