"""The policy's head in the train stage, in native code: logits, the law of given tokens, and gradients.

`leadout.logprob.recompute` uses it in place of PyTorch's operators. Operands of products are bfloat16, as they are
where tokens are drawn; sums, logits and gradients are float32.

Axes: C positions, H policy width, V vocabulary.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor

from leadout.models.native.check import usable_library
from leadout.models.native.library import NativeLibrary

_LANES = 16


class NativeHead:
    """The kernels; nothing is kept from call to call but memory."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._handle = library.functions.lo_output_head_new()
        weakref.finalize(self, library.functions.lo_output_head_free, self._handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself."""
        return self

    @classmethod
    def of(cls, head_VH: Tensor) -> Self | None:
        """For this output matrix, if there are kernels for it."""
        known = head_VH.dtype is torch.float32 and head_VH.device.type == "cpu" and head_VH.shape[1] % _LANES == 0
        library = usable_library() if known else None
        return None if library is None else cls(library)

    def logits(self, hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
        """f32[C, V] = hidden @ head^T of f32 arguments."""
        (rows, size), vocab = hidden_CH.shape, head_VH.shape[0]
        hidden_CH, head_VH = hidden_CH.contiguous(), head_VH.contiguous()
        logits_CV = hidden_CH.new_empty(rows, vocab)
        self._library.follow_threads()
        self._library.functions.lo_output_head_logits(
            self._handle, hidden_CH.data_ptr(), head_VH.data_ptr(), rows, size, vocab, logits_CV.data_ptr()
        )
        return logits_CV

    def law(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of softmax(logits / temperature): log-probabilities of the targets, entropies (nats), log normalizers."""
        rows, vocab = logits_CV.shape
        targets_C = targets_C.contiguous()
        assert targets_C.dtype is torch.int64 and (
            rows == 0 or 0 <= int(targets_C.min()) <= int(targets_C.max()) < vocab
        )
        found = tuple(logits_CV.new_empty(rows) for _ in range(3))
        self._library.follow_threads()
        self._library.functions.lo_output_head_law(
            logits_CV.data_ptr(), rows, vocab, temperature, targets_C.data_ptr(), *(each.data_ptr() for each in found)
        )
        return found[0], found[1], found[2]

    def back(
        self,
        hidden_CH: Tensor,
        head_VH: Tensor,
        logits_CV: Tensor,
        targets_C: Tensor,
        temperature: float,
        log_normalizer_C: Tensor,
        slope_C: Tensor,
        grad_head_VH: Tensor | None,
        *,
        add: bool,
    ) -> Tensor:
        """Gradient of sum(slope * logprob) to the hidden states; `grad_head_VH` is set, or added to."""
        (rows, size), vocab = hidden_CH.shape, head_VH.shape[0]
        hidden_CH, head_VH, targets_C, slope_C, log_normalizer_C = (
            each.contiguous() for each in (hidden_CH, head_VH, targets_C, slope_C, log_normalizer_C)
        )
        grad_CH = torch.empty_like(hidden_CH)
        self._library.follow_threads()
        self._library.functions.lo_output_head_back(
            self._handle,
            hidden_CH.data_ptr(),
            head_VH.data_ptr(),
            logits_CV.data_ptr(),
            rows,
            size,
            vocab,
            temperature,
            targets_C.data_ptr(),
            log_normalizer_C.data_ptr(),
            slope_C.data_ptr(),
            grad_CH.data_ptr(),
            None if grad_head_VH is None else grad_head_VH.data_ptr(),
            int(add),
        )
        return grad_CH
