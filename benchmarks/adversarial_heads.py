"""Draft heads that are as bad as can be, for auditing the engine with them.

    python -m benchmarks.adversarial_heads --out runs/adversarial
    leadout audit --method eagle3 --draft runs/adversarial/wrong --k 1

`random` has random weights and drafts from the 4,096 first tokens. The others can draft a single token: `wrong` one
that the policy (nearly) never says, `same` one that it says often, `eos` the end of the text. They are the drafts of a
head that is right about nothing, of one that is stuck, and of one that would end every row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from leadout.build.drafter import default_layers
from leadout.models.draft_head import policy_shape
from leadout.models.eagle3 import Eagle3Spec, initial_head
from leadout.models.eagle3_io import write_eagle3
from leadout.models.loading import iter_weights, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.text import TextCodec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("runs/adversarial"))
    options = parser.parse_args()
    path = resolve(options.model)
    codec, policy = TextCodec.from_pretrained(path), dict(iter_weights(path))
    spec = DecoderSpec.from_config(read_config(path))
    ids = {
        "random": list(range(min(4096, spec.vocab_size - 1))),
        "wrong": [spec.vocab_size - 1],
        "same": [int(codec.encode(" the")[0])],
        "eos": [codec.eos_token_ids[0]],
    }
    for name, own in ids.items():
        shape = Eagle3Spec(**policy_shape(spec), draft_vocab_size=len(own), layer_ids=default_layers(spec.num_layers))
        generator = torch.Generator().manual_seed(0)
        head = initial_head(shape, policy, generator, token_ids_V=torch.tensor(own), init="random")
        write_eagle3(head, options.out / name)
        always = f"{codec.decode(own, special=True)!r} always" if len(own) == 1 else f"any of {len(own)} tokens"
        print(f"{options.out / name}: drafts {always}")


if __name__ == "__main__":
    main()
