"""From words to a typed configuration: TOML files, then flags, with every fault of both reported.

    fp8rl train base.toml overlay.toml --rollout.temperature 0.7 --task.args.max-word-len 4

Later files override earlier ones key by key, and flags override files. Tyro reads the flags and
writes the help; where it refuses, the flags are gone through one by one, so that all their faults
are named beside the files' own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from fp8rl_jax.config.files import laid_over, read_values, run_directory, unchecked
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import (
    MAX_DEPTH,
    Mismatch,
    convert,
    convert_text,
    describe,
    holds_tables,
    is_deeper,
    leaves,
    one_line,
    problems,
    show,
    unknown_key_hint,
)
from fp8rl_jax.errors import UserError


def load_config[Config](
    tree: type[Config], argv: list[str], prog: str, trained: bool = False
) -> Config:
    """Read the configuration that `argv` describes: TOML files first, then flags.

    Args:
        tree: root dataclass; every field has a default.
        argv: command-line words after the command's name.
        prog: name for the help text, such as "fp8rl train".
        trained: a run, its directory or the config.toml in it, stands for what it has trained,
            unless a later file or a flag names a model.

    Raises:
        UserError: one line for each fault: unknown keys and flags (with the nearest known one),
            wrong types, files that cannot be read, and whatever the dataclasses' `__post_init__`
            and `problems()` find.
        SystemExit: status 0, after `--help`.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    flags = argv[count:]
    files = _with_trained(argv[:count]) if trained else argv[:count]
    faults: list[str] = []
    values = read_values(tree, files, faults)
    # Flags may repair what files leave unsound, so nothing is checked before both are read.
    draft = unchecked(tree(), values)
    # Tyro would take a dictionary apart into flags of its own, so it gets empty ones.
    flags, entries, empty = _take_table_entries(flags, tree, draft)
    config = _read_flags(tree, flags, prog, unchecked(draft, empty), faults) if flags else None
    config = laid_over(tree(), values, faults) if config is None else config
    config = laid_over(config, entries, faults)
    asked = any(flag.startswith(("--precision.exact", "--precision.no-exact")) for flag in flags)
    if isinstance(config, RunConfig) and len(files) > count and not asked:
        config = config.with_exact_of(draft)
    faults += problems(config)
    if faults:
        raise UserError("\n".join(dict.fromkeys(map(one_line, faults))))
    return config


def _with_trained(words: list[str]) -> list[str | Mapping[str, Any]]:
    """Files, and behind each that is a run's what makes it the trained one."""
    files: list[str | Mapping[str, Any]] = []
    for word in words:
        files.append(word)
        if (run := run_directory(word)) is not None:
            from fp8rl_jax.cli.commands import progress
            from fp8rl_jax.training.source import trained_settings

            files.append(trained_settings(run, progress))
    return files


def parse_arguments[Arguments](tree: type[Arguments], argv: list[str], prog: str) -> Arguments:
    """Read the arguments of a command that reads no TOML.

    Raises as `load_config` does.
    """
    faults: list[str] = []
    arguments = _read_flags(tree, argv, prog, None, faults)
    faults += problems(arguments) if arguments is not None else []
    if faults:
        raise UserError("\n".join(map(one_line, faults)))
    return arguments


def _read_flags(tree: type, flags: list[str], prog: str, default: Any, faults: list[str]) -> Any:
    """Let tyro read the flags over `default`, which need not be sound.

    Where it refuses, `faults` gets lines and the result is None.
    """
    refusal, flags = io.StringIO(), _with_booleans(tree, flags)
    try:
        with contextlib.redirect_stderr(refusal):
            config = tyro.cli(
                tree, prog=prog, args=flags, **({} if default is None else {"default": default})
            )
        faults += _value_faults(tree, config)
        return config
    except UserError as error:
        faults += str(error).splitlines()
    except SystemExit as stop:
        if not stop.code:
            raise
        faults += list(_flag_faults(tree, flags, default is None)) or _unboxed(refusal.getvalue())
    return None


def _with_booleans(tree: type, flags: list[str]) -> list[str]:
    """Switches, each of which may be spelled `--a.b`, `--a.b true`, `--a.no-b` or `--a.b false`, as
    tyro reads them: a boolean without a word, and one that may be another word (precision.exact)
    with True or False."""
    kinds = {flag_of(key): kind for key, kind in leaves(tree)}
    either = {flag for flag, kind in kinds.items() if any(x is True for x in get_args(kind))}
    off = {flag_of(key, "no-"): flag_of(key) for key, _ in leaves(tree)}
    negative = {flag: name for name, flag in off.items()}
    read: list[str] = []
    for given, words, as_given in _grouped(flags):
        name = given.replace("_", "-")
        flag, said = off.get(name, name), " ".join(words).lower()
        if flag != name:
            value = None if words else False
        else:
            value = {"": True, "true": True, "false": False}.get(said)
        if value is not None and flag in either:
            as_given = [flag, str(value)]
        elif value is not None and kinds.get(flag) is bool:
            as_given = [flag if value else negative[flag]]
        read += as_given
    return read


def _value_faults(tree: type, config: Any) -> Iterator[str]:
    """Values that tyro lets through and a file would not: nan and infinity."""
    for key, annotation in leaves(tree):
        value = functools.reduce(getattr, key.split("."), config)
        try:
            convert(value, annotation)
        except Mismatch:
            yield f"{flag_of(key)}: expected {describe(annotation)}, got {show(value)}"


