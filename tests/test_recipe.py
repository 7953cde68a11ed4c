from __future__ import annotations

from pathlib import Path

import pytest

from leadout.config import RunConfig
from leadout.errors import ConfigError
from leadout.recipe import dump, load_recipe, parse

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    config = load_recipe(write(tmp_path, "seed: 7\nrollout: {num_prompts: 3}\n"))
    assert (config.seed, config.rollout.num_prompts) == (7, 3)
    assert config.rollout.num_generations == RunConfig().rollout.num_generations


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "# nothing\n")) == RunConfig()


def test_overrides_win_in_the_order_given(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout: {num_prompts: 3}")
    config = load_recipe(path, ["rollout.num_prompts=5", "pipeline.max_steps=2", "rollout.num_prompts=6"])
    assert (config.rollout.num_prompts, config.pipeline.max_steps) == (6, 2)


@pytest.mark.parametrize(
    ("override", "value"),
    [("optim.learning_rate=2e-5", 2e-5), ("optim.learning_rate=3E+0", 3.0), ("optim.learning_rate=1", 1.0)],
)
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, override: str, value: float) -> None:
    assert load_recipe(write(tmp_path, ""), [override]).optim.learning_rate == value


def test_an_exponent_is_a_number_where_text_would_do_too(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "data: {train: {task: t, task_args: {a: 1e-3}}}")).data.train.task_args == {
        "a": 0.001
    }


def test_override_values_are_yaml(tmp_path: Path) -> None:
    overrides = ["rollout.speculative_config=null", "rollout.stop=['a', \"\\n\"]", "data.shuffle=no", "log.to=[]"]
    config = load_recipe(write(tmp_path, ""), overrides)
    assert config.rollout.speculative_config is None
    assert config.rollout.stop == ("a", "\n")
    assert config.data.shuffle is False
    assert config.log.to == ()


def test_an_override_may_open_a_section_that_the_recipe_closed(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout: {speculative_config: null}")
    speculation = load_recipe(path, ["rollout.speculative_config.method=ngram"]).rollout.speculative_config
    assert speculation is not None
    assert speculation.method == "ngram"


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=3", ".seed=1"])
def test_what_is_no_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected an override like pipeline\.max_steps=5"):
        load_recipe(write(tmp_path, ""), [override])


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        load_recipe(write(tmp_path, "seed: 1"), ["seed.x=2"])


def test_an_override_that_is_not_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, ""), ["seed=[1"])
    assert "the value is not YAML" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not YAML"),
        ("- 1\n- 2\n", "expected keys and values, got list"),
        ("seed: 1\nseed: 2\n", "key 'seed' is given twice"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe .*gone\.yaml"):
        load_recipe(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rollout": {"num_generation": 8}}, "unknown key rollout.num_generation; nearest: rollout.num_generations"),
        ({"rollouts": {"num_prompts": 8}}, "unknown key rollouts; nearest: rollout"),
        ({"temprature": 1.0}, "unknown key temprature; nearest: rollout.temperature"),
        ({"learning_rate": 1.0}, "unknown key learning_rate; nearest: draft.learning_rate or optim.learning_rate"),
        ({"reward": [{"func": "task"}]}, "unknown key reward.func; nearest: reward.function"),
        (
            {"rollout": {"speculative_config": {"leadout": {"max_draft_len": 3}}}},
            "unknown key rollout.speculative_config.leadout.max_draft_len; "
            "nearest: rollout.speculative_config.leadout.max_draft_length",
        ),
        ({"pipeline": {"zzz": 1}}, "unknown key pipeline.zzz; known here: mode, max_staleness, max_steps"),
    ],
)
def test_an_unknown_key_names_the_nearest(tree: dict[str, object], message: str) -> None:
    assert complaint(tree) == message


