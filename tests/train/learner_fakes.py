"""Tiny policies, rollouts and learners for the tests of the learner's stages."""

from __future__ import annotations

import types
from collections.abc import Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leadout.logprob.policy_forward import ForwardSettings, PackedForward
from leadout.models.draft_head import DraftHead, policy_shape
from leadout.models.eagle3 import Eagle3Head, Eagle3Spec, initial_head
from leadout.models.mtp import MtpSpec, initial_mtp_head
from leadout.models.spec import DecoderSpec
from leadout.records import Finish, Group, Prompt, Rollout, RolloutId, Rounds, Score, Source, Span
from leadout.refit.publish import weight_update
from leadout.train.cotrain import DraftTrainer
from leadout.train.learner import LearnerSettings, LocalLearner
from leadout.train.loss import LossSettings
from leadout.train.settings import DraftSettings, OptimizerSettings, UpdateSettings
from leadout.train.students import HeadStudent

VOCAB = 50
DRAFT_IDS = torch.arange(0, VOCAB, 2)


def tiny_policy(dtype: torch.dtype = torch.float64, seed: int = 0, tied: bool = True, layers: int = 4):
    """A random Llama whose logits are far from flat; in float64 its norms are float64 too."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    if dtype is torch.float64:
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = types.MethodType(_exact_norm, module)
    return model


def _exact_norm(self, hidden):
    return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def make_rollout(
    prompt: Prompt,
    draw: int,
    sibling: int,
    tokens: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    given: int = 0,
    version: int = 0,
    finish: Finish = Finish.EOS,
) -> Rollout:
    spans = [Span(length=given, source=Source.GIVEN, version=version)] if given else []
    if len(tokens) > given:
        spans.append(Span(length=len(tokens) - given, source=Source.POLICY, version=version))
    values = np.zeros(len(tokens)) if logprobs is None else np.asarray(logprobs, np.float64)
    none = np.zeros(0, np.int16)
    return Rollout(
        request_id=RolloutId(draw, sibling),
        prompt=prompt,
        token_ids=np.asarray(tokens, np.int32),
        logprobs=values,
        policy_logprobs=values,
        spans=tuple(spans),
        rounds=Rounds(drafted=none, accepted=none),
        finish=finish,
    )


def make_group(
    draw: int,
    prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
    rewards: Sequence[float],
    *,
    masked: Sequence[bool] | None = None,
    given: int = 0,
    version: int = 0,
) -> Group:
    prompt = Prompt(id=f"row/{draw}", token_ids=np.asarray(prompt_ids, np.int32), text="")
    rollouts = tuple(
        make_rollout(prompt, draw, sibling, tokens, given=given, version=version)
        for sibling, tokens in enumerate(completions)
    )
    masks = masked or [False] * len(completions)
    scores = tuple(Score(reward=r, parts={"task": r}, text="", masked=m) for r, m in zip(rewards, masks))
    return Group(prompt=prompt, rollouts=rollouts, scores=scores)


def random_groups(lengths: Sequence[Sequence[int]], seed: int = 0, prompt_lengths: Sequence[int] = (5, 3, 7, 1)):
    """Groups of random tokens, one row of completion lengths per group, random rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for draw, row in enumerate(lengths):
        prompt = rng.integers(0, VOCAB, prompt_lengths[draw % len(prompt_lengths)]).tolist()
        completions = [rng.integers(0, VOCAB, length).tolist() for length in row]
        groups.append(make_group(draw, prompt, completions, rng.integers(0, 2, len(row)).astype(float).tolist()))
    return groups


