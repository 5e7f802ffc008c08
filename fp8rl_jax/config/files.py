"""Configurations as TOML: files in, the later over the earlier, with every fault of all of them
reported together; and out."""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8rl_jax.config.renamed import renamed
from fp8rl_jax.config.schema import (
    MAX_DEPTH,
    NONE_TEXT,
    Mismatch,
    convert,
    describe,
    fields_of,
    holds_tables,
    is_deeper,
    leaves,
    one_line,
    problems,
    quoted,
    show,
    tables,
    unknown_key_hint,
)
from fp8rl_jax.errors import UserError, worded
from fp8rl_jax.functions import import_once


def run_directory(spec: str | Path) -> Path | None:
    """Give the run directory that a path names, itself or by its config.toml; None for others."""
    path = Path(spec).expanduser()
    if path.name == "config.toml" and path.is_file():
        path = path.parent
    is_run = (path / "config.toml").is_file() and not (path / "config.json").exists()
    kept = ("run.json", "checkpoints", "model")
    return path if is_run and any((path / name).exists() for name in kept) else None


def read_config[Config](tree: type[Config], *files: str | Path | Mapping[str, Any]) -> Config:
    """Read the configuration of TOML files, the later laid over the earlier key by key.

    Args:
        tree: root dataclass; every field has a default.
        files: a dictionary stands for a file's contents, and a run's directory for its config.toml.

    Raises:
        UserError: one line for each fault: unknown keys (with the nearest known one), wrong types,
            files that cannot be read, and whatever the dataclasses' `__post_init__` and
            `problems()` find.
    """
    faults: list[str] = []
    config = laid_over(
        tree(),
        read_values(tree, [f if isinstance(f, Mapping) else str(f) for f in files], faults),
        faults,
    )
    faults += problems(config)
    if faults:
        raise UserError("\n".join(dict.fromkeys(map(one_line, faults))))
    return config


def read_values(
    tree: type, files: Sequence[str | Mapping[str, Any]], faults: list[str]
) -> dict[str, Any]:
    """Convert what is sound in the files, laid over each other; the rest goes into `faults`.

    A dictionary stands for a file's contents.
    """
    values: dict[str, Any] = {}
    known = [*(key for key, _ in leaves(tree)), *tables(tree)]
    for file in files:
        name, table = (file, _read(file, faults)) if isinstance(file, str) else ("", {**file})
        _merge(values, _checked(table, tree, known, "", name, faults), tree)
    return values


def read_recipes(files: Sequence[str]) -> dict[str, Any]:
    """Read the rows of [recipes] in TOML files, the later over the earlier, for `get_recipe`.

    What registers formats that rows may name, `formats`, is imported. What else stands in a file is
    passed over: it may be a run's.

    Raises:
        UserError: a line for each file that cannot be read or has no such table, and whatever
            `import_once` refuses.
    """
    faults: list[str] = []
    rows: dict[str, Any] = {}
    for file in files:
        before = len(faults)
        values = _read(file, faults)
        table = values.get("recipes")
        try:
            for each in convert(values.get("formats", []), tuple[str, ...]):
                import_once(each, "formats")
        except Mismatch:
            faults.append(f"{file}: formats: expected {describe(tuple[str, ...])}")
        except UserError as error:
            faults.append(f"{file}: {error}")
        if isinstance(table, dict):
            rows |= table
        elif len(faults) == before:
            faults.append(f"{file}: has no [recipes.NAME]")
    if faults:
        raise UserError("\n".join(map(one_line, faults)))
    return rows