def _flag_faults(tree: type[Any], flags: list[str], check_required: bool) -> Iterator[str]:
    positionals = positional_fields(tree)
    known = {key: annotation for key, annotation in leaves(tree) if key not in positionals}
    annotations = {flag_of(key): annotation for key, annotation in known.items()}
    negated = {flag_of(key, "no-") for key, annotation in leaves(tree) if annotation is bool}
    given = set()
    for flag, words, _ in _grouped(flags):
        name = flag.replace("_", "-")
        given.add(name)
        if not flag:
            if not positionals:
                yield f"{words[0]}: not expected here; TOML files stand before the flags"
        elif name in negated:
            if words:
                yield f"{flag}: takes no value, got {show(' '.join(words))}"
        elif name not in annotations:
            key = flag.lstrip("-").removeprefix("no-")
            hint = unknown_key_hint(key, list(known), flag_of)
            if name == "--slurm" and tree is RunConfig:
                hint = "; `sbatch experiments/launch/slurm.sh RUN.toml` trains on a SLURM cluster"
            yield f"{flag}: unknown flag{hint}"
        else:
            try:
                convert_text(words, annotations[name])
            except Mismatch:
                got = show(" ".join(words)) if words else "nothing"
                yield f"{flag}: expected {describe(annotations[name])}, got {got}"
    if check_required:
        for field in filter(_is_required, dataclasses.fields(tree)):
            flag = "" if field.name in positionals else flag_of(field.name)
            if flag not in given:
                yield f"{flag or field.name.upper()}: required"


def _take_table_entries(flags: list[str], tree: type, config: Any) -> tuple[list[str], dict, dict]:
    """Take `--task.args.max-word-len 4` out of the flags, for settings that are dictionaries.

    For one that holds tables, also `--recipes.my-fp8.rollout.weight e4m3`, whose first part is an
    entry's name as it stands.

    Returns:
        The other flags; the whole value of each such setting, as a nested dictionary; the same with
        empty values. A word is read as a TOML value, and as a string where it is none.
    """
    stems, entries, empty = {}, {}, {}
    of_tables: set[str] = set()
    for key, annotation in leaves(tree):
        if (get_origin(annotation) or annotation) is dict:
            *parents, name = key.split(".")
            node, full, bare = config, entries, empty
            for parent in parents:
                node, full = getattr(node, parent), full.setdefault(parent, {})
                bare = bare.setdefault(parent, {})
            # a plain dictionary: a function's arguments are a frozen one
            stems[f"{flag_of(key)}."] = full[name] = {**copy.deepcopy(getattr(node, name))}
            bare[name] = {}
            if holds_tables(annotation):
                of_tables.add(f"{flag_of(key)}.")
    rest: list[str] = []
    for flag, words, as_given in _grouped(flags):
        stem = next((stem for stem in stems if flag.replace("_", "-").startswith(stem)), None)
        if stem is None:
            rest += as_given
        else:
            values = [_toml_value(word) for word in words]
            path = [flag[len(stem) :].replace("-", "_")]
            if stem in of_tables:
                entry, *keys = flag[len(stem) :].split(".")
                path = [entry, *(key.replace("-", "_") for key in keys)]
            _put(stems[stem], path, values[0] if len(values) == 1 else values or True)
    return rest, entries, empty


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a value deep in a table. Where what stands in the way is no table, the rest of the path
    is one key: an unknown one, which the table's reader names."""
    first, *rest = path
    if not rest:
        table[first] = value
    elif isinstance(table.setdefault(first, {}), dict):
        _put(table[first], rest, value)
    else:
        table[".".join(path)] = value


def _grouped(flags: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(flag, the words that belong to it, both as they were given); the flag is "" for words before
    the first one."""
    starts = [i for i, word in enumerate(flags) if re.match(r"--?[A-Za-z]", word)]
    if loose := flags[: starts[0]] if starts else flags:
        yield "", loose, loose
    for start, end in itertools.pairwise([*starts, len(flags)]):
        flag, equals, value = flags[start].partition("=")
        yield flag, [value] * bool(equals) + flags[start + 1 : end], flags[start:end]


def _toml_value(word: str) -> Any:
    try:
        table = tomllib.loads(f"value = {word}")
        if len(table) > 1 or is_deeper(table["value"], MAX_DEPTH):
            return word
        return convert(table["value"], Any)
    except (ValueError, RecursionError, Mismatch):  # no TOML, or no value that a file could hold
        return word


def flag_of(key: str, prefix: str = "") -> str:
    """Write the flag of a dotted key; a prefix goes before its last name."""
    parents, dot, name = key.rpartition(".")
    return f"--{parents}{dot}{prefix}{name}".replace("_", "-")


def positional_fields(tree: type) -> set[str]:
    """Find the fields of a command's arguments that are no flags."""
    marker = tyro.conf.Positional[int].__metadata__[0]
    hints = get_type_hints(tree, include_extras=True)
    return {name for name, hint in hints.items() if marker in getattr(hint, "__metadata__", ())}


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _unboxed(box: str) -> list[str]:
    """Tyro's own message, taken out of its frame: neither the title nor the pointer to --help."""
    lines = [line.strip("│╭╮╰╯─|+- ") for line in box.splitlines()[1:]]
    return [" ".join(line for line in lines if line and not line.startswith("For full helptext"))]
