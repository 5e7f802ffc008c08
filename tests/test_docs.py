"""What the documents print runs, and what they point to exists."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from tiny_run import RUN

import fp8rl_jax as fp8rl

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "pallas_kernels" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_program_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """As it is printed, with a tiny policy over bytes in place of SmolLM2, and two steps of few
    tokens."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for printed, tried in {
        "range(20)": "range(2)",
        "max_new_tokens=64": "max_new_tokens=6",
    }.items():
        assert program.count(printed) == 1
        program = program.replace(printed, tried)
    named = []

    def load(source: str):
        named.append(source)
        return fp8rl.byte_policy(**RUN["model"]["init"])

    monkeypatch.setattr(fp8rl, "load", load)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(program, "README.md", "exec"), names)
    assert (
        named == ["smollm2-135m"]
        and names["session"].step == 2
        and names["session"].recipe.name == "fp8-rl"
    )
    assert (
        len(names["rollout"].texts) == 8 * len(names["prompts"]) == 32
        and names["rollout"].weight_version == 2
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["0", "1"] and all(
        math.isfinite(float(x)) for row in rows for x in row
    )
    assert 0 < float(rows[1][2]) < 0.1  # FP8 against bfloat16: a mismatch, and a small one
    assert (tmp_path / "out" / "config.json").exists()
    assert [names["reward"](text) for text in ("7 + 5 = 12.", "So 7 + 5 = 13", "12")] == [
        1.0,
        0.0,
        0.0,
    ]


def links(page: Path) -> list[str]:
    """Targets of relative links, without what follows #."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target.split("#")[0] for target in found if not re.match(r"[a-z]+:|#", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_exist(page):
    missing = {target for target in links(page) if not (page.parent / target).exists()}
    assert not missing
    paths = re.findall(
        r"`((?:docs|experiments|fp8rl_jax|pallas_kernels|tests)/[\w./-]+)`", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_links_are_found():
    assert "docs/results.md" in links(ROOT / "README.md") and len(links(ROOT / "README.md")) > 10
