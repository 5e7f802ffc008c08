"""`python -m experiments.benchmarks.gpu --output FOLDER`: looks for the card, runs the parts,
prints the table."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

import jax
from rich.console import Console

from experiments.benchmarks import machine
from experiments.benchmarks.gpu.figures import show
from experiments.benchmarks.gpu.jobs import PARTS, Setting
from experiments.benchmarks.gpu.record import Folder
from experiments.benchmarks.gpu.runner import run
from fp8rl_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """Faults of the command line as errors of the command: one line, without the usage before
    it."""

    def error(self, message: str) -> None:
        raise UserError(message)


def parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        help="folder of a file a part; what it has is not run again",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="for all of it; what does not fit is left for the next one",
    )
    parser.add_argument(
        "--torch-python",
        default="",
        help="interpreter with torch and triton, to time them as peers of matmul",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="in miniature on a CPU: shows that it works, measures nothing",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="record the kernels of what is timed, too; a trace each",
    )
    arguments = parser.parse_args(words)
    if not arguments.minutes > 0:
        raise UserError(f"--minutes: {arguments.minutes} must be above 0")
    return arguments


def check_card() -> None:
    """Look for a Hopper GPU that JAX can reach.

    Raises:
        UserError: naming what is missing.
    """
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        raise UserError("JAX_PLATFORMS=cpu keeps JAX from the GPU; unset it, or give --tiny")
    found = machine.gpu()
    if not found:
        raise UserError(
            "no NVIDIA GPU: nvidia-smi names none; this needs an H100 or H200, or --tiny"
        )
    if found["compute_cap"] != "9.0":
        raise UserError(
            f"no Hopper GPU: {found['name']} has compute capability {found['compute_cap']}, the "
            "kernels need 9.0"
        )
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError(
            "JAX cannot reach the GPU: its CUDA plugin is missing; pip install 'jax[cuda13]'"
        )


def main(words: list[str]) -> int:
    """Run the command.

    Returns:
        The exit code: 0; 1 where a result is wrong or something is left to do; 2 for a fault in
        what was given, or no such GPU.
    """
    try:
        arguments = parse(words)
        if not arguments.tiny:
            check_card()
        # the card is the workers'; here jobs are only listed
        jax.config.update("jax_platforms", "cpu")
        setting = Setting(arguments.tiny, arguments.torch_python, arguments.profile)
        folder = Folder(
            arguments.output,
            {name: part.jobs(setting) for name, part in PARTS.items()},
            not arguments.tiny,
        )
        left = run(folder, arguments.parts, setting, arguments.minutes, words)
    except UserError as error:
        print(f"benchmarks.gpu: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    show(folder.records, Console(width=140))
    for name, reason in left.items():
        print(f"{name}: {reason}; run the same command again to go on")
    wrong = any(
        result.get("passed") is False
        for record in folder.records.values()
        for result in record["results"].values()
    )
    return 1 if wrong or left else 0


if __name__ == "__main__":
    # an exception, so that workers are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