def dump_toml(config: Any) -> str:
    """Write a configuration as TOML that `load_config` reads back to an equal one.

    TOML has no null: a setting that is None is left out where None is its default, and written as
    "none" elsewhere.
    """

    def plain(node: Any, default: Any) -> dict[str, Any]:
        table = {}
        for name in fields_of(type(node)):
            value, standard = getattr(node, name), getattr(default, name)
            if dataclasses.is_dataclass(value):
                table[name] = plain(value, standard)
            elif value is not None:
                table[name] = value
            elif standard is not None:
                table[name] = NONE_TEXT
        return table

    import tomli_w  # the GPU command reads configurations where it is not installed

    return tomli_w.dumps(plain(config, type(config)()))


def _read(file: str, faults: list[str]) -> dict[str, Any]:
    path = Path(file)
    try:
        # a run's directory stands for its settings
        path = path / "config.toml" if (path / "config.toml").is_file() else path
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        if not is_deeper(values, MAX_DEPTH):
            return values
        faults.append(f"{file}: tables or lists are nested more than {MAX_DEPTH} deep")
    except FileNotFoundError:
        hint = worded(" (flags begin with --)", ", and no directory of a run")
        hint = "" if file.endswith(".toml") else hint
        faults.append(f"{file}: no such file{hint}")
    except OSError as error:
        faults.append(f"{file}: cannot be read: {error.strerror}")
    except RecursionError:
        faults.append(f"{file}: tables or lists are nested more than {MAX_DEPTH} deep")
    # not TOML, not UTF-8, or an integer of more digits than Python converts
    except ValueError as error:
        faults.append(f"{file}: not valid TOML: {error}")
    return {}


def _checked(
    values: dict, tree: type, known: list[str], prefix: str, file: str, faults: list[str]
) -> dict[str, Any]:
    """The sound part of one table of a file, converted; every other key gets a line in `faults`."""
    sound, start = {}, f"{file}: " if file else ""
    fields = fields_of(tree)
    for name, value in values.items():
        key = prefix + quoted(name)
        if name not in fields:
            faults += [
                f"{start}unknown key {inner}{unknown_key_hint(inner, known)}"
                for inner in _unknown(key, value)
            ]
        elif dataclasses.is_dataclass(fields[name]) and isinstance(value, dict):
            sound[name] = _checked(value, fields[name], known, f"{key}.", file, faults)
        else:
            try:
                sound[name] = convert(value, fields[name])
            except Mismatch:
                faults.append(f"{start}{key}: expected {describe(fields[name])}, got {show(value)}")
    return sound


def _unknown(name: str, value: Any) -> list[str]:
    """`name`, or the keys inside it where it is a table of another project's configuration."""
    items = value.items() if type(value) is dict else ()
    inside = [inner for key, item in items for inner in _unknown(f"{name}.{quoted(key)}", item)]
    return inside if any(renamed(key) for key in inside) else [name]


def _merge(values: dict[str, Any], later: dict[str, Any], tree: type) -> None:
    """Lays a later file over the earlier ones. A setting that is a table itself (task.args) is
    replaced as a whole, and one that holds tables (recipes) entry by entry."""
    fields = fields_of(tree)
    for name, value in later.items():
        if dataclasses.is_dataclass(fields[name]) and name in values:
            _merge(values[name], value, fields[name])
        elif holds_tables(fields[name]):
            values[name] = values.get(name, {}) | value
        else:
            values[name] = value


def unchecked(default: Any, values: dict[str, Any]) -> Any:
    """Lay the values over `default`, unchecked."""
    made = copy.copy(default)
    for name, value in values.items():
        current = getattr(default, name)
        object.__setattr__(
            made, name, unchecked(current, value) if dataclasses.is_dataclass(current) else value
        )
    return made


def laid_over(default: Any, values: dict[str, Any], faults: list[str]) -> Any:
    """Lay the values over `default`; what its class refuses goes into `faults`."""
    changes = {}
    for name, value in values.items():
        current = getattr(default, name)
        changes[name] = (
            laid_over(current, value, faults) if dataclasses.is_dataclass(current) else value
        )
    try:
        return dataclasses.replace(default, **changes)
    except UserError as error:
        faults += str(error).splitlines()
        return default
