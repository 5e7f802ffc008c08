"""The page of all keys: complete, and the committed one up to date."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8rl_jax.cli.config import field_docstrings, page
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves

COMMITTED = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_committed_page_is_the_printed_one(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == COMMITTED.read_text(), "run: fp8rl config > docs/config.md"


def test_every_key_stands_on_the_page_once():
    text = page(RunConfig)
    for key, _ in leaves(RunConfig):
        assert text.count(f"**`{key}`**") == 1, key


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