@pytest.mark.parametrize(
    ("tree", "ours"),
    [
        ({"rollout": {"n": 8}}, "rollout.num_generations"),
        ({"actor_rollout_ref": {"rollout": {"n": 8, "name": "vllm"}}}, "rollout.num_generations"),
        ({"grpo": {"num_generations_per_prompt": 8}}, "rollout.num_generations"),
        ({"per_device_train_batch_size": 8}, "train.micro_batch_size (with rollout.num_prompts prompts a step)"),
        ({"rollout": {"max_new_tokens": 8}}, "rollout.max_completion_length"),
        ({"grpo": {"clip_ratio_high": 0.3}}, "grpo.epsilon_high"),
        ({"actor": {"kl_loss_coef": 0.1}}, "grpo.beta"),
        ({"draft": {"model_name": "x"}}, "rollout.speculative_config.model"),
        ({"rollout": {"speculative_num_steps": 3}}, "rollout.speculative_config.num_speculative_tokens"),
        ({"optim": {"lr": 1.0}}, "optim.learning_rate"),
        ({"num_prompts_per_step": 8}, "rollout.num_prompts"),
    ],
)
def test_a_key_of_another_framework_names_ours(tree: dict[str, object], ours: str) -> None:
    message = complaint(tree)
    assert message.endswith(f" is another framework's name; use {ours}")


def test_prompts_per_step_is_accepted_as_an_alias() -> None:
    assert parse({"rollout": {"num_prompts_per_step": 5}}).rollout.num_prompts == 5


def test_an_alias_beside_its_own_name_is_refused() -> None:
    message = complaint({"rollout": {"num_prompts": 4, "num_prompts_per_step": 5}})
    assert message == "rollout.num_prompts_per_step and rollout.num_prompts are the same setting; give one of them"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rollout": {"num_prompts": "many"}}, "rollout.num_prompts: expected an integer, got 'many'"),
        ({"rollout": {"num_prompts": 0}}, "rollout.num_prompts: expected >= 1, got 0"),
        ({"rollout": {"num_prompts": 2.5}}, "rollout.num_prompts: expected an integer, got 2.5"),
        ({"optim": {"learning_rate": "fast"}}, "optim.learning_rate: expected a number, got 'fast'"),
        ({"optim": None}, "optim: expected a section with keys, got None"),
        ({"draft": {"enabled": "maybe"}}, "draft.enabled: expected true or false or 'auto', got 'maybe'"),
        (
            {"rollout": {"speculative_config": {"num_speculative_tokens": "lots"}}},
            "rollout.speculative_config.num_speculative_tokens: expected an integer or 'auto', got 'lots'",
        ),
        (
            {"rollout": {"speculative_config": {"rejection_sample_method": "strict"}}},
            "rollout.speculative_config.rejection_sample_method: expected 'standard', got 'strict'",
        ),
        ({"reward": "task"}, "reward: expected a list, got 'task'"),
        (
            {"data": {"train": {"task": "arithmetic", "path": "x.jsonl"}}},
            "data.train: expected exactly one of task, path, hub; got task, path",
        ),
        (
            {"rollout": {"temperature": 0}},
            "rollout.temperature must be > 0 for training (greedy rollouts carry no signal), got 0",
        ),
    ],
)
def test_a_wrong_value_names_key_expectation_and_value(tree: dict[str, object], message: str) -> None:
    assert complaint(tree) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {learning_rate: .inf}", "optim.learning_rate: expected a finite number, got inf"),
        ("rollout: {temperature: .nan}", "rollout.temperature: expected a finite number, got nan"),
        ("reward: [{function: exact, weight: .nan}]", "reward.0.weight: expected a finite number, got nan"),
        ("optim: {betas: [0.9, 1.0]}", "optim.betas.1: expected < 1.0, got 1.0"),
        ("optim: {betas: [-0.1, 0.9]}", "optim.betas.0: expected >= 0.0, got -0.1"),
        ("optim: {betas: [true, 0.9]}", "optim.betas: expected a number, got [True, 0.9]"),
        ("rollout: {stop: ['a', '']}", "rollout.stop.1: expected text that is not empty, got ''"),
        ("seed: 9223372036854775808", f"seed: expected < {2**63}, got {2**63}"),
        ("seed: true", "seed: expected an integer, got True"),
        ("data: {train: {task: t, num_rows: true}}", "data.train.num_rows: expected an integer, got True"),
        ("grpo: {beta: false}", "grpo.beta: expected a number, got False"),
        (
            "rollout: {speculative_config: {num_speculative_tokens: true}}",
            "rollout.speculative_config.num_speculative_tokens: expected an integer, got True",
        ),
        ("threads: 1025", "threads: expected <= 1024, got 1025"),
        (
            "rollout: {num_prompts: 100000, num_generations: 11}",
            "rollout: expected num_prompts * num_generations <= 1,000,000 completions a step, got 1,100,000",
        ),
        ("eval: {every: 5}", "eval.every: 5 needs data.eval, the rows to evaluate on; got none"),
        (
            "rollout: {speculative_config: {method: ngram, model: x}}",
            "rollout.speculative_config: method ngram drafts without a model, got model x; remove `model`",
        ),
        (
            "rollout: {speculative_config: {method: history, model: x}}",
            "rollout.speculative_config: method history drafts without a model, got model x; remove `model`",
        ),
    ],
)
def test_values_that_no_run_can_take_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", "..", ".", "", "a\nb"])
def test_a_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    message = complaint({"name": name})
    assert message == f"name: expected the name of a folder under output_dir, without / or .., got {name!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [a, b]\n: 1", "expected plain text as a key, got a sequence"),
        ("? {a: b}\n: 1", "expected plain text as a key, got a mapping"),
        ("rollout: &x {stop: [*x]}", "an anchor (&name) holds itself (*name)"),
        ("reward: " + "[" * 3000 + "]" * 3000, "values are nested too deeply"),
        ("seed: " + "7" * 5000, "not YAML"),
        ('model: "\\ud800"', "text holds half of a character (a lone surrogate)"),
        ("name: 2026-99-99", "not YAML"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            "expected at most 100,000 values, got more; anchors may repeat each other",
        ),
    ],
)
def test_yaml_that_no_recipe_needs_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_merged_keys_are_brought_in_and_may_be_overridden(tmp_path: Path) -> None:
    text = """
data:
  train: &rows {task: arithmetic, num_rows: 7, split: a}
  eval: {<<: *rows, num_rows: 3}
"""
    config = load_recipe(write(tmp_path, text))
    assert config.data.eval is not None
    assert (config.data.eval.task, config.data.eval.num_rows, config.data.eval.split) == ("arithmetic", 3, "a")
    assert config.data.train.num_rows == 7


