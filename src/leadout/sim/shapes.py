"""Shapes of models and drafters: everything the cost of a forward pass depends on, and what it weighs.

Symbols: h hidden size, q / kv query and key-value heads, d head size, f feed-forward width, V vocabulary, E experts,
K experts per token. Sources: the models' public config.json files and SpecForge's EAGLE-3 recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from leadout.errors import ConfigError, ModelError
from leadout.sim.hf_config import LATENT_RANK, LATENT_ROPE, check_layers, latent_rank, read_config, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    ffn: int
    vocab: int
    tied: bool = False
    """Input embedding and output layer share their matrix."""
    experts: int = 0
    """0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Leading layers without experts in an MoE model."""
    latent: int = 0
    """Multi-head latent attention: numbers cached per token and layer (0: ordinary key-value heads)."""
    q_lora: int = 0
    v_head_dim: int = 128

    @property
    def is_moe(self) -> bool:
        """Whether layers route tokens to experts."""
        return self.experts > 0

    @property
    def attention_params(self) -> float:
        """Parameters of one layer's attention projections."""
        if self.latent:
            rope = self.latent - LATENT_RANK
            query = self.hidden * self.q_lora + self.q_lora * self.heads * (self.head_dim + rope)
            key_value = self.hidden * self.latent + LATENT_RANK * self.heads * (self.head_dim + self.v_head_dim)
            return query + key_value + self.heads * self.v_head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_params(self) -> float:
        """Parameters of one expert."""
        return 3.0 * self.hidden * self.expert_ffn

    @property
    def head_params(self) -> float:
        """Parameters of the output layer."""
        return float(self.vocab * self.hidden)

    @property
    def _moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def params(self) -> float:
        """All parameters."""
        dense = (self.layers - self._moe_layers) * 3.0 * self.hidden * self.ffn
        routed = self._moe_layers * ((self.experts + self.shared_experts) * self.expert_params)
        routers = self._moe_layers * self.hidden * self.experts
        embeddings = self.head_params * (1 if self.tied else 2)
        return self.layers * self.attention_params + dense + routed + routers + embeddings

    @property
    def matmul_params(self) -> float:
        """P_mm: parameters multiplied per token (active experts, output layer, no embedding look-up)."""
        dense = (self.layers - self._moe_layers) * 3.0 * self.hidden * self.ffn
        active = self._moe_layers * (self.experts_per_token + self.shared_experts) * self.expert_params
        return self.layers * self.attention_params + dense + active + self.head_params

    def kv_bytes_per_token(self, tensor_parallel: int, kv_bytes: float) -> float:
        """Bytes of key-value cache one token takes on one GPU: max(1, kv_heads / TP) heads, all layers."""
        return self.layers * self.kv_bytes_per_layer(tensor_parallel, kv_bytes)

    def kv_bytes_per_layer(self, tensor_parallel: int, kv_bytes: float) -> float:
        """The same for one layer."""
        if self.latent:
            return self.latent * kv_bytes
        return 2.0 * max(1, self.kv_heads // tensor_parallel) * self.head_dim * kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A drafter. `eagle3` and `mtp` are one layer over the policy's features; `small_model` is a whole model."""

    method: str
    """eagle3, mtp, small_model or ngram."""
    model: ModelShape | None
    """Shape of the drafter's own stack; None for n-gram."""
    fused_states: int = 3
    """Policy states concatenated at its input."""
    attention_inputs: int = 2
    """Attention reads this many hidden sizes (EAGLE-3: embedding and feature)."""

    @property
    def fc_params(self) -> float:
        """Parameters of the fusing layer, applied once per verified token."""
        return float(self.fused_states * self.model.hidden**2) if self.model is not None else 0.0

    @property
    def params(self) -> float:
        """Parameters the drafter adds to a replica (the policy's embedding is reused)."""
        if self.model is None:
            return 0.0
        if self.method == "small_model":
            return self.model.params
        shape = self.model
        q_and_kv = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads) * self.attention_inputs
        out = shape.hidden * shape.head_dim * shape.heads
        return self.fc_params + shape.layers * (q_and_kv + out + 3.0 * shape.hidden * shape.ffn) + shape.head_params

    @property
    def trained_params(self) -> float:
        """Parameters multiplied per token and pass when the drafter learns."""
        if self.model is None:
            return 0.0
        return self.model.matmul_params if self.method == "small_model" else self.params


def _dense(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool, vocab: int = 151936) -> ModelShape:
    return ModelShape(name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=vocab, tied=tied)


