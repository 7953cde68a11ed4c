"""What a draft folder holds, and whether it fits a policy."""

from __future__ import annotations

from pathlib import Path

import torch

from leadout.build.drafter import count_layers
from leadout.errors import ModelError, about
from leadout.models.draft_head import DraftHead
from leadout.models.eagle3 import Eagle3Head
from leadout.models.head_io import is_head, read_head
from leadout.models.loading import iter_weights, read_spec, resolve
from leadout.models.rope import RopeSpec
from leadout.models.weights import check_tensors, is_finite
from leadout.text import TextCodec

_KINDS = {"eagle3": "EAGLE-3 head", "parallel": "parallel EAGLE-3 head", "mtp": "multi-token head"}


def draft_info(folder: str, model: str | None = None) -> dict[str, str]:
    """Figures by name, of a draft head or of a small model.

    Raises:
        ModelError: naming the tensor, map, layer or tokenizer that is missing or odd, or that does not fit the policy.

    """
    path = Path(folder)
    if path.is_file():
        raise ModelError(f"expected the folder of a drafter, got the file {folder}; name the folder that it lies in")
    if not path.is_dir():
        raise ModelError(f"expected the folder of a drafter, got {folder}, which is not there")
    policy = None if model is None else resolve(model)
    return _head_info(path, policy) if is_head(path) else _model_info(path, policy)


def _head_info(path: Path, policy: Path | None) -> dict[str, str]:
    weights = None if policy is None else dict(iter_weights(policy))
    with about(policy):
        num_layers = None if weights is None else count_layers(weights)
    head = read_head(path, policy=weights, num_layers=num_layers)
    spec = head.spec
    if policy is not None:
        _check_rope(path, spec.rope, read_spec(policy).rope)
    return {
        "kind": f"{_KINDS[head.method]} (method {head.method})",
        "layers": f"states entering {', '.join(map(str, spec.layer_ids))}",
        "hidden size": f"{spec.hidden_size} (policy {spec.target_hidden_size})",
        "heads": f"{spec.num_heads} queries, {spec.num_kv_heads} keys and values, {spec.head_dim} wide",
        "vocabulary": _vocabulary(head),
        "embeddings": "its own" if head.has_embeddings else "the policy's",
        "rope": spec.rope.text,
        **_details(head),
        **_sizes(path, dict(head.named_parameters())),
        "policy": "not compared (--model)" if policy is None else f"fits {policy}",
    }


def _check_rope(path: Path, own: RopeSpec, policy: RopeSpec) -> None:
    if own.text != policy.text:
        raise ModelError(
            f"{path}: expected the policy's rope ({policy.text}), got {own.text}; "
            "correct rope_theta and rope_scaling in its config.json, or train it again"
        )


def _details(head: DraftHead) -> dict[str, str]:
    if not isinstance(head, Eagle3Head):
        return {"drafts": "from the layer used again, by the policy's output matrix"}
    spec = head.spec
    norms = [name for name in ("fc_norm", "norm_before_fc", "norm_before_residual") if getattr(spec, name)]
    drafts = "one after another" if spec.mask_token_id is None else "all in one pass"
    output = "a copy of the policy's, its file has no lm_head.weight" if head.borrows_output else "its own"
    return {"norms": ", ".join(norms) or "none before fc", "output matrix": output, "drafts": drafts}


def _vocabulary(head: DraftHead) -> str:
    ids_V = head.draft_token_ids()
    if ids_V is None:
        return f"all {head.spec.vocab_size} tokens"
    return f"{head.spec.draft_vocab_size} of {head.spec.vocab_size} tokens, ids {int(ids_V.min())}..{int(ids_V.max())}"


def _model_info(path: Path, policy: Path | None) -> dict[str, str]:
    spec, tensors = read_spec(path), dict(iter_weights(path))
    with about(path):
        check_tensors(spec, tensors)
    fits = "not compared (--model)"
    if policy is not None:
        difference = TextCodec.from_pretrained(policy).difference(TextCodec.from_pretrained(path))
        if difference is not None:
            raise ModelError(f"{path}: expected the tokenizer of {policy}, got another ({difference})")
        fits = f"same tokenizer as {policy}"
    return {
        "kind": f"small model of family {spec.family}",
        "layers": str(spec.num_layers),
        "hidden size": str(spec.hidden_size),
        "heads": f"{spec.num_heads} queries, {spec.num_kv_heads} keys and values, {spec.head_dim} wide",
        "vocabulary": f"{spec.vocab_size} tokens",
        "context": f"{spec.max_position_embeddings} tokens",
        "rope": spec.rope.text,
        **_sizes(path, tensors),
        "policy": fits,
    }


def _sizes(path: Path, tensors: dict[str, torch.nn.Parameter] | dict[str, torch.Tensor]) -> dict[str, str]:
    """Number of parameters, and a refusal of tensors that are not numbers."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ModelError(f"{path}: expected finite numbers in {name}, got NaN or infinity; export it again")
    count = sum(tensor.numel() for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return {"parameters": f"{count / 1e6:.2f} million, {', '.join(dtypes)}"}