def test_a_key_given_twice_beside_merged_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key 'task' is given twice"):
        load_recipe(write(tmp_path, "data: {train: &a {task: t}, eval: {<<: *a, task: u, task: v}}"))


def test_further_wrong_keys_are_counted() -> None:
    message = complaint({"rollout": {"num_prompts": 0, "top_p": 2}, "seed": -1})
    assert message == "seed: expected >= 0, got -1 (and 2 more wrong keys)"


def test_zero_draft_tokens_are_the_accepted_way_to_say_off() -> None:
    speculation = parse({"rollout": {"speculative_config": {"num_speculative_tokens": 0}}}).rollout.speculative_config
    assert speculation is not None
    assert speculation.num_speculative_tokens == 0


def test_a_dumped_configuration_loads_back_equal(tmp_path: Path) -> None:
    overrides = [
        "data.train={path: a/b.jsonl, answer_key: null}",
        "data.system_prompt='Be ☃ brief: yes'",
        "rollout.stop=[\"\\n\\n\", 'é']",
        "draft.layer_ids=[2, 5, 7]",
        "optim.learning_rate=2e-5",
        "rollout.speculative_config.leadout.cost_profile=profile.json",
    ]
    config = load_recipe(write(tmp_path, "seed: 3"), overrides)
    assert load_recipe(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_shipped_recipes_load_and_survive_a_round_trip(tmp_path: Path, path: Path) -> None:
    config = load_recipe(path)
    assert load_recipe(write(tmp_path, dump(config))) == config


def test_the_demo_recipe_is_the_one_described() -> None:
    config = load_recipe(next(path for path in RECIPES if path.stem == "demo"))
    assert (config.rollout.num_prompts, config.rollout.num_generations) == (4, 8)
    assert config.rollout.max_completion_length == 24
    assert config.optim.learning_rate == 2e-5
    assert config.trains_drafter
