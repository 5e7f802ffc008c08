"""The command line that the studies and benchmarks have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fp8rl_jax.errors import UserError


def run_command[A](name: str, kind: type[A], run: Callable[[A], None], argv: list[str]) -> int:
    """Run a command, with its faults on standard error.

    Args:
        name: of the module in this package.
        kind: dataclass of its arguments.
        run: the command.
        argv: its words.

    Returns:
        The exit code: 0, or 2 for a fault in what was given.
    """
    # what parses is not there on a bare machine with a card, where studies are imported as modules
    from fp8rl_jax.cli.load import parse_arguments

    try:
        run(parse_arguments(kind, argv, f"python -m experiments.{name}"))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"{name}: error: {line}", file=sys.stderr)
        return 2
    return 0
