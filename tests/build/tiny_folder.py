"""A tiny random policy in a folder, with a byte-level tokenizer: what a user would name with --model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.codecs import byte_codec


def write_policy(folder: Path, *, seed: int = 0, layers: int = 4) -> Path:
    """Logits are far from flat, so that there is something to learn."""
    codec = byte_codec()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=codec.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=True,
        eos_token_id=codec.eos_token_ids[0],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    codec._tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, count: int = 40) -> Path:
    """Rows with `question` and `answer`."""
    rows = [{"question": f"{i}+{i % 7}?", "answer": str(i + i % 7)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
