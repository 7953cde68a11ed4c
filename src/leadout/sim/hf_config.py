"""Hugging Face config.json files: read, and refused where the cost model does not know the architecture.

Modelled: decoders whose layers all attend to the whole context, with key-value heads or with DeepSeek-V3's latent
attention. Every mistake is one line that names the file or the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from leadout.errors import ConfigError, ModelError

LATENT_RANK, LATENT_ROPE = 512, 64
"""Numbers a token leaves in the cache of latent attention: compressed keys and values, and the rotated part."""
MOST = 1_000_000_000
"""Largest size that is taken from a config."""
HYBRID_KEYS = (
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "attn_type_list"),
    "full_attention_interval",
)
"""Keys by which configs say that only some of their layers attend."""


def read_config(path: Path) -> dict[str, object]:
    """A config.json; raises ConfigError with one line naming the file when it is not a mapping in JSON."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a UTF-8 text file; expected a Hugging Face config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{path} must hold a mapping as a Hugging Face config.json does, got {type(read).__name__}")
    return read


def whole(
    config: Mapping[str, object], name: str, keys: tuple[str, ...], default: int | None = None, least: int = 1
) -> int:
    """The first of `keys` that is set; raises ModelError when none is, or when it is not a whole number >= `least`."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST:
            rounded = int(value)
            if rounded == value:
                return rounded
        raise ModelError(f"the config of {name}: {key} must be a whole number >= {least}, got {value!r}")
    if default is None:
        raise ModelError(f"the config of {name} has no {keys[0]}; is it a decoder-only language model?")
    return default


def latent_rank(config: Mapping[str, object], name: str) -> int:
    """kv_lora_rank, 0 without latent attention; raises ModelError on another kind than DeepSeek-V3's."""
    rank = whole(config, name, ("kv_lora_rank",), default=0, least=0)
    if not rank:
        return 0
    rope = whole(config, name, ("qk_rope_head_dim",), default=0, least=0)
    if (rank, rope) != (LATENT_RANK, LATENT_ROPE) or not config.get("q_lora_rank"):
        raise ModelError(
            f"the config of {name}: latent attention is modelled with kv_lora_rank {LATENT_RANK}, qk_rope_head_dim "
            f"{LATENT_ROPE} and a q_lora_rank only, got {rank}, {rope} and {config.get('q_lora_rank')!r}"
        )
    return rank


def check_layers(config: Mapping[str, object], name: str) -> None:
    """Raise ModelError unless every layer attends to the whole context."""
    kinds = config.get("layer_types")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else []
    other += [key for key in HYBRID_KEYS if config.get(key) is not None]
    other += sorted(key for key in config if key.startswith(("mamba_", "ssm_")))
    window = config.get("sliding_window")
    if not isinstance(kinds, list) and isinstance(window, int) and config.get("use_sliding_window", True):
        longest = config.get("max_position_embeddings")
        if window > 0 and not (isinstance(longest, int) and window >= longest):
            other.append(f"sliding_window {window}")
    if other:
        raise ModelError(
            f"the config of {name}: only layers with full attention are modelled, got {', '.join(other[:4])}"
        )
