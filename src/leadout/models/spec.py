"""What a policy's decoder is, read from a Hugging Face config.

The generating decoder covers the Llama, Mistral, Qwen2 and Qwen3 families. Anything in a config that would change the
forward pass and is not known here is refused by name: a model that is almost right samples from the wrong law.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from leadout.errors import CapacityError, ModelError
from leadout.models.rope import RopeSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` values that the fused decoder can run."""


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


_READ = _names(
    "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size",
    "vocab_size rms_norm_eps tie_word_embeddings attention_bias mlp_bias max_position_embeddings eos_token_id",
    "hidden_act rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings",
    "sliding_window use_sliding_window max_window_layers layer_types",
)
"""Fields that the decoder honours."""

_HARMLESS = _names(
    "_name_or_path _model_name_or_path _attn_implementation _attn_implementation_internal architectures auto_map",
    "bos_token_id chunk_size_feed_forward dtype finetuning_task hidden_dropout id2label initializer_range",
    "is_decoder is_encoder_decoder is_llama_config label2id max_length num_labels output_attentions",
    "output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type resid_pdrop",
    "return_dict return_dict_in_generate rope_interleaved sep_token_id task_specific_params tokenizer_class",
    "torch_dtype torchscript transformers.js_config transformers_version unk_token_id use_cache use_bfloat16",
    "use_mrope _commit_hash _experts_implementation_internal experts_implementation use_return_dict do_sample",
    "temperature top_k top_p attention_dropout unsloth_version unsloth_fixed num_nextn_predict_layers",
)
"""Fields that do not touch the logits of a forward pass without dropout."""

_NEUTRAL: Mapping[str, object] = {
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
}
"""Harmless at this value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes and switches of a decoder."""

    family: str
    """One of `FAMILIES`."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides `num_heads`."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Width of the gated MLP."""
    vocab_size: int
    """Rows of embedding and head."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    tied: bool
    """Whether the head is the embedding."""
    qkv_bias: bool
    """Whether query, key and value projections have biases."""
    output_bias: bool
    """Whether the attention's output projection has one."""
    mlp_bias: bool
    """Whether the MLP's projections have them."""
    qk_norm: bool
    """Whether each query and key head is normed before rotation."""
    max_position_embeddings: int
    """Longest context the model was made for."""
    rope: RopeSpec
    """Rotary embedding."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text, by the config; () if it names none."""
    sliding_window: int | None = None
    """Keys further back than this are not seen by (some) layers; None sees all."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the dict of a config.json, or of `PretrainedConfig.to_dict()`.

        Raises:
            ModelError: another family, or a field that would change the forward pass in a way the decoder lacks.

        """
        config = as_known_family(config)
        of_a_head = [name for name in _HEAD_FIELDS if config.get(name) is not None]
        if of_a_head:
            raise ModelError(f"expected a whole model, got a draft head (it has {of_a_head[0]}); name the model itself")
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise ModelError(
                f"expected a model of family {', '.join(FAMILIES)}, got {family!r}; "
                "models of other architectures can only be generated through vLLM"
            )
        _refuse_unknown(config)
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        num_kv_heads = _num_kv_heads(config, family, num_heads)
        head_dim = _head_dim(config, family, hidden_size, num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise ModelError(
                f"expected num_attention_heads to be a multiple of num_key_value_heads and an even head_dim, "
                f"got {num_heads}, {num_kv_heads} and {head_dim}; check config.json"
            )
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            hidden_size=hidden_size,
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or (attention_bias and family in ("llama", "qwen3")),
            output_bias=attention_bias and family in ("llama", "qwen3"),
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            max_position_embeddings=_size(config, "max_position_embeddings"),
            rope=RopeSpec.from_config(config, head_dim),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            sliding_window=_sliding_window(config, family),
        )

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key, value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def check_length(self, max_len: int) -> None:
        """Refuse rows of `max_len` tokens if the model cannot take them.

        Raises:
            CapacityError: longer than the model's own context.
            ModelError: longer than the sliding window, which the decoder does not have.

        """
        if max_len > self.max_position_embeddings:
            raise CapacityError(
                f"expected at most {self.max_position_embeddings} tokens of context (max_position_embeddings), "
                f"got {max_len}; shorten prompts or completions"
            )
        if self.sliding_window is not None and max_len > self.sliding_window:
            raise ModelError(
                f"expected at most {self.sliding_window} tokens of context (sliding_window), got {max_len}; "
                "shorten prompts or completions, or use the vLLM backend"
            )


_HEAD_FIELDS = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "speculators_model_type")
"""Fields that only the config of a draft head has."""


def as_known_family(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a MiMo model as the Qwen2 config that it is, without its multi-token head; others as they are."""
    if config.get("model_type") != "mimo":
        return config
    dropped = ("auto_map", "num_nextn_predict_layers", "attention_bias")
    kept = {name: value for name, value in config.items() if name not in dropped}
    return kept | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        raise ModelError("expected plain weights, got a config with quantization_config; use an unquantised checkpoint")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"expected hidden_act silu, got {activation!r}; use the vLLM backend")
    if config["model_type"] in ("mistral", "qwen2") and config.get("attention_bias"):
        # transformers ignores it for these families; a checkpoint that has such tensors means something else.
        raise ModelError(f"attention_bias is not a field of family {config['model_type']}; use the vLLM backend")
    for name, value in config.items():
        if name in _NEUTRAL and value is not None and value != _NEUTRAL[name]:
            raise ModelError(f"expected {name} {_NEUTRAL[name]}, got {value!r}; use the vLLM backend")
        if name not in _READ and name not in _HARMLESS and value is not None and value is not False:
            raise ModelError(
                f"config field {name} = {value!r} is not known to the fused decoder and may change the forward pass; "
                "use the vLLM backend, or remove the field if it has no effect"
            )


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"expected a positive integer for {name} in the model config, got {value!r}")
    return value


def _num_kv_heads(config: Mapping[str, Any], family: str, num_heads: int) -> int:
    if config.get("num_key_value_heads") is None and family == "llama":
        return num_heads
    return _size(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], family: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    # A Qwen3 config that says nothing means 128.
    return 128 if family == "qwen3" else hidden_size // num_heads


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(str(value)),)


def _sliding_window(config: Mapping[str, Any], family: str) -> int | None:
    """The window of the layers that have one; families differ in which do."""
    if family == "llama":
        return None
    if family == "mistral":
        window = config.get("sliding_window", 4096)
        return None if window is None else int(window)
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    else:
        slides = int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])
    window = config.get("sliding_window", 4096)
    return int(window) if slides and window is not None else None
