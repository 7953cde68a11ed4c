"""Small real tokenizers for tests, built in memory: byte-level (one token per byte) and word-piece like llama's."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leadout.text import TextCodec

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_codec(*, template: str | None = TEMPLATE, merges: tuple[tuple[str, str], ...] = ()) -> TextCodec:
    """One token per UTF-8 byte, then merges, then ``<eos>`` as the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in merges]
    model = models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = template
    return TextCodec(fast, source="byte tokenizer")


def metaspace_codec() -> TextCodec:
    """A llama-like tokenizer: words carry their leading space, unknown bytes fall back to byte tokens."""
    words = ["<unk>", "▁", "▁a", "▁b", "▁stop", "now", ".", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    return TextCodec(fast, source="metaspace tokenizer")
