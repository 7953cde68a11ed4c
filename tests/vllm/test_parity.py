"""A head written here drafts in vLLM as it does here: the same rounds, draft by draft, at temperature 0 in float32."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from leadout.audit.plan import DEFAULT_PROMPTS
from leadout.data.prompts import PromptFormat, make_prompt
from leadout.data.rows import Row, task_rows
from leadout.data.tasks import make_task
from leadout.errors import ModelError
from leadout.models.decoder import FusedDecoder
from leadout.models.draft_head import policy_shape
from leadout.models.eagle3 import Eagle3Head, initial_head
from leadout.models.eagle3_io import read_eagle3, write_eagle3
from leadout.models.eagle3_spec import Eagle3Spec
from leadout.models.loading import load_policy, read_config, resolve
from leadout.models.spec import DecoderSpec
from leadout.records import Prompt, Rollout
from leadout.text import TextCodec
from tests.equivalence.tiny_engines import engine, generate
from tests.vllm import sides
from tests.vllm.sides import Side
from tests.vllm.tiny_heads import FORMS, VOCAB, Form, head_of, policy, teach, write

pytestmark = pytest.mark.vllm

NEW_TOKENS = 24
PRETRAINED_TOKENS = 32
PRETRAINED_PROMPTS = 64
TAUGHT = 24
DRAFT_VOCAB = 1024
CONFIDENCE = 0.99


@pytest.fixture(scope="session")
def python() -> Path:
    """vLLM's interpreter."""
    cache = os.environ.get("LEADOUT_CACHE") or Path.home() / ".cache" / "leadout"
    path = Path(os.environ.get("VLLM_VENV") or Path(cache) / "vllm") / "bin" / "python"
    if not path.is_file():
        pytest.skip(f"needs vLLM in an environment of its own: no {path}; make vllm-env makes it")
    tried = subprocess.run([path, "-I", "-c", "import vllm"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"vLLM cannot be imported in {path}: {(tried.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return path


def decoder(model: Any, max_len: int) -> FusedDecoder:
    fused = FusedDecoder(DecoderSpec.from_config(model.config.to_dict()), dtype=torch.float32, max_len=max_len)
    fused.load(dict(model.named_parameters()))
    return fused


def plain(fused: FusedDecoder, prompts: list[Prompt], new_tokens: int) -> list[Rollout]:
    generator = engine(fused, num_slots=len(prompts), max_len=sides.longest(prompts, new_tokens))
    return list(generate(generator, sides.requests(prompts, new_tokens)).values())


class Tiny:
    """A random policy with its own greedy rollouts."""

    def __init__(self, folder: Path, form: Form) -> None:
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, VOCAB, 1 + i % 13).tolist() for i in range(24)]
        self.prompts = [sides.prompt(each, i) for i, each in enumerate(ids)]
        self.folder = folder
        self.model = policy(folder, rope=form.rope)
        self.fused = decoder(self.model, sides.longest(self.prompts, NEW_TOKENS))
        self.rollouts = plain(self.fused, self.prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def tiny(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Side, dict[str, Any]]]:
    """What either engine did with every form of head."""
    root = tmp_path_factory.mktemp("tiny")
    policies: dict[bool, Tiny] = {}
    ours, jobs = [], []
    for number, form in enumerate(FORMS.values()):
        scaled = form.rope is not None
        if scaled not in policies:
            policies[scaled] = Tiny(root / f"policy-{scaled}", form)
        own = policies[scaled]
        folder = root / f"head-{number}"
        write(form, teach(head_of(form, own.model), own.model, own.rollouts, steps=8), folder, own.model)
        head = read_eagle3(folder, policy=own.model.state_dict(), num_layers=4)
        ours.append(sides.here(own.fused, head, own.prompts, NEW_TOKENS))
        assert ours[-1].tokens == [rollout.token_ids.tolist() for rollout in own.rollouts]
        jobs.append(sides.job(own.folder, folder, own.prompts, NEW_TOKENS, **form.speculation))
    return dict(zip(FORMS, zip(ours, sides.there(python, jobs, root / "vllm"), strict=True), strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_a_head_in_any_form_has_the_same_rounds_in_vllm(tiny, name):
    ours, answer = tiny[name]
    theirs = sides.side_of(answer, NEW_TOKENS)
    assert theirs.tokens == ours.tokens
    assert theirs.rounds == ours.rounds
    assert ours.accepted[0] > 0.2 * ours.num_rounds
    assert ours.accepted[1] > 0


def test_vllms_counters_are_the_sum_of_the_rounds_compared(tiny):
    _, answer = tiny["reduced vocabulary"]
    accepted = [got for row in answer["rows"] for got in row["accepted"]]
    assert answer["counters"]["num_drafts"] == [len(accepted)]
    assert answer["counters"]["num_draft_tokens"] == [sum(sum(row["drafted"]) for row in answer["rows"])]
    assert answer["counters"]["num_accepted_tokens_per_pos"] == [
        sum(got > position for got in accepted) for position in range(sides.DRAFTS)
    ]


def pretrained_prompts(codec: TextCodec) -> list[Prompt]:
    rows = [Row(id=f"audit/{i}", where="", columns={"prompt": text}) for i, text in enumerate(DEFAULT_PROMPTS)]
    rows += task_rows(make_task("arithmetic", {}), PRETRAINED_PROMPTS - len(rows), 5)
    return [make_prompt(row, codec, PromptFormat(answer_key=None)) for row in rows]


def pretrained_head(spec: DecoderSpec, model: Any, rollouts: list[Rollout]) -> Eagle3Head:
    """As the policy's own head starts, with what the rollouts say as its vocabulary, taught some of them."""
    said = sorted({int(token) for rollout in rollouts for token in rollout.token_ids})[:DRAFT_VOCAB]
    rest = [i for i in range(spec.vocab_size) if i not in set(said)]
    ids = torch.tensor(sorted(said + rest[: DRAFT_VOCAB - len(said)]))
    shape = Eagle3Spec(
        **policy_shape(spec),
        draft_vocab_size=DRAFT_VOCAB,
        layer_ids=(2, spec.num_layers // 2, spec.num_layers - 3),
    )
    head = initial_head(shape, model.state_dict(), torch.Generator().manual_seed(0), token_ids_V=ids)
    return teach(head, model, rollouts[-TAUGHT:], steps=1, passes=10, learning_rate=2e-3)


def test_a_head_of_the_pretrained_model_is_accepted_as_often_in_vllm(python, tmp_path, record_property):
    try:
        path = resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"needs the small pretrained model: {error}")
    spec, codec = DecoderSpec.from_config(read_config(path)), TextCodec.from_pretrained(path)
    model = load_policy(path, torch.float32)
    prompts = pretrained_prompts(codec)
    assert len(prompts) == PRETRAINED_PROMPTS
    fused = decoder(model, sides.longest(prompts, PRETRAINED_TOKENS))
    folder = Path(os.environ["LEADOUT_PARITY_HEAD"]) if "LEADOUT_PARITY_HEAD" in os.environ else tmp_path / "head"
    if not folder.exists():
        write_eagle3(pretrained_head(spec, model, plain(fused, prompts, PRETRAINED_TOKENS)), folder)
    head = read_eagle3(folder, policy=model.state_dict(), num_layers=spec.num_layers)
    ours = sides.here(fused, head, prompts, PRETRAINED_TOKENS)
    jobs = [sides.job(path, folder, prompts, PRETRAINED_TOKENS)]
    theirs = sides.side_of(sides.there(python, jobs, tmp_path / "vllm")[0], PRETRAINED_TOKENS)
    record_property("here", str(ours))
    record_property("vLLM", str(theirs))
    same = sum(own == other for own, other in zip(ours.tokens, theirs.tokens, strict=True))
    assert same >= 0.9 * PRETRAINED_PROMPTS, f"only {same} rows have the same tokens"
    assert ours.accepted[0] > 0.05 * ours.num_rounds
    for own, other in zip(ours.accepted, theirs.accepted, strict=True):
        low, high = binom.interval(CONFIDENCE, theirs.num_rounds, own / ours.num_rounds)
        assert low <= other <= high, f"here: {ours}; vllm: {theirs}"
