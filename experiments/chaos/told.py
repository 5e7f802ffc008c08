"""`fp8rl`, which tells where it is: `python -m experiments.chaos.told DESCRIPTOR WORD ...`.

Writes a line "STEP PHASE" to an open descriptor whenever the main thread moves (parallel/watch.py),
"compile" where a program is compiled. Whoever reads them can kill it there.
"""

from __future__ import annotations

import os
import sys

import jax

from fp8rl_jax.cli.main import main
from fp8rl_jax.parallel import PROGRESS


def told(descriptor: int) -> None:
    """Tell of every move from here on."""
    begin, move = PROGRESS.begin, PROGRESS.move

    def tell(phase: str) -> None:
        os.write(descriptor, f"{PROGRESS.step} {phase}\n".encode())

    def begun(step: int) -> None:
        begin(step)
        tell(PROGRESS.phase)

    def moved() -> None:
        move()
        tell(PROGRESS.phase)

    def compiles(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            tell("compile")
        elif event == "/jax/core/compile/backend_compile_duration":
            tell(PROGRESS.phase)

    PROGRESS.begin, PROGRESS.move = begun, moved
    jax.monitoring.register_event_duration_secs_listener(compiles)
    tell(PROGRESS.phase)


if __name__ == "__main__":
    told(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
