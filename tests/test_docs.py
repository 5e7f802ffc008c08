"""What the documents print runs, and what they point to exists. `make docs` makes the site of them,
with Sphinx, which these tests do without."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from tiny_run import RUN

import fp8rl_jax as fp8rl
from experiments import coming_from
from experiments.documents import (
    MODEL,
    Page,
    as_run,
    elsewhere,
    faults,
    furnish,
    read_page,
    to_run,
)
from experiments.notebooks import RECORD
from fp8rl_jax.cli.load import load_config, parse_arguments
from fp8rl_jax.cli.main import COMMANDS, main
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.training import runs

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "index.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "pallas_kernels" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
GUIDES = ROOT / "docs" / "guides"
SOURCES = ("fp8rl_jax", "pallas_kernels", "experiments", "tests")


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


@cache
def text_of(page: Path) -> str:
    """A page, or what a notebook says."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    return text


def links(page: Path) -> list[tuple[str, str]]:
    """Relative links: (file, what follows #); the file is empty where it is the page itself."""
    found = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    targets = [target.partition("#") for target in found if not re.match(r"[a-z]+:", target)]
    return [(file, anchor) for file, _, anchor in targets]


@cache
def anchors(page: Path) -> set[str]:
    """What may stand behind # of a page: its headings, as GitHub and MyST name them."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose, re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize(
    "page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_and_paths_exist(page):
    missing = {file for file, _ in links(page) if not (page.parent / file).exists()}
    assert not missing
    lost = {
        (file, anchor)
        for file, anchor in links(page)
        if anchor and anchor not in anchors((page.parent / file).resolve() if file else page)
    }
    assert not lost
    paths = re.findall(
        r"`((?:docs|experiments|fp8rl_jax|pallas_kernels|tests)/[\w./-]+)`", text_of(page)
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


NAMING = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]
"""Pages that say where in the code something is."""


@cache
def words_of(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_names_of_the_code_that_a_page_has_are_in_the_code(page):
    """Each somewhere, and "`NAME` of `path/to/file.py`" in that file."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    known = set().union(*map(words_of, files))
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`", text)
    names = [name for name in names if not name.endswith((".py", ".toml", ".md"))]
    assert len(names) > 30
    assert [name for name in names if not known.issuperset(name.split("."))] == []
    placed = re.findall(r"`([\w.]+)` (?:of|in|\()\s?`([\w/]+\.py)`", " ".join(text.split()))
    assert len(placed) > 4
    for name, file in placed:
        path = next(x for x in (ROOT / file, ROOT / "fp8rl_jax" / file) if x.exists())
        assert name.rpartition(".")[2] in words_of(path), f"{name} is not in {file}"


def test_links_and_anchors_are_found():
    found = links(ROOT / "README.md")
    assert ("docs/results.md", "") in found and len(found) > 10
    assert "on-one-h200-after-the-kernels-were-rewritten" in anchors(ROOT / "docs" / "results.md")


def test_the_index_has_every_page_and_notebook_once():
    """docs/conf.py makes the site's contents of these lists."""
    listed = [
        (INDEX.parent / file).resolve()
        for line in INDEX.read_text().splitlines()
        if line.startswith("- ")
        for file, _ in re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", line)[:1]
    ]
    assert sorted(listed) == sorted({*PAGES, *NOTEBOOKS} - {INDEX})


def test_the_guide_for_other_projects_is_what_its_table_says():
    page = (GUIDES / "coming_from.md").read_text()
    assert page == coming_from.page(), (
        "python -m experiments.coming_from > docs/guides/coming_from.md"
    )


ARXIV = re.compile(r"\b[012]\d{3}\.\d{5}\b")


def test_the_index_of_papers_has_every_paper():
    page = (ROOT / "docs" / "papers.md").read_text()
    assert all(link == shown for shown, link in re.findall(r"\[([\d.]+)\]\(\S+/([\d.]+)\)", page))
    named = {
        number
        for folder in ("fp8rl_jax", "pallas_kernels", "experiments", "docs", "notebooks")
        for pattern in ("*.py", "*.toml", "*.md", "*.ipynb")
        for path in (ROOT / folder).rglob(pattern)
        if path.name != "papers.md"
        for number in re.findall(r"arXiv[: ]\s*(?:#\s*)?(\d{4}\.\d{5})", path.read_text())
    }
    assert len(named) > 60 and sorted(named - set(ARXIV.findall(page))) == []


def test_the_citation_names_this_version():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= found.keys()
    assert found["version"] == fp8rl.__version__
    assert f"## {fp8rl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def commands(page: Path) -> list[list[str]]:
    """The words of every `fp8rl ...` in a page's blocks of code, and of those in its text that name
    a file of the repository."""
    text = text_of(page).replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?(?:\S*/)?fp8rl (\w.*)$", text, re.M)
    lines += re.findall(r"`fp8rl (\w[^`]* experiments/\S+\.toml)`", text)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def anywhere(tmp_path, monkeypatch):
    """A directory with the files that commands name, the repository's and some of one's own."""
    furnish(tmp_path)
    for name in ("base.toml", "recipe.toml", "run.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def understood(words: list[str]) -> None:
    """Read a command's words as the command does."""
    command = COMMANDS[words[0]]
    module, _, function = command.function.partition(":")
    run = getattr(importlib.import_module(f"fp8rl_jax.cli.{module}"), function)
    arguments = next(iter(get_type_hints(run).values()))
    # a run's directory stands for its settings
    rest = ["RUN.toml" if word.startswith("runs/") else word for word in words[1:]]
    if command.first_keys:
        load_config(arguments, rest, "fp8rl")
    else:
        parse_arguments(arguments, rest, "fp8rl")
    named = [word for word in rest if re.match(r"experiments/\S+\.toml$", word)]
    assert [word for word in named if not (ROOT / word).exists()] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if commands(page) and page.name != "coming_from.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_its_commands_are_understood(page, anywhere):
    found = {tuple(words) for words in commands(page)}
    for words in sorted(found):
        try:
            understood([*words])
        except BaseException as fault:
            raise AssertionError(f"fp8rl {shlex.join(words)}: {fault}") from fault


def test_what_pages_print_has_run_as_it_stands():
    """`python -m experiments.documents --pages PAGE` runs what is new, `make night` all."""
    printed = to_run()
    ran = {name: {"code": page.fingerprint(), "verdict": "ran"} for name, page in printed.items()}
    assert len(ran) > 5 and json.loads(RECORD.read_text())["pages"] == ran


def test_what_a_page_prints_is_read(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    page = read_page(path)
    assert page.files == {"mine.toml": "[trainer]\nsteps = 2\n"}
    assert page.program == "x = 1\nassert x == 1\n"
    assert page.commands == [["train", "RUN.toml", "--recipe", "jet-rl"], ["gate", "RUN.toml"]]
    assert page.runs and not elsewhere(page.commands[0])
    assert elsewhere(["ablate", "experiments/ablations/demo.toml"]).startswith("hours")
    path.write_text(PAGE.replace("jet-rl", "bf16"))
    assert read_page(path).fingerprint() != page.fingerprint()
    path.write_text("`fp8rl train` in a sentence")
    assert not read_page(path).runs


PAGE = """
```toml
# mine.toml
[trainer]
steps = 2
```

    fp8rl train RUN.toml \\
      --recipe jet-rl   # a comment
    .venv/bin/fp8rl gate RUN.toml

```python
x = 1
```
```python
assert x == 1
```
"""


def test_what_is_left_to_the_reader_has_a_stand_in():
    words = "export --model DIR --output DIR --format bf16".split()
    own = f"export --model {MODEL} --output runs/out-3 --format bf16".split()
    assert as_run(words, 3) == own
    words = "train RUN.toml --recipe bf16".split()
    assert as_run(words, 0) == [*words, "--output", "runs/out-0", "--trainer.steps", "2"]
    words = "pretrain RUN.toml --recipe nvfp4".split()
    assert as_run(words, 0)[1] == "experiments/runs/pretraining.toml"
    assert as_run(["train"], 0) == ["train"]  # the first one of the README, to its end


def test_what_fails_is_named(tmp_path):
    page = Page({}, "import no_such_module\n", [["train", "RUN.toml", "--trainer.step", "2"]])
    program, command = faults(tmp_path, page, 100)
    assert program.startswith("its program: status 1: ModuleNotFoundError: No module named")
    assert command.startswith("fp8rl train RUN.toml --trainer.step 2: status 2: ")


def test_a_name_from_elsewhere_is_answered_as_the_guide_prints_it(capsys):
    (words,) = commands(GUIDES / "coming_from.md")
    assert main(words) == 2
    assert f"    {capsys.readouterr().err}" in (GUIDES / "coming_from.md").read_text()


def test_what_papers_say_to_run_is_understood(anywhere):
    cells = re.findall(r"`([^`|]+)`", (ROOT / "docs" / "papers.md").read_text())
    flags = [cell for cell in cells if cell.startswith("--")]
    assert len(flags) > 20
    for words in map(shlex.split, dict.fromkeys(flags)):
        if words[0] == "--recipe" and len(words) == 2:
            assert words[1] in RECIPES
        else:
            load_config(RunConfig, words, "fp8rl train")
    recipes = {cell for cell in cells if cell.startswith("experiments/recipes/")}
    assert recipes >= {f"experiments/recipes/{name}.toml" for name in ("grpo", "dapo", "qerl")}
    for cell in recipes:
        load_config(RunConfig, shlex.split(cell), "fp8rl train")


def test_modules_and_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = text_of(page)
        named = re.findall(r"(?:^    |`)make ([a-z][a-z-]*)", text, re.M)
        assert set(named) <= targets, page
        for module in re.findall(r"python -m ((?:experiments|pallas_kernels)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_programs_of_the_guides_are_understood(anywhere, monkeypatch):
    """With a function in place of `train`, which settles the settings."""
    seen = []

    def train(*args, **kwargs):
        given = inspect.signature(runs.train).bind(*args, **kwargs).arguments
        seen.append(with_settings(RunConfig(), given.get("settings", {})))

    monkeypatch.setattr(fp8rl, "train", train)
    exec(compile(read_page(GUIDES / "data.md").program, "docs/guides/data.md", "exec"), {})
    assert [config.recipe for config in seen] == ["fp8-rl"]


def test_metrics_of_the_guide_are_measured_and_figures_of_guides_are_those_of_the_results():
    code = "".join(path.read_text() for path in (ROOT / "fp8rl_jax").rglob("*.py"))
    named = re.findall(r"`[a-z0-9]+/([a-z0-9_]+)`", (GUIDES / "metrics.md").read_text())
    stems = {re.sub(r"_(q|k|v|low|high)$", "", name) for name in named}
    assert len(stems) > 25 and [stem for stem in sorted(stems) if stem not in code] == []
    results = (ROOT / "docs" / "results.md").read_text()
    figures = {
        figure
        for page in (GUIDES / "metrics.md", GUIDES / "recipe.md")
        for figure in re.findall(r"(?<![\w.])(?:\d\.\de-\d\d|0?\.\d{3,4})\b", page.read_text())
    }
    assert len(figures) > 10 and [figure for figure in figures if figure not in results] == []


def test_the_reward_of_the_guide_tells_right_from_wrong(anywhere, capsys):
    assert main(["doctor", "--rewards", "rewarded.toml"]) == 0, capsys.readouterr().out


def test_the_data_of_the_guide_are_understood(anywhere, capsys):
    assert main(["doctor", "--data", "mine.toml"]) == 0, capsys.readouterr().out
