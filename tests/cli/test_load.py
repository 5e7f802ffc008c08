from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

import fp8rl_jax as fp8rl
from fp8rl_jax.cli.load import load_config, parse_arguments
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.recipe import recipe as recipe_like
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import validate
from fp8rl_jax.errors import UserError, for_the_command_line


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    """A rate."""
    layers: tuple[int, ...] = ()
    cap: float | None = None
    floor: float | None = 0.1
    on: bool = True

    def __post_init__(self):
        if self.rate < 0:
            raise UserError("inner.rate: must not be negative\ninner.rate: really")

    def problems(self):
        return ["inner.layers: too many"] if len(self.layers) > 3 else []


@dataclass(frozen=True)
class Root:
    name: str = "a"
    steps: int = 3
    mode: Literal["fast", "slow"] = "fast"
    block: tuple[int, int] | None = None
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=lambda: Inner(rate=0.25))
    args: dict[str, Any] = field(default_factory=dict)


def write(tmp_path, *texts):
    paths = [tmp_path / f"{i}.toml" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def load(*argv, tree=Root):
    return load_config(tree, list(argv), "prog")


def faults(*argv, tree=Root):
    with pytest.raises(UserError) as error:
        load(*argv, tree=tree)
    return str(error.value).splitlines()


def test_a_configuration_made_in_python_is_checked_as_one_that_is_read(tmp_path):
    validate(Root())
    validate(RunConfig())
    crowded = Root(inner=Inner(layers=(1, 2, 3, 4)))
    with pytest.raises(UserError) as error:
        validate(crowded)
    assert (
        str(error.value).splitlines()
        == faults("--inner.layers", "1", "2", "3", "4")
        == ["inner.layers: too many"]
    )
    with pytest.raises(UserError) as error:
        validate(
            dataclasses.replace(
                crowded, mode="quick", steps="3", other=None, inner=Inner(on=1, cap=float("nan"))
            )
        )
    assert str(error.value).splitlines() == [
        "steps: expected an integer, got '3'",
        'mode: expected one of "fast", "slow", got \'quick\'',
        'inner.cap: expected a finite number, or "none", got nan',
        "inner.on: expected a boolean, got 1",
        "other: expected a table, got None",
    ]


def test_without_files_and_flags_the_configuration_is_the_defaults():
    assert load() == Root()
    assert load(tree=RunConfig) == RunConfig()


def test_files_override_in_order_and_flags_override_files(tmp_path):
    files = write(
        tmp_path,
        'name = "b"\nsteps = 4\nargs = {x = 1, y = 2}\n[inner]\nrate = 1\nlayers = [1, 2]',
        "steps = 5\nargs = {z = 3}\n[inner]\non = false\n[other]\ncap = 2",
    )
    config = load(*files, "--other.rate", "0.75", "--block", "1", "128", "--inner.layers", "7")
    assert config == Root(
        name="b",
        steps=5,
        args={"z": 3},
        block=(1, 128),
        inner=Inner(rate=1.0, layers=(7,), on=False),
        other=Inner(rate=0.75, cap=2.0),
    )
    assert type(config.inner.rate) is float


def test_a_table_keeps_the_defaults_of_its_place(tmp_path):
    assert load(*write(tmp_path, "[other]\non = false")).other.rate == 0.25
    optimizer = load(*write(tmp_path, "[sft.optimizer]\nbeta1 = 0.5"), tree=RunConfig).sft.optimizer
    assert optimizer == dataclasses.replace(RunConfig().sft.optimizer, beta1=0.5)


def test_dictionary_entries_are_flags_of_their_own(tmp_path):
    files = write(tmp_path, "args = {max_terms = 2, keep = [1]}")
    flags = [
        "--args.max-terms",
        "3",
        "--args.text",
        "a b",
        "--args.list",
        "1",
        "2",
        "--args.on",
        "--steps=9",
    ]
    config = load(*files, *flags)
    assert config.args == {"max_terms": 3, "keep": [1], "text": "a b", "list": [1, 2], "on": True}
    assert config.steps == 9


def test_values_that_begin_with_a_dash():
    assert load("--name=-x").name == "-x"
    assert load("--args.low", "-2").args == {"low": -2}
    assert load("--other.cap", "-1e-3").other.cap == -1e-3


def test_all_faults_of_files_and_flags_at_once(tmp_path):
    file, later = write(
        tmp_path,
        "nam = 1\nsteps = 1.5\n[iner]\nrate = 1\n[inner]\nratee = 1\nlayers = [1, "
        "true]\n[other]\non = 1\n",
        'rate = 1\nmode = "fats"\nargs = 3\nother = 1\n[inner]\nrate = nan',
    )
    found = faults(
        file,
        later,
        "--inner.rat",
        "1",
        "--steps",
        "x",
        "--mode",
        "no",
        "--inner.on",
        "yes",
        "--name",
    )
    assert found == [
        f"{file}: unknown key nam; did you mean name?",
        f"{file}: steps: expected an integer, got 1.5",
        f"{file}: unknown key iner; did you mean inner?",
        f"{file}: unknown key inner.ratee; did you mean inner.rate?",
        f"{file}: inner.layers: expected a list of integers, got [1, True]",
        f"{file}: other.on: expected a boolean, got 1",
        f"{later}: unknown key rate; did you mean inner.rate or other.rate?",
        f'{later}: mode: expected one of "fast", "slow", got \'fats\'',
        f"{later}: args: expected a table, got 3",
        f"{later}: other: expected a table, got 1",
        f"{later}: inner.rate: expected a finite number, got nan",
        "--inner.rat: unknown flag; did you mean --inner.rate?",
        "--steps: expected an integer, got 'x'",
        '--mode: expected one of "fast", "slow", got \'no\'',
        "--inner.on: expected a boolean, got 'yes'",
        "--name: expected a string, got nothing",
    ]


def test_what_the_dataclasses_refuse_is_reported_with_the_rest(tmp_path):
    file = write(tmp_path, "steps = true\n[inner]\nrate = -1\n[other]\nlayers = [1, 2, 3, 4]")[0]
    assert faults(file) == [
        f"{file}: steps: expected an integer, got True",
        "inner.rate: must not be negative",
        "inner.rate: really",
        "inner.layers: too many",
    ]
    assert faults("--inner.rate", "-1") == [
        "inner.rate: must not be negative",
        "inner.rate: really",
    ]


def test_a_flag_may_repair_what_a_file_leaves_unsound(tmp_path):
    file = write(
        tmp_path, "[inner]\nrate = -1\non = false\n[other]\nlayers = [1, 2, 3, 4]\nrate = 2.0"
    )[0]
    config = load(file, "--inner.rate", "1", "--other.layers", "1")
    assert (config.inner, config.other) == (Inner(rate=1.0, on=False), Inner(rate=2.0, layers=(1,)))
    for flags in (["--steps", "1"], ["--args.x", "1"], ["--other.layers", "1"]):
        assert "inner.rate: must not be negative" in faults(file, *flags)
    assert faults(file, "--steps", "x")[:2] == [
        "--steps: expected an integer, got 'x'",
        "inner.rate: must not be negative",
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_are_finite_on_the_command_line_too(value):
    assert faults("--other.cap", value) == [
        f'--other.cap: expected a finite number, or "none", got {value}'
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"steps = ", "not valid TOML: "),
        (b"steps = 1\nsteps = 2", "not valid TOML: "),
        (b'name = "\xff"', "not valid TOML: "),
    ],
)
def test_broken_files_are_named(tmp_path, text, message):
    (tmp_path / "f.toml").write_bytes(text)
    (line,) = faults(str(tmp_path / "f.toml"))
    assert line.startswith(f"{tmp_path / 'f.toml'}: {message}")


