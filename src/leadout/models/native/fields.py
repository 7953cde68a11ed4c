"""The C interface of the native kernels: structures as the C++ headers have them, and the functions' arguments."""

from __future__ import annotations

import ctypes

OUTSIDE, RIGHT, NOT_FINITE = 0, 1, 2
"""`Judged` in sampling.hpp."""

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class SpecFields(ctypes.Structure):
    """`Spec` in decoder.hpp."""

    _fields_ = [
        *((name, _int) for name in ("hidden", "layers", "heads", "kv_heads", "dim", "inner", "vocab", "qk_norm")),
        ("eps", ctypes.c_float),
    ]


class BlockFields(ctypes.Structure):
    """`Block` in decoder.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("tokens", "counts", "lengths", "rows")),
        ("batch", _int),
        ("width", _int),
        ("caches", _pointer),
        ("row_stride", _long),
        ("head_stride", _long),
        ("newest", _int),
    ]


class HeadFields(ctypes.Structure):
    """`HeadSpec` in draft_head.hpp."""

    _fields_ = [
        *((name, _int) for name in ("hidden", "heads", "kv_heads", "dim", "inner", "vocab", "target", "num_taps")),
        *((name, _int) for name in ("fc_norm", "norm_before_fc", "norm_before_residual")),
        ("eps", ctypes.c_float),
    ]


class EntryFields(ctypes.Structure):
    """`Entries` in draft_head.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("taps", "features", "embeddings", "counts", "starts", "rows")),
        ("batch", _int),
        ("width", _int),
        ("cache", _pointer),
        ("row_stride", _long),
        ("head_stride", _long),
        ("depth", _long),
    ]


class DraftingFields(ctypes.Structure):
    """`Drafting` in draft_head.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("taps", "tokens", "embedding", "slots", "counts", "starts", "ids")),
        *((name, _pointer) for name in ("temperatures", "uniforms", "cache", "columns", "drafted", "probs")),
        *((name, _long) for name in ("depth", "num_embeddings", "width", "row_stride", "head_stride")),
        ("batch", _int),
        ("drafts", _int),
    ]


class JudgementFields(ctypes.Structure):
    """`Judgement` in sampling.hpp."""

    _fields_ = [
        *((name, _pointer) for name in ("weights", "sums", "totals", "tokens", "counts", "q", "columns", "ids")),
        *((name, _pointer) for name in ("accept", "correct", "draw", "accepted", "next")),
        ("least", ctypes.c_double),
        ("stride", _long),
        ("width", _long),
        *((name, _int) for name in ("blocks", "batch", "drafts", "num_q", "vocab")),
    ]


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "lo_has_kernels": (_int, [_int]),
    "lo_configure": (None, [_int, _int]),
    "lo_decoder_new": (_pointer, [_pointer]),
    "lo_decoder_free": (None, [_pointer]),
    "lo_decoder_layer": (None, [_pointer, _int, *[_pointer] * 12]),
    "lo_decoder_ends": (None, [_pointer, *[_pointer] * 5, _int]),
    "lo_decoder_forward": (None, [_pointer, _pointer, _pointer, _int, _pointer, _pointer]),
    "lo_decoder_logits": (None, [_pointer, _pointer, _int, _long, _pointer]),
    "lo_head_new": (_pointer, [_pointer]),
    "lo_head_free": (None, [_pointer]),
    "lo_head_load": (None, [_pointer, *[_pointer] * 13, _int]),
    "lo_head_run": (None, [_pointer, _pointer, _pointer]),
    "lo_head_logits": (None, [_pointer, _pointer, _int, _long, _pointer]),
    "lo_head_draft": (_int, [_pointer, _pointer]),
    "lo_train_layer_new": (_pointer, [_pointer]),
    "lo_train_layer_free": (None, [_pointer]),
    "lo_train_layer_forward": (None, [_pointer] * 6),
    "lo_train_layer_backward": (None, [_pointer] * 8),
    "lo_output_head_new": (_pointer, []),
    "lo_output_head_free": (None, [_pointer]),
    "lo_output_head_logits": (None, [*[_pointer] * 3, *[_int] * 3, _pointer]),
    "lo_output_head_law": (None, [_pointer, _int, _int, ctypes.c_float, *[_pointer] * 4]),
    "lo_output_head_back": (None, [*[_pointer] * 4, *[_int] * 3, ctypes.c_float, *[_pointer] * 5, _int]),
    "lo_filter": (None, [_pointer, _int, _long, _pointer, _pointer, _pointer, _pointer]),
    "lo_law": (None, [_pointer, _int, _long, _int, _pointer, _int, _pointer, _pointer]),
    "lo_judge": (_int, [_pointer]),
    "lo_logprobs": (_int, [_pointer, _int, _long, *[_pointer] * 3]),
    "lo_copy_rows": (None, [*[_pointer] * 4, _long, _long]),
    "lo_uniforms": (None, [_int, *[_pointer] * 6]),
    "lo_round_uniforms": (None, [*[_int] * 4, *[_pointer] * 5]),
    "lo_draw": (None, [_pointer, _int, _long, _int, _pointer, _pointer, _pointer]),
}
