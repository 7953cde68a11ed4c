"""The policy that generates: one fused decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

It holds the same weights as the learner's transformers model and computes the same function over a key-value cache,
with fewer and larger operations: query, key and value in one product, gate and up in one, residual sums inside the
products, the query heads of one key-value head folded into the query axis. Prefill, plain steps and the verification of
drafts are the same `forward` with blocks of different width. In bfloat16 on a CPU that can, the whole pass is one call
into `leadout.models.native`; what follows here is the path everywhere else.

In float64 the norms and rotary angles are taken in float32 as in transformers, so that the learner's float64
log-probabilities agree to 1e-9.

Axes: B rows, N tokens of the block, X = B x N, H hidden, F concatenated taps, V vocabulary, A query heads,
K key-value heads, G = A / K, M = 2K, C = A + 2K, D head dimension, L context, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from leadout.models.kv import KVSlots
from leadout.models.layer import Layer, load_layer, place
from leadout.models.linear import LogitsHead
from leadout.models.native.check import native_decoder
from leadout.models.native.decoder import NativeDecoder
from leadout.models.spec import DecoderSpec
from leadout.models.states import DecoderStates, keep_newest
from leadout.models.weights import check_tensors, expected_shapes


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a block of tokens sits: computed once, used by every layer."""

    batch: int
    width: int
    context: int
    """Cache positions that some token of the block sees."""
    rows: slice | torch.Tensor
    start: int | None
    """First position if it is the same in every row, and the rows follow one another."""
    rows_B1: torch.Tensor | None
    positions_BN: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None