def test_missing_files_and_stray_words_are_named(tmp_path):
    assert faults(str(tmp_path / "f.toml"), str(tmp_path)) == [
        f"{tmp_path / 'f.toml'}: no such file",
        f"{tmp_path}: cannot be read: Is a directory",
    ]
    with for_the_command_line():
        assert faults("train") == ["train: no such file (flags begin with --)"]
    with pytest.raises(UserError) as error:
        fp8rl.evaluate("runs/nope")
    assert str(error.value) == "runs/nope: no such file, and no directory of a run"
    assert faults("--steps", "1", "late.toml") == [
        "--steps: expected an integer, got '1 late.toml'"
    ]


@pytest.mark.parametrize(
    ("words", "value"), [([], True), (["true"], True), (["False"], False), (["auto"], "auto")]
)
def test_a_setting_may_be_a_boolean_or_a_word(tmp_path, words, value):
    (tmp_path / "a.toml").write_text(f"precision.exact = {str(value is not True).lower()}")
    flags = [str(tmp_path / "a.toml"), "--precision.exact", *words, "--seed", "3"]
    config = load_config(RunConfig, flags, "test")
    assert config.precision.exact is value and config.seed == 3
    assert load_config(RunConfig, flags[:1], "test").precision.exact is (value is not True)


def test_switches_are_spelled_alike():
    for flags, on in (
        (["--inner.on"], True),
        (["--inner.on", "true"], True),
        (["--inner.on=false"], False),
        (["--inner.no-on"], False),
        (["--inner.no_on", "--inner.on", "True"], True),
    ):
        assert load(*flags, "--steps", "4") == Root(steps=4, inner=Inner(on=on))
    off = load_config(RunConfig, ["--precision.no-exact", "--model.no-dither"], "test")
    assert (off.precision.exact, off.model.dither) == (False, False)
    assert faults("--inner.no-on", "true") == ["--inner.no-on: takes no value, got 'true'"]
    assert faults("--inner.no-rate") == [
        "--inner.no-rate: unknown flag; did you mean --inner.rate?"
    ]