_BUILT_IN = (
    _dense("Qwen3-0.6B", 28, 1024, 16, 3072, True),
    _dense("Qwen3-1.7B", 28, 2048, 16, 6144, True),
    _dense("Qwen3-4B", 36, 2560, 32, 9728, True),
    _dense("Qwen3-8B", 36, 4096, 32, 12288, False),
    _dense("Qwen3-14B", 40, 5120, 40, 17408, False),
    _dense("Qwen3-32B", 64, 5120, 64, 25600, False),
    _dense("Llama-3.1-8B", 32, 4096, 32, 14336, False, vocab=128256),
    ModelShape(
        name="Qwen3-30B-A3B",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        ffn=6144,
        vocab=151936,
        experts=128,
        experts_per_token=8,
        expert_ffn=768,
    ),
    ModelShape(
        name="Qwen3-235B-A22B",
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        ffn=12288,
        vocab=151936,
        experts=128,
        experts_per_token=8,
        expert_ffn=1536,
    ),
    ModelShape(
        name="DeepSeek-V3",
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        ffn=18432,
        vocab=129280,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        latent=576,
        q_lora=1536,
    ),
)
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _BUILT_IN}
"""Built-in models by name."""

_DRAFT_FFN = {"Qwen3-30B-A3B": 12288, "Qwen3-235B-A22B": 24576}


def find_model(name: str) -> ModelShape:
    """A built-in model by name, or the shape in a Hugging Face config.json (file or folder)."""
    known = {model.lower(): shape for model, shape in MODELS.items()}
    if name.lower().removeprefix("qwen/").removesuffix("-fp8") in known:
        return known[name.lower().removeprefix("qwen/").removesuffix("-fp8")]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"model must be one of {', '.join(MODELS)} or a config.json, got {name!r}")
    return from_hf_config(read_config(path), name=path.parent.name or path.stem)


def from_hf_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Read a Hugging Face config; raises ModelError when a field is missing or the model is of a kind not modelled."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = inner
    check_layers(config, name)

    def number(*keys: str, default: int | None = None, least: int = 1) -> int:
        return whole(config, name, keys, default, least)

    heads = number("num_attention_heads")
    hidden = number("hidden_size")
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0, least=0)
    latent = latent_rank(config, name)
    shape = ModelShape(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("qk_nope_head_dim", "head_dim", default=max(1, hidden // heads)),
        ffn=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_ffn=number("moe_intermediate_size", "intermediate_size") if experts else 0,
        shared_experts=number("n_shared_experts", default=0, least=0),
        dense_layers=number("first_k_dense_replace", default=0, least=0) if experts else 0,
        latent=latent + LATENT_ROPE if latent else 0,
        q_lora=number("q_lora_rank") if latent else 0,
        v_head_dim=number("v_head_dim", default=128),
    )
    if shape.heads % shape.kv_heads:
        raise ModelError(
            f"the config of {name}: num_key_value_heads must divide num_attention_heads = {heads}, got {shape.kv_heads}"
        )
    if shape.experts_per_token > experts:
        raise ModelError(
            f"the config of {name}: num_experts_per_tok must be <= {experts} experts, got {shape.experts_per_token}"
        )
    if shape.dense_layers > shape.layers:
        raise ModelError(
            f"the config of {name}: first_k_dense_replace must be <= {shape.layers} layers, got {shape.dense_layers}"
        )
    return shape


def _own_draft(method: str, path: str, vocab: int | None) -> DraftShape:
    """A drafter with a config.json of its own; `draft_vocab_size` is its output layer."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ConfigError(f"speculation.model of {method} must be a draft folder or its config.json, got {path!r}")
    config, name = read_config(file), file.parent.name or file.stem
    shape = from_hf_config(config, name=name)
    rows = vocab or whole(config, name, ("draft_vocab_size",), default=shape.vocab)
    states = whole(config, name, ("num_aux_hidden_states",), default=3) if method == "eagle3" else 2
    inputs = 2 if method == "eagle3" else 1
    return DraftShape(method=method, model=replace(shape, vocab=rows), fused_states=states, attention_inputs=inputs)


def draft_shape(method: str, target: ModelShape, vocab: int | None = None, model: str | None = None) -> DraftShape:
    """The drafter a method uses with `target`: one layer of its widths; EAGLE-3 has a vocabulary of 32,000."""
    if method == "ngram":
        return DraftShape(method=method, model=None)
    if method == "small_model":
        if model is None:
            raise ConfigError("speculation.model is needed with method small_model: a built-in name or a config.json")
        return DraftShape(method=method, model=find_model(model), fused_states=0, attention_inputs=1)
    if model is not None:
        return _own_draft(method, model, vocab)
    layer = ModelShape(
        name=f"{method} of {target.name}",
        layers=1,
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        ffn=_DRAFT_FFN.get(target.name, target.ffn),
        vocab=vocab if vocab is not None else (32000 if method == "eagle3" else target.vocab),
    )
    if method == "mtp":
        return DraftShape(method=method, model=layer, fused_states=2, attention_inputs=1)
    if method != "eagle3":
        raise ConfigError(f"speculation.method must be one of eagle3, mtp, small_model, ngram, got {method!r}")
    return DraftShape(method=method, model=layer)