class FusedDecoder:
    """A decoder over `KVSlots`. Construct, `load` weights, then `forward`; `load` again at every refit."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_len: int,
        native: bool | None = None,
    ) -> None:
        """`native` False keeps to PyTorch operators; None uses the native kernels where they exist (bfloat16, CPU)."""
        spec.check_length(max_len)
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_len = max_len
        self._cos_PD, self._sin_PD = spec.rope.tables(max_len + 1, dtype, self.device)
        self._layers: list[Layer] = []
        eligible = native is not False and dtype is torch.bfloat16 and self.device.type == "cpu"
        self._native = native_decoder(spec, max_len) if eligible else None
        self._positions_P = torch.arange(max_len + 1, device=self.device)

    def new_kv(self, num_slots: int, max_len: int | None = None) -> KVSlots:
        """A cache for this decoder: rows of up to `max_len` tokens, by default as many as it can run."""
        return KVSlots(
            self.spec, num_slots, max_len or self.max_len, self.dtype, self.device, compact=not self.is_native
        )

    @property
    def is_native(self) -> bool:
        """Whether the native kernels run this decoder."""
        return self._native is not None

    @property
    def embedding_VH(self) -> torch.Tensor:
        """The resident input embeddings; drafters without their own read them."""
        return self._embedding

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by Hugging Face name; the head of a tied model is not listed."""
        return expected_shapes(self.spec)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take weights under their Hugging Face names, fuse and pack them; nothing changes unless all are right.

        Raises:
            ModelError: missing, unknown or misshapen tensors, named.

        """
        check_tensors(self.spec, tensors)
        if self._native is not None:
            self._native.load(tensors)
            self._embedding = self._native.embedding
            return
        embedding = place(tensors["model.embed_tokens.weight"], self.dtype, self.device)
        norm = place(tensors["model.norm.weight"], self.dtype, self.device)
        head = LogitsHead(embedding if self.spec.tied else tensors["lm_head.weight"].to(self.device), self.dtype)
        layers = [
            load_layer(self.spec, tensors, index, self.dtype, self.device) for index in range(self.spec.num_layers)
        ]
        self._embedding, self._norm, self._head, self._layers = embedding, norm, head, layers

    def forward(
        self,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...] = (),
        counts_B: npt.NDArray[np.int64] | None = None,
        *,
        newest: bool = False,
    ) -> DecoderStates:
        """Run a block of tokens, i64[B, N], that follows what the slots hold.

        Row b sits at positions ``kv.lengths[slots[b]] + arange(N)``; its keys and values are written there and its
        tokens see their own cache and, causally, their block. Columns at and past ``counts_B[b]`` are padding: any
        valid token id, results meaningless, cache entries overwritten by later tokens. Lengths are not advanced.

        Tap i is the residual stream entering layer i, tap `num_layers` the one entering the final norm. With `newest`
        only the state of each row's last token that is not padding is kept, [B, 1, H]; that of rows without any means
        nothing.

        Raises:
            CapacityError: tokens that are not padding would fall past the end of a slot.

        """
        assert all(0 <= tap <= self.spec.num_layers for tap in taps), "taps name layers 0..num_layers"
        if self._native is not None:
            # Outside `no_grad`, whose switching costs a tenth of a millisecond when caches are cold.
            return self._forward_native(self._native, tokens_BN, kv, slots, taps, counts_B, newest)
        states = self._forward_pytorch(tokens_BN, kv, slots, taps, counts_B)
        return keep_newest(states, counts_B) if newest else states

    @torch.no_grad()
    def _forward_pytorch(
        self,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...],
        counts_B: npt.NDArray[np.int64] | None,
    ) -> DecoderStates:
        block = self._block(tokens_BN, kv, slots, counts_B)
        hidden_XH = F.embedding(tokens_BN.reshape(-1), self._embedding)
        tapped: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped[index] = hidden_XH
            hidden_XH = self._attention(layer, index, hidden_XH, kv, block)
            hidden_XH = self._mlp(layer, hidden_XH)
        tapped[self.spec.num_layers] = hidden_XH
        shape = (block.batch, block.width, -1)
        taps_BNF = torch.cat([tapped[index] for index in taps], dim=-1).view(shape) if taps else None
        return DecoderStates(hidden_BNH=self._rms_norm(hidden_XH, self._norm).view(shape), taps_BNF=taps_BNF)

    def _forward_native(
        self,
        native: NativeDecoder,
        tokens_BN: torch.Tensor,
        kv: KVSlots,
        slots: Sequence[int],
        taps: tuple[int, ...],
        counts_B: npt.NDArray[np.int64] | None,
        newest: bool,
    ) -> DecoderStates:
        batch, width = tokens_BN.shape
        assert batch == len(slots) and kv.max_len <= self.max_len and kv.dtype is self.dtype
        own_writes = type(kv).write_block is not KVSlots.write_block or type(kv).write_at is not KVSlots.write_at
        assert not own_writes, "a cache with writes of its own needs a decoder made with native=False"
        lengths_B = kv.lengths[list(slots)]
        counts_B = np.full(batch, width, np.int64) if counts_B is None else np.ascontiguousarray(counts_B, np.int64)
        kv.check_fits(lengths_B + counts_B)
        hidden_BNH, taps_BNF = native.forward(
            tokens_BN, kv.addresses, kv.strides, kv.rows_array(slots), lengths_B, counts_B, taps, newest
        )
        states = DecoderStates(hidden_BNH=hidden_BNH, taps_BNF=taps_BNF)
        return keep_newest(states, counts_B) if newest and hidden_BNH.shape[1] > 1 else states

    def logits(self, hidden_XH: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states taken after the final norm: [X, H] -> f32[X, V] (f64 in float64)."""
        if self._native is not None:
            return self._native.logits(hidden_XH)
        with torch.no_grad():
            return self._head(hidden_XH)

    @torch.no_grad()
    def prefill(
        self, tokens_P: torch.Tensor, kv: KVSlots, slot: int, taps: tuple[int, ...] = (), chunk: int = 512
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a prompt, i64[P], into one slot and advance it, `chunk` tokens at a time to bound memory.

        Returns the last token's hidden state, [1, H], and all tapped states, [P, F] (None without taps).
        """
        assert len(tokens_P) > 0, "an empty prompt has no last state"
        parts: list[torch.Tensor] = []
        last_1H = torch.empty(0)
        for piece_N in torch.split(tokens_P, chunk):
            states = self.forward(piece_N[None], kv, [slot], taps, newest=True)
            kv.advance([slot], np.array([len(piece_N)], np.int64))
            last_1H = states.hidden_BNH[0]
            if states.taps_BNF is not None:
                parts.append(states.taps_BNF[0])
        return last_1H, torch.cat(parts) if parts else None

    def _block(
        self, tokens_BN: torch.Tensor, kv: KVSlots, slots: Sequence[int], counts_B: npt.NDArray[np.int64] | None
    ) -> _Block:
        assert self._layers, "load weights before the first forward"
        batch, width = tokens_BN.shape
        assert batch == len(slots) and kv.max_len <= self.max_len
        lengths_B = kv.lengths[list(slots)]
        kv.check_fits(lengths_B + (width if counts_B is None else counts_B))
        rows = kv.rows(slots)
        first = int(lengths_B[0])
        context = min(int(lengths_B.max()) + width, kv.max_len)
        uniform = isinstance(rows, slice) and bool((lengths_B == first).all()) and first + width <= kv.max_len
        if uniform:
            positions_P = self._positions_P[first : first + width]
            cos, sin = self._cos_PD[first : first + width, None], self._sin_PD[first : first + width, None]
            mask = None if width == 1 else self._mask(positions_P[None], context)
            return _Block(batch, width, context, rows, first, None, None, cos, sin, mask)
        starts_B1 = torch.from_numpy(lengths_B)[:, None].to(self.device)
        positions_BN = (starts_B1 + self._positions_P[:width]).clamp_(max=kv.trash)
        cos, sin = self._cos_PD[positions_BN][:, :, None], self._sin_PD[positions_BN][:, :, None]
        mask = self._mask(positions_BN, context)
        rows_B = self._positions_P.new_tensor(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows
        return _Block(batch, width, context, rows, None, rows_B[:, None], positions_BN, cos, sin, mask)

    def _mask(self, positions_BN: torch.Tensor, context: int) -> torch.Tensor:
        """Additive causal mask, [B, 1, G x N, L], heads of a group one after another."""
        hidden_BNL = self._positions_P[:context] > positions_BN[..., None]
        mask_BNL = torch.zeros(hidden_BNL.shape, dtype=self.dtype, device=self.device)
        mask_BNL.masked_fill_(hidden_BNL, float("-inf"))
        if positions_BN.shape[1] == 1:
            return mask_BNL[:, None]
        return mask_BNL.repeat(1, self.spec.group_size, 1)[:, None]

    def _attention(self, layer: Layer, index: int, hidden_XH: torch.Tensor, kv: KVSlots, block: _Block) -> torch.Tensor:
        spec, batch, width = self.spec, block.batch, block.width
        num_rotated = spec.num_heads + spec.num_kv_heads
        qkv_XO = layer.qkv(self._rms_norm(hidden_XH, layer.input_norm))
        qkv_BNCD = qkv_XO.view(batch, width, -1, spec.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = qkv_BNCD[:, :, : spec.num_heads], qkv_BNCD[:, :, spec.num_heads : num_rotated]
            query.copy_(self._rms_norm(query, layer.query_norm))
            key.copy_(self._rms_norm(key, layer.key_norm))
        rotated = qkv_BNCD[:, :, :num_rotated]
        half = spec.head_dim // 2
        turned = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
        rotated.mul_(block.cos).addcmul_(turned, block.sin)

        fresh_BNMD = qkv_BNCD[:, :, spec.num_heads :]
        if block.start is not None and isinstance(block.rows, slice):
            kv.write_block(index, block.rows, block.start, fresh_BNMD)
        else:
            assert block.rows_B1 is not None and block.positions_BN is not None
            kv.write_at(index, block.rows_B1, block.positions_BN, fresh_BNMD)
        keys, values = kv.read(index, block.rows, block.context)

        groups = (batch, width, spec.num_kv_heads, spec.group_size, spec.head_dim)
        query_BNKGD = qkv_BNCD[:, :, : spec.num_heads].view(groups)
        folded = (batch, spec.num_kv_heads, spec.group_size * width, spec.head_dim)
        query = query_BNKGD.permute(0, 2, 3, 1, 4).reshape(folded)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=block.mask)
        unfolded = (batch, spec.num_kv_heads, spec.group_size, width, spec.head_dim)
        mixed_XI = mixed.view(unfolded).permute(0, 3, 1, 2, 4).reshape(batch * width, -1)
        return layer.output.add_to(hidden_XH, mixed_XI)

    def _mlp(self, layer: Layer, hidden_XH: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._rms_norm(hidden_XH, layer.post_norm))
        size = self.spec.intermediate_size
        active = F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
        return layer.down.add_to(hidden_XH, active)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last axis (arXiv 1910.07467), in float32 inside."""
        if x.dtype is torch.float64:
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
            return weight * wide.to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_norm_eps)