def test_what_is_neither_is_refused():
    with pytest.raises(UserError, match="one of \"auto\", true, false, got 'maybe'"):
        load_config(RunConfig, ["--precision.exact", "maybe"], "test")


def test_optional_settings_take_none(tmp_path):
    config = load(*write(tmp_path, 'inner = {cap = 1, floor = "none"}'), "--inner.cap", "None")
    assert (config.inner.cap, config.inner.floor) == (None, None)


@pytest.mark.parametrize(
    "config",
    [
        Root(),
        Root(name='a "quoted"\nline\t\\ é', steps=-1, mode="slow", block=(1, 128)),
        Root(args={"a": [1, {"b": 0.5}], "on": False}),
        Root(inner=Inner(rate=1e-30, layers=(1, 2), cap=3.0, floor=None, on=False)),
    ],
)
def test_a_dump_reads_back_equal(config, tmp_path):
    assert load(*write(tmp_path, dump_toml(config))) == config


def test_a_run_configuration_reads_back_equal(tmp_path):
    config = load(
        "--recipe", "fp8-rl", "--task.args.max-terms", "2", "--rl.dual-clip", "3", tree=RunConfig
    )
    assert config != RunConfig()
    assert load(*write(tmp_path, dump_toml(config)), tree=RunConfig) == config


def test_recipes_of_files_add_up_and_flags_change_their_fields(tmp_path):
    files = write(
        tmp_path,
        '[recipes.mine]\nbase = "fp8-rl"\nkv_margin = 1.1\n[recipes.other]\nexact = true',
        'recipe = "mine"\n[recipes.other]\nbase = "mine"\nrollout.weight = {scale = '
        '"power_of_two"}',
    )
    flags = [
        "--recipes.mine.rollout.weight.scale",
        "power_of_two",
        "--recipes.mine.kv-constants",
        "200",
        "200",
        "100",
    ]
    config = load(*files, *flags, tree=RunConfig)
    weight = {"weight": {"scale": "power_of_two"}}
    assert config.recipes == {
        "mine": {
            "base": "fp8-rl",
            "kv_margin": 1.1,
            "kv_constants": [200, 200, 100],
            "rollout": weight,
        },
        "other": {"base": "mine", "rollout": weight},
    }
    recipe = config.resolved_recipe
    changes = {
        "kv_margin": 1.1,
        "kv_constants": (200.0, 200.0, 100.0),
        "rollout.weight": "e4m3-128x128-power_of_two",
    }
    assert recipe == recipe_like("fp8-rl", "mine", **changes)
    assert load(*write(tmp_path, dump_toml(config)), tree=RunConfig) == config
    in_python = dataclasses.replace(RunConfig(), recipe="mine", recipes={"mine": recipe.table()})
    validate(in_python)
    assert in_python.resolved_recipe == recipe
    assert load(*write(tmp_path, dump_toml(in_python)), tree=RunConfig) == in_python


def test_faults_of_recipes_stand_among_the_others(tmp_path):
    file = write(
        tmp_path,
        'recipe = "mine"\nsteps = 1\n[recipes.mine]\nrollout.weight = "e4m3"\nbase = "yours"',
    )[0]
    flags = [
        "--recipes.mine.rollout.weight.block",
        "2",
        "--recipes.mine.exakt",
        "--trainer.steps",
        "0",
    ]
    keys = ["recipes.mine.base", 'recipes.mine.rollout."weight.block"', "recipes.mine.exakt"]
    found = [line.split(": ")[0] for line in faults(file, *flags, tree=RunConfig)]
    assert found == [file, *keys, "trainer.steps must be at least 1"]
    (tmp_path / "flat.toml").write_text("recipes = {mine = 3}")
    assert faults(str(tmp_path / "flat.toml"), tree=RunConfig)[0].endswith(
        "recipes: expected a table of tables, got {'mine': 3}"
    )
    assert faults("--recipes.mine", "3", tree=RunConfig) == [
        "recipes.mine: expected a table, got 3"
    ]


@dataclass(frozen=True)
class Arguments:
    """Flat."""

    model: str
    """Required."""
    max_new_tokens: int = 16


def test_arguments_without_files():
    assert parse_arguments(
        Arguments, ["--model", "m", "--max-new-tokens", "3"], "prog"
    ) == Arguments("m", 3)
    with pytest.raises(UserError) as error:
        parse_arguments(Arguments, ["x", "--max-tokens", "3"], "prog")
    assert str(error.value).splitlines() == [
        "x: not expected here; TOML files stand before the flags",
        "--max-tokens: unknown flag; did you mean --max-new-tokens?",
        "--model: required",
    ]
