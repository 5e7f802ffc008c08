"""`fp8rl config`: every key of a run, with type, default and meaning, as Markdown (docs/config.md)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import NONE_TEXT, describe, fields_of

_HEAD = """# Every key of a run

Written by `fp8rl config > docs/config.md`. In a TOML file the part before the last dot is the table; on the command line the key
is the flag, dashes for underscores: `--rollout.max-new-tokens 32`. Files are read in order, each over the one before, flags last:
`fp8rl train base.toml recipe.toml --rl.clip-high 0.28`. What is true or false is turned on by `--tracking.wandb` or
`--tracking.wandb true`, and off by `--tracking.no-wandb` or `--tracking.wandb false`. In Python a key is a keyword by its last name
where no other table has it (`learning_rate=1e-5`), or else `**{"rl.correction.method": "token_tis"}`.
What other projects call a setting: [guides/coming_from.md](guides/coming_from.md).

Each table of a run has an example, then its keys with what they are where nothing is said; what needs more words than a cell has
stands below it.
"""
_EXAMPLES = Path(__file__).with_name("config_examples.toml")
_CELL = 240
"""Letters that a cell of the page has room for."""


@dataclass(frozen=True)
class ConfigArguments:
    """Print every key of a run with its type, default and meaning, as Markdown."""


def config(arguments: ConfigArguments) -> None:
    """Print the page."""
    print(page(RunConfig), end="")


def page(tree: type) -> str:
    """Write the page for a tree of dataclasses whose fields have docstrings under them."""
    return "\n".join([_HEAD, *_sections(tree(), ""), *_recipe_section()])


def examples() -> dict[str, str]:
    """Read the TOML example of each table, by its dotted name; "" is the top level."""
    found: dict[str, list[str]] = {"": []}
    for line in _EXAMPLES.read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"\[([\w.-]+)\]", line):
            found[head[1]] = []
        if not line.startswith("#"):
            found[[*found][-1]].append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def first_help(prog: str, tree: type, summary: str, keys: Sequence[str]) -> str:
    """Write the help of a command that reads a run's settings: these keys, and where all are.

    Args:
        prog: such as "fp8rl train".
        tree: root dataclass.
        summary: of the command.
        keys: dotted; the first sentence about each is shown.
    """
    lines = [f"usage: {prog} [RUN.toml ...] [--KEY VALUE ...]", ""]
    lines += [f"{summary[0].upper()}{summary[1:]}.", ""]
    for key in keys:
        *tables, name = key.split(".")
        node = functools.reduce(getattr, tables, tree())
        value, text = getattr(node, name), field_docstrings(type(node))[name]
        sentence = re.split(r"(?<=[.]) ", text)[0]
        flag = f"--{key.replace('_', '-')}"
        lines.append(f"  {flag} ({_text(value)})")
        lines += textwrap.wrap(sentence, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(
        [
            *lines,
            "",
            f"All keys as flags: {prog} --help-all. With their meaning, as a page: fp8rl config.",
        ]
    )


def field_docstrings(tree: type) -> dict[str, str]:
    """Collect the strings that stand under the fields of one dataclass, white space folded.

    Raises:
        ValueError: a field that is no table has no docstring.
    """
    documented: dict[str, str] = {}
    for base in reversed(tree.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
        for field, text in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                documented[field.target.id] = " ".join(str(text.value.value).split())
    if missing := [
        n
        for n, kind in fields_of(tree).items()
        if n not in documented and not dataclasses.is_dataclass(kind)
    ]:
        raise ValueError(f"{tree.__name__}: no docstring under {', '.join(missing)}")
    return documented


def _sections(node: Any, prefix: str) -> Iterator[str]:
    fields, documented = fields_of(type(node)), field_docstrings(type(node))
    name = prefix.rstrip(".")
    summary = " ".join((inspect.getdoc(type(node)) or "").split())
    yield f"## {name or 'Top level'}\n\n{summary}\n\n```toml\n{examples()[name]}\n```\n"
    values = {key: getattr(node, key) for key in fields}
    plain = [key for key, kind in fields.items() if not dataclasses.is_dataclass(kind)]
    yield from _keys(
        (f"{prefix}{key}", _text(values[key]), describe(fields[key]), documented[key])
        for key in plain
    )
    for key in fields:
        if key not in plain:
            yield from _sections(values[key], f"{prefix}{key}.")


def _keys(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Write keys, defaults, types and meanings as a table; what no cell has room for goes on below
    it."""
    table, below = ["| key | default | type | meaning |", "| --- | --- | --- | --- |"], []
    for key, default, kind, meaning in rows:
        first, rest = meaning, ""
        if len(meaning) > _CELL:
            first, _, rest = meaning.partition(". ")
        if rest:
            first, _ = f"{first}. (More below.)", below.append(f"- `{key}`: {rest}")
        if len(kind) > _CELL:
            kind, _ = "one of the names below", below.append(f"- `{key}` is {kind}.")
        cells = (f"**`{key}`**", f"`{default}`", kind, first)
        table.append(f"| {' | '.join(cell.replace('|', r'\|') for cell in cells)} |")
    yield "\n".join(table) + "\n"
    if below:
        yield "\n".join(below) + "\n"


def _recipe_section() -> Iterator[str]:
    found = [text for name, text in examples().items() if name.startswith("recipes.")]
    yield "## recipes.NAME\n"
    yield (
        "A recipe of one's own, named by `recipe`; fp8rl_jax/config/recipe.py begins with an "
        "example, and "
        "`fp8rl doctor --recipe` prints any recipe in this form. A format is a name "
        "(fp8rl_jax/config/formats.py), "
        "or a table of `element`, `block` and `scale`, which changes what it names.\n"
    )
    yield f"```toml\n{'\n\n'.join(found)}\n```\n"
    base = "Recipe whose fields hold where this row has none of its own."
    yield from _keys(
        [
            ("recipes.NAME.base", NONE_TEXT, "a string", base),
            *_recipe_fields(Recipe(""), "recipes.NAME."),
        ]
    )


def _recipe_fields(node: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    documented = field_docstrings(type(node))
    for name, annotation in fields_of(type(node)).items():
        value, key = getattr(node, name), f"{prefix}{name}"
        if annotation is TensorFormat:
            yield key, _text(value.name), "a format", documented[name]
        elif dataclasses.is_dataclass(annotation):
            yield from _recipe_fields(value, f"{key}.")
        elif name != "name":
            value = value or {} if describe(annotation) == "a table of tables" else value
            yield key, _text(value), describe(annotation), documented[name]


def _text(value: Any) -> str:
    return NONE_TEXT if value is None else json.dumps(value)
