"""Whatever stands in a file or in flags, the answer is a configuration that reads back equal, or
lines of text; nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import MAX_DEPTH, leaves, tables
from fp8rl_jax.errors import UserError

BOUNDED = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
KEYS = [*(key for key, _ in leaves(RunConfig)), *tables(RunConfig)]
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
SCALARS = (
    st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | TEXT | st.dates() | st.times()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
WORDS = (
    st.sampled_from(
        [
            "none",
            "",
            "-1",
            "1e400",
            "nan",
            "0x10",
            "9" * 5000,
            "[" * 2000,
            "\udcff",
            "=",
            "2",
            "0.5",
        ]
    )
    | TEXT
)
FLAGS = st.tuples(
    st.sampled_from(KEYS), st.sampled_from(["", "x", ".a", ".a-b.c", "=", "=1", "."]), st.booleans()
).map(lambda parts: "--" + (parts[0].replace("_", "-") if parts[2] else parts[0]) + parts[1])


def answer(*argv: str) -> RunConfig | list[str]:
    try:
        config = load_config(RunConfig, list(argv), "fp8rl train")
    except UserError as error:
        lines = str(error).split("\n")
        assert all(line.strip() and line.isprintable() for line in lines), lines
        return lines
    return config


def check_round_trip(config: RunConfig, path) -> None:
    path.write_text(dump_toml(config))
    assert repr(answer(str(path))) == repr(config)  # repr, since a table of the user's may hold nan


def nested(items: list[tuple[str, object]]) -> dict:
    tree: dict = {}
    for key, value in items:
        node, *parents = tree, *key.split(".")[:-1]
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[key.rsplit(".", 1)[-1]] = value
    return tree


@BOUNDED
@given(st.lists(st.tuples(st.sampled_from(KEYS) | TEXT, VALUES), max_size=4))
def test_any_tables(tmp_path, items):
    file = tmp_path / "f.toml"
    file.write_text(tomli_w.dumps(nested(items)))
    found = answer(str(file))
    if isinstance(found, RunConfig):
        check_round_trip(found, file)
    else:
        assert all(str(file) in line or any(key in line for key in KEYS) for line in found)


@settings(BOUNDED, max_examples=25)
@given(st.lists(st.tuples(FLAGS, st.lists(WORDS, max_size=2)), min_size=1, max_size=4))
def test_any_flags(tmp_path, flags):
    found = answer(*(word for flag, words in flags for word in (flag, *words)))
    if isinstance(found, RunConfig):
        check_round_trip(found, tmp_path / "f.toml")


@BOUNDED
@given(st.binary(max_size=40) | st.text("abc.=\"'[]{}#\n1_+-:eTZ x\\", max_size=40).map(str.encode))
@example(b"a = " + b"[" * 100_000)
@example(b"task.args." + b"a." * 3000 + b"b = 1")
@example(b"seed = " + b"9" * 5000)
@example(b"optimizer.learning_rate = " + b"9" * 400)
@example(b"task.args.a = 0x" + b"f" * 5000)
@example(b'"a\\nb" = 1')
@example(b'task.reward.weights = {"\\n" = 1}')
@example(b'[recipes."a\\nb"]\n"c\\nd" = 1\nbase = "e\\nf"')
@example(b"recipes.a.rollout.weight.block = [1, 1e9]\nrecipes.b.base = {}\nrecipes.c = {}")
@example(b"[recipes.a]\nkv_margin = inf\nquantized = 3\nrollout.key = 1979-05-27")
def test_any_bytes(tmp_path, text):
    file = tmp_path / "f.toml"
    file.write_bytes(text)
    found = answer(str(file))
    if isinstance(found, RunConfig):
        check_round_trip(found, file)


@dataclasses.dataclass(frozen=True)
class Deep:
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


def test_depth_and_integers_are_those_that_can_be_written_again(tmp_path):
    file = tmp_path / "f.toml"
    for depth, sound in ((MAX_DEPTH - 2, True), (MAX_DEPTH + 1, False)):
        file.write_text("args." + "a." * depth + "b = 1")
        if sound:
            assert load_config(Deep, [str(file)], "p").args
        else:
            with pytest.raises(UserError, match=f"nested more than {MAX_DEPTH} deep"):
                load_config(Deep, [str(file)], "p")
    for value, sound in ((2**63 - 1, True), (-(2**63), True), (2**63, False)):
        file.write_text(f"seed = {value}")
        if sound:
            assert load_config(Deep, [str(file)], "p").seed == value
        else:
            with pytest.raises(
                UserError, match="seed: expected an integer, got 9223372036854775808"
            ):
                load_config(Deep, [str(file)], "p")


def test_a_word_that_is_no_value_of_a_file_is_text():
    for word in ("9" * 5000, "[" * 2000, "1\nb = 2", str(2**63), "a b"):
        assert load_config(RunConfig, ["--task.args.a", word], "p").task.args == {"a": word}


def test_a_quoted_key_with_dots_is_shown_in_its_quotes(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('"rollout.top_k" = 1')
    assert answer(str(file)) == [
        f'{file}: unknown key "rollout.top_k"; did you mean rollout.top_k?'
    ]
