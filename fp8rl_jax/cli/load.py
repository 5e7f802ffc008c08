"""From TOML files and flags to a typed configuration, with every fault of both reported together.

    fp8rl train base.toml overlay.toml --rollout.temperature 0.7 --task.args.max-terms 3

Later files override earlier ones key by key, and flags override files. Tyro reads the flags and
writes the help; where it refuses, the flags are gone through once more, one by one, so that all
their faults are named beside the files' own.
"""

from __future__ import annotations

from fp8rl_jax.cli.flags import read_flags, take_table_entries
from fp8rl_jax.config.files import laid_over, read_values, unchecked
from fp8rl_jax.config.schema import one_line, problems
from fp8rl_jax.errors import UserError


def load_config[Config](tree: type[Config], argv: list[str], prog: str) -> Config:
    """The configuration that `argv` describes: TOML files first, then flags.

    Args:
        tree: root dataclass; every field has a default.
        argv: command-line words after the command's name.
        prog: name for the help text, such as "fp8rl train".

    Raises:
        UserError: one line for each fault: unknown keys and flags (with the nearest known one),
            wrong types, files that cannot be read, and whatever the dataclasses' `__post_init__`
            and `problems()` find.
        SystemExit: status 0, after `--help`.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    files, flags = argv[:count], argv[count:]
    faults: list[str] = []
    values = read_values(tree, files, faults)
    # Flags may mend what files leave unsound, so nothing is checked before both are together.
    draft = unchecked(tree(), values)
    # Tyro would take a dictionary apart into flags of its own, so it sees none.
    flags, entries, empty = take_table_entries(flags, tree, draft)
    config = read_flags(tree, flags, prog, unchecked(draft, empty), faults) if flags else None
    config = laid_over(tree(), values, faults) if config is None else config
    config = laid_over(config, entries, faults)
    faults += problems(config)
    if faults:
        raise UserError("\n".join(dict.fromkeys(map(one_line, faults))))
    return config


def parse_arguments[Arguments](tree: type[Arguments], argv: list[str], prog: str) -> Arguments:
    """The arguments of a command that reads no TOML; raises as `load_config` does."""
    faults: list[str] = []
    arguments = read_flags(tree, argv, prog, None, faults)
    faults += problems(arguments) if arguments is not None else []
    if faults:
        raise UserError("\n".join(map(one_line, faults)))
    return arguments
