"""`python -m experiments.benchmarks --output FILE ...`: reads the arguments, then times."""

from __future__ import annotations

import signal
import sys

from experiments.benchmarks import card, machine
from experiments.benchmarks.arguments import Arguments
from fp8rl_jax.cli.commands import start_jax
from fp8rl_jax.cli.load import parse_arguments
from fp8rl_jax.errors import UserError


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    try:
        arguments = parse_arguments(Arguments, argv, "python -m experiments.benchmarks")
        if not card.present():
            machine.limit_threads(arguments.threads)
        start_jax()
        from experiments.benchmarks.suite import run

        run(arguments)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"benchmarks: error: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # an exception, so that peers are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
