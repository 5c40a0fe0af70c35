"""Recipes: every shipped one parses, and whatever cannot be used gives one clear line."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.config import RECIPES, Config, ModelConfig, list_recipes, load_recipe, to_toml
from muonrl.errors import ConfigError


def differing(one, two):
    """The sections in which two configurations differ; ``run`` always does, by the name of its recipe."""
    names = [f.name for f in dataclasses.fields(Config)]
    return {n for n in names if getattr(one, n) != getattr(two, n)}


def refusal(*overrides, name="tiny", seed=None):
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides, seed)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_named_recipes_are_shipped():
    assert {"tiny", "tiny_adam", "spo_adam", "spo_muon", "spopp_adam"} <= set(list_recipes())


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_parses_and_says_what_it_is(name):
    config = load_recipe(name)
    assert config.run.recipe == name
    assert (RECIPES / f"{name}.toml").read_text().startswith("# ")
    # A threshold that no reply can reach would make the length penalty an empty promise.
    if config.algorithm.length_penalty:
        assert config.algorithm.length_threshold < config.agent.max_new_tokens


@pytest.mark.parametrize("name", list_recipes())
def test_resolved_configuration_round_trips(name, tmp_path):
    config = load_recipe(name, ["optimizer.lr_muon=1.25e-7", 'model.path="a\\"b\\\\ \\u007f é"'], seed=2**40)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_recipe(file) == config
    assert load_recipe(str(file), seed=7) == dataclasses.replace(
        config, run=dataclasses.replace(config.run, seed=7)
    )


def test_the_adam_twin_differs_in_the_optimizer_alone():
    tiny, twin = load_recipe("tiny"), load_recipe("tiny_adam")
    assert differing(tiny, twin) == {"run", "optimizer"}
    assert dataclasses.replace(twin.run, recipe="tiny") == tiny.run
    assert (tiny.optimizer.name, twin.optimizer.name) == ("muon", "adamw")


def test_the_spo_recipes_differ_from_tiny_in_algorithm_and_optimizer_alone():
    tiny = load_recipe("tiny")
    assert differing(tiny, load_recipe("spo_muon")) == {"run", "algorithm"}
    assert differing(load_recipe("spo_muon"), load_recipe("spo_adam")) == {"run", "optimizer"}
    assert load_recipe("spo_adam").optimizer == load_recipe("tiny_adam").optimizer
    assert differing(load_recipe("tiny_adam"), load_recipe("spopp_adam")) == {"run"}


def test_the_paper_s_values_are_the_defaults():
    c = Config()
    a, s = c.algorithm, c.loss
    assert (a.length_threshold, a.length_strength, a.tool_strength, a.penalty_clip) == (2048, 0.5, 0.5, 0.25)
    assert (a.d_half, a.rho_min, a.rho_max, a.sampling_floor) == (0.06, 0.875, 0.96, 0.05)
    assert (s.clip_low, s.clip_high, s.is_mode, s.is_high, s.agg) == (0.2, 0.28, "tis", 2.0, "token_mean")
    assert (c.weights.mode, c.staleness.eta) == ("drain", 1)


def test_overrides_are_toml_values_or_bare_text():
    config = load_recipe(
        "tiny",
        [
            "loss.agg=sequence_mean",
            'tasks.source = "x=y"',
            "model.path=12",
            "optimizer.betas=[0, 0.5]",
            "optimizer.lr_muon=2",
            "grading.cache=false",
            "warmstart.cache_dir=",
            "run.updates=1_0",
            "run.updates=11",
        ],
        seed=5,
    )
    assert config.loss.agg == "sequence_mean" and config.tasks.source == "x=y" and config.model.path == "12"
    assert config.optimizer.betas == (0.0, 0.5) and config.optimizer.lr_muon == 2.0
    assert isinstance(config.optimizer.lr_muon, float) and isinstance(config.optimizer.betas[0], float)
    assert config.grading.cache is False and config.warmstart.cache_dir == ""
    assert (config.run.updates, config.run.seed) == (11, 5)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sandbx.backend=1", ["unknown section 'sandbx'", "did you mean 'sandbox'?", "allowed: run, tasks"]),
        ("sandbox.concurency=3", ["'sandbox.concurency'", "did you mean 'concurrency'?", "allowed: backend"]),
        ("loss.zzz=3", ["unknown key 'loss.zzz'; allowed: clip_low"]),
        ("loss.agg=token_men", ["loss.agg = 'token_men'", "did you mean 'token_mean'?", "sequence_mean"]),
        ("loss.agg=3", ["loss.agg = 3", "allowed: token_mean, sequence_mean"]),
        ("run.updates=0", ["run.updates = 0: must be at least 1"]),
        ("run.updates=1.0", ["run.updates = 1.0: expected a whole number"]),
        ("run.updates=true", ["run.updates = True: expected a whole number"]),
        ("run.seed=-1", ["run.seed = -1: must be at least 0 and at most"]),
        ("grading.cache=1", ["grading.cache = 1: expected true or false"]),
        ("loss.clip_low=nan", ["must be finite"]),
        ("loss.clip_high=1" + "0" * 400, ["too large"]),
        ("loss.clip_high=x", ["loss.clip_high = 'x': expected a number"]),
        ("agent.temperature=0", ["agent.temperature = 0: must be above 0"]),
        ("warmstart.oracle_share=1.5", ["must be at least 0 and at most 1"]),
        ("optimizer.betas=[0.9]", ["expected a list of 2 numbers"]),
        ("optimizer.betas=[0.9, 1]", ["must be at least 0 and at most 0.99999"]),
        ("algorithm.rho_min=0.97", ["algorithm.rho_min = 0.97 is above algorithm.rho_max = 0.96"]),
        ("model.kv_heads=3", ["model.heads = 4 is no multiple of model.kv_heads = 3"]),
        ("model.head_dim=33", ["model.head_dim = 33 must be even"]),
        ("agent.max_new_tokens=512", ["leaves no room"]),
        ("loss.dual_clip=0.5", ["loss.dual_clip = 0.5 must be above 1, or 0 for none"]),
        ("loss.is_low=3", ["loss.is_low = 3.0 is above loss.is_high = 2.0"]),
        ("updates=3", ["expected section.key=value"]),
        ("run.updates", ["expected section.key=value"]),
        ("run.updates=3\nseed=4", ["run.updates"]),
    ],
)
def test_bad_overrides(override, parts):
    text = refusal(override)
    for part in parts:
        assert part in text


def test_bad_seed_and_unknown_recipes():
    assert refusal(seed=-3).startswith("--seed: run.seed = -3: must be")
    text = refusal(name="tinny")
    assert "unknown recipe 'tinny' (did you mean 'tiny'?); allowed:" in text and "spo_adam" in text
    assert "No such file" in refusal(name="/nowhere/x.toml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[run]\nupdates = \n", "not valid TOML: Invalid value (at line 2"),
        ("[run]\nupdats = 3\n", "unknown key 'run.updats' (did you mean 'updates'?)"),
        ("run = 3\n", "run = 3: expected a section [run]"),
        ("seed = 3\n", "unknown section 'seed'"),
        ("extends = 3\n", "extends = 3: expected the name of a recipe"),
        ('extends = "tny"\n', "unknown recipe 'tny' (did you mean 'tiny'?)"),
        ('extends = "./own.toml"\n', "'extends' leads back to itself"),
        ("\xff", "not valid TOML"),
    ],
)
def test_bad_files_are_named(tmp_path, text, part):
    file = tmp_path / "own.toml"
    file.write_bytes(text.encode("latin-1"))
    message = refusal(name=str(file))
    assert part in message
    if "unknown recipe" not in message:
        assert str(file) in message


def test_own_recipe_extends_a_shipped_one_and_a_neighbour(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "tiny_adam"\n[run]\nupdates = 3\n')
    (tmp_path / "b.toml").write_text('extends = "./a.toml"\n[run]\nseed = 9\n[loss]\nis_mode = "none"\n')
    config = load_recipe(tmp_path / "b.toml")
    assert (config.run.recipe, config.run.updates, config.run.seed) == ("b", 3, 9)
    assert (config.optimizer.name, config.loss.is_mode) == ("adamw", "none")
    assert load_recipe(tmp_path / "a.toml").run.recipe == "a"


def test_contradictions_are_refused_wherever_a_configuration_is_made():
    with pytest.raises(ConfigError, match="no multiple"):
        dataclasses.replace(Config(), model=ModelConfig(heads=5))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(), rate=st.floats(0, 1e6), seed=st.integers(0, 2**63 - 1))
def test_any_value_survives_the_round_trip(tmp_path_factory, text, rate, seed):
    base = Config()
    config = dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, seed=seed),
        tasks=dataclasses.replace(base.tasks, source=text),
        optimizer=dataclasses.replace(base.optimizer, lr_muon=rate),
    )
    file = tmp_path_factory.mktemp("c") / "config.toml"
    file.write_bytes(to_toml(config).encode("utf-8"))
    assert load_recipe(file) == config


@pytest.mark.parametrize("section", ["algorithm", "loss", "weights", "staleness"])
def test_the_recipe_page_names_every_field(section):
    page = (RECIPES.parents[1] / "docs" / "recipe.md").read_text(encoding="utf-8")
    for f in dataclasses.fields(getattr(Config(), section)):
        assert f"`{f.name}`" in page or f"`{section}.{f.name}`" in page, (
            f"docs/recipe.md lacks {section}.{f.name}"
        )
