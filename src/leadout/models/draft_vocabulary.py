"""Which tokens a small draft vocabulary should hold: those the policy itself is most likely to say.

The policy continues a few prompts by sampling; every position adds its whole distribution, so tokens that were
possible but not drawn count too. On held-out text this covers more than counting drawn tokens does.

Axes: B prompts, P padded prompt length, V policy vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from leadout.models.decoder import FusedDecoder


@torch.inference_mode()
def rank_vocabulary(
    decoder: FusedDecoder,
    prompts: Sequence[npt.NDArray[np.int32]],
    size: int,
    *,
    temperature: float,
    seed: int,
    keep: Sequence[int] = (),
    num_tokens: int = 24,
) -> torch.Tensor:
    """i64[D], ascending: `keep` and the tokens of largest mean probability along sampled continuations.

    Ties, among them tokens that never had any probability, go to the lower id (byte-pair vocabularies list frequent
    pieces first).
    """
    mass_V = torch.zeros(decoder.spec.vocab_size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    longest = max(len(prompt) for prompt in prompts)
    steps = min(num_tokens, decoder.max_len - longest)
    kv = decoder.new_kv(len(prompts))
    slots = kv.allocate(len(prompts))
    counts_B = np.array([len(prompt) for prompt in prompts], np.int64)
    tokens_BP = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, : len(prompt)] = prompt
    hidden_BPH = decoder.forward(torch.from_numpy(tokens_BP).to(decoder.device), kv, slots, (), counts_B).hidden_BNH
    hidden_BH = hidden_BPH[torch.arange(len(prompts)), torch.from_numpy(counts_B - 1)]
    kv.advance(slots, counts_B)
    for step in range(steps):
        probs_BV = (decoder.logits(hidden_BH).float() / max(temperature, 1e-3)).softmax(-1).cpu()
        mass_V += probs_BV.sum(0, dtype=torch.float64)
        if step + 1 < steps:
            drawn_B1 = torch.multinomial(probs_BV, 1, generator=generator)
            hidden_BH = decoder.forward(drawn_B1.to(decoder.device), kv, slots).hidden_BNH[:, 0]
            kv.advance(slots, np.ones(len(prompts), np.int64))
    mass_V[torch.as_tensor(list(keep), dtype=torch.int64)] = torch.inf
    return mass_V.sort(descending=True, stable=True).indices[:size].sort().values