def sampled_groups(model, num_prompts: int, siblings: int, length: int, seed: int = 0, temperature: float = 1.0):
    """Rollouts drawn from the model itself, with their true log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for draw in range(num_prompts):
        prompt_ids = torch.randint(0, VOCAB, (4 + draw % 3,), generator=generator)
        prompt = Prompt(id=f"row/{draw}", token_ids=prompt_ids.numpy().astype(np.int32), text="")
        tokens = prompt_ids.expand(siblings, -1)
        logprobs = []
        with torch.no_grad():
            for _ in range(length):
                log_p = (model(input_ids=tokens).logits[:, -1] / temperature).log_softmax(-1)
                chosen = torch.multinomial(log_p.exp(), 1, generator=generator)
                logprobs.append(log_p.gather(-1, chosen))
                tokens = torch.cat([tokens, chosen], dim=-1)
        values = torch.cat(logprobs, dim=-1).double().numpy()
        rollouts = tuple(
            make_rollout(prompt, draw, i, tokens[i, len(prompt_ids) :].tolist(), logprobs=values[i])
            for i in range(siblings)
        )
        scores = tuple(Score(reward=float(i % 2), parts={}, text="") for i in range(siblings))
        groups.append(Group(prompt=prompt, rollouts=rollouts, scores=scores))
    return groups


KINDS = ("eagle3", "parallel", "mtp")


def tiny_draft_head(
    model, *, reduced: bool = True, seed: int = 0, noise: float = 0.2, kind: str = "eagle3"
) -> DraftHead:
    """A head of any kind; multi-token heads draft from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    head: DraftHead = (
        _mtp_head(model, generator) if kind == "mtp" else _eagle3_head(model, reduced, kind == "parallel", generator)
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return head.to(model.dtype)


def _mtp_head(model, generator: torch.Generator) -> DraftHead:
    shape = policy_shape(DecoderSpec.from_config(model.config.to_dict()))
    spec = MtpSpec(**shape, draft_vocab_size=VOCAB, layer_ids=(len(model.model.layers),))
    return initial_mtp_head(spec, model.state_dict(), generator)


def _eagle3_head(model, reduced: bool, parallel: bool, generator: torch.Generator) -> Eagle3Head:
    spec = Eagle3Spec(
        **policy_shape(DecoderSpec.from_config(model.config.to_dict())),
        draft_vocab_size=len(DRAFT_IDS) if reduced else VOCAB,
        layer_ids=(1, 2, 3),
        mask_token_id=VOCAB - 1 if parallel else None,
    )
    return initial_head(spec, model.state_dict(), generator, token_ids_V=DRAFT_IDS if reduced else None)


def make_forward(model, **settings):
    """Attention in rows, which tiny packs would not take by themselves."""
    defaults = {"temperature": 1.0, "max_completions": 8, "chunk_size": 7, "autocast": False, "layers": "layout"}
    return PackedForward(model, ForwardSettings(**(defaults | settings)))


def learn_by_heart(
    head: DraftHead, forward: PackedForward, rollouts: Sequence[Rollout], settings: DraftSettings, steps: int
) -> None:
    """Train a head on the same rollouts again and again."""
    trainer = DraftTrainer(HeadStudent(head), settings, temperature=1.0, seed=0)
    score = Score(reward=0.0, parts={}, text="")
    groups = [Group(prompt=rollout.prompt, rollouts=(rollout,), scores=(score,)) for rollout in rollouts]
    for _ in range(steps):
        trainer.begin_step(len(groups))
        for batch in forward.pack(groups, [np.zeros(1)] * len(groups)):
            with torch.no_grad():
                output = forward.run(batch, taps=trainer.taps)
            trainer.observe(batch, output, forward)
        trainer.finish_step(forward)


def make_learner(
    model,
    *,
    draft: DraftSettings | None = None,
    head: Eagle3Head | None = None,
    loss: LossSettings | None = None,
    optimizer: OptimizerSettings | None = None,
    update: UpdateSettings | None = None,
    temperature: float = 1.0,
    max_completions: int = 8,
    is_policy_law: bool = True,
    autocast: bool = False,
    **others,
) -> LocalLearner:
    drafter = None
    if draft is not None:
        drafter = DraftTrainer(HeadStudent(head or tiny_draft_head(model)), draft, temperature=temperature, seed=3)
    settings = LearnerSettings(
        loss=loss or LossSettings(max_completion_length=16),
        optimizer=optimizer or OptimizerSettings(learning_rate=1e-3),
        update=update or UpdateSettings(),
        is_policy_law=is_policy_law,
    )
    forward = make_forward(model, temperature=temperature, max_completions=max_completions, autocast=autocast)
    return LocalLearner(forward, weight_update, settings, drafter=drafter, **others)
