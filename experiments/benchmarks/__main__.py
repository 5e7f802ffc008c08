"""`python -m experiments.benchmarks --output FILE ...`: reads the arguments, then times."""

from __future__ import annotations

import signal
import sys

from experiments.benchmarks import machine
from experiments.benchmarks.arguments import Arguments
from experiments.command import run_command
from fp8rl_jax.cli.commands import start_jax


def run(arguments: Arguments) -> None:
    """Start JAX on as many processors as it may use, and time."""
    if not machine.has_gpu():
        machine.limit_threads(arguments.threads)
    start_jax()
    from experiments.benchmarks import suite

    suite.run(arguments)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("benchmarks", Arguments, run, argv)


if __name__ == "__main__":
    # an exception, so that peers are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
