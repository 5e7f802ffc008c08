"""The page of all keys: complete, and the committed one up to date."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8rl_jax.cli.config import examples, field_docstrings, page
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.files import dump_toml, read_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves, tables

COMMITTED = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_committed_page_is_the_printed_one(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == COMMITTED.read_text(), "run: fp8rl config > docs/config.md"


def test_every_key_stands_on_the_page_once():
    text = page(RunConfig)
    for key, _ in leaves(RunConfig):
        assert text.count(f"**`{key}`**") == 1, key


def test_the_page_loses_no_word_and_its_tables_have_four_columns():
    """Of a key with a long meaning the first sentence is in the table, and the rest below it."""
    text = page(RunConfig)
    rows = [line for line in text.splitlines() if line.startswith("| **`")]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert max(map(len, rows)) < 3 * 240
    words, shown = 0, {}
    for row in rows:
        key, *_, meaning = re.split(r" (?<!\\)\| ", row.strip("| "))
        shown[key.strip("*`")] = meaning.replace(r"\|", "|")
    below = dict(re.findall(r"^- `([\w.]+)`: (.*)$", text, re.M))
    for key, _ in leaves(RunConfig):
        *tables, name = key.split(".")
        node = functools.reduce(getattr, tables, RunConfig())
        whole = shown[key].replace("(More below.)", below.get(key, "")).strip()
        assert whole == field_docstrings(type(node))[name], key
        words += len(whole.split())
    assert words > 5000 and len(below) > 20


def test_every_table_has_an_example_that_is_accepted():
    """Each alone, over a run that all of them suit, and with values that are not the defaults."""
    run = {
        "recipe": "fp8-e2e",
        "task": {"kind": "jsonl", "name": "rows.jsonl"},
        "rollout": {"max_new_tokens": 512},
        "trainer": {"updates_per_rollout": 2},
    }
    plain = dump_toml(read_config(RunConfig, run))
    found = examples()
    assert [name for name in found if not name.startswith("recipes.")] == ["", *tables(RunConfig)]
    for name, text in found.items():
        values = tomllib.loads(text)
        assert dump_toml(read_config(RunConfig, run, values)) != plain, name
    row = "\n".join(text for name, text in found.items() if name.startswith("recipes."))
    mine = read_config(RunConfig, tomllib.loads(row), {"recipe": "my-fp8"}).resolved_recipe
    assert mine.kv_margin == 1.1 and mine.rollout.weight.scale == "power_of_two"


@dataclass(frozen=True)
class Silent:
    """A table."""

    said: int = 1
    """What it
    means."""
    unsaid: int = 2


def test_a_key_without_a_docstring_is_refused():
    with pytest.raises(ValueError, match="Silent: no docstring under unsaid"):
        field_docstrings(Silent)
