"""The examples: their commands are read, their data and rewards work together."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.unused import unused_settings
from fp8rl_jax.tasks.dataset import columns_of, load_splits
from fp8rl_jax.tasks.rewards import build_scorer

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "experiments/examples").glob("*/README.md"))


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_an_example_is_run_by_the_commands_that_it_prints(page):
    commands = re.findall(r"^    fp8rl (\w+) ([^#\n]+?) *(?:#|$)", page.read_text(), re.M)
    assert [name for name, _ in commands] == ["doctor", "eval", "sft", "eval", "train", "eval"]
    file = str(page.with_name("run.toml").relative_to(ROOT))
    for name, words in commands:
        found = [word for word in shlex.split(words) if word != "--rewards"]
        if file in found:
            config = load_config(RunConfig, found, f"fp8rl {name}")
            assert not unused_settings(config)
        else:  # what the run has left
            assert found == [str(config.directory).replace(config.recipe, "fp8-rl")]


def test_digits_are_sorted_and_rewarded():
    task = load_config(RunConfig, ["experiments/examples/sorting/run.toml"], "fp8rl train").task
    train, held_out = load_splits(task)
    assert (len(train), len(held_out)) == (3744, 256)
    score = build_scorer(task, columns=columns_of(train))
    for example in train.examples[:50]:
        assert example.answer == "".join(sorted(example.prompt.removesuffix(">")))
        said = {example.answer: 1.0, example.answer[:3]: 0.3, "": 0.0}
        if len(set(example.answer)) == 1:
            said[example.answer[:3]] = 0.0
        for completion, reward in said.items():
            found = score(example.prompt, completion, example.answer, example.entry)
            assert found == [pytest.approx(reward)]
