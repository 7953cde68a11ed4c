"""Evaluation of a model on a data set, outside any run."""

from __future__ import annotations

from leadout.build.data import load_data, make_scorer, sampling_params
from leadout.build.generator import make_decoder, make_device, make_generator
from leadout.config import Data, Dataset, Grpo, RewardFunction, RolloutSection
from leadout.models.loading import iter_weights, read_spec, resolve
from leadout.pipeline.evaluate import Evaluation
from leadout.text import TextCodec

_MOST_ROWS = 64


def evaluate(
    model: str,
    dataset: Dataset,
    *,
    reward: str,
    num_prompts: int,
    num_generations: int,
    temperature: float,
    max_completion_length: int,
    seed: int = 0,
) -> dict[str, float]:
    """pass@1 and mean@k of a model on a data set, generated plainly."""
    path = resolve(model)
    spec = read_spec(path)
    codec = TextCodec.from_pretrained(path)
    data = load_data(dataset, Data(), codec, seed=seed, context=spec.max_position_embeddings)
    section = RolloutSection(
        temperature=temperature, max_completion_length=max_completion_length, speculative_config=None
    )
    prompts = data.prompts.prompts[:num_prompts]
    max_len = min(spec.max_position_embeddings, data.longest + max_completion_length)
    decoder = make_decoder(
        spec, dict(iter_weights(path)), dtype=section.dtype, max_len=max_len, device=make_device("auto")
    )
    return Evaluation(
        prompts=prompts,
        generator=make_generator(decoder, codec, section, num_rows=min(_MOST_ROWS, len(prompts) * num_generations)),
        scorer=make_scorer((RewardFunction(function=reward),), codec, data.task, section, Grpo()),
        params=sampling_params(section, codec, seed),
        num_generations=num_generations,
    ).run()
