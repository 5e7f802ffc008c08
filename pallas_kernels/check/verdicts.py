"""What the checks of Hopper kernels found, kept with a fingerprint of all that they depend on:
`python -m pallas_kernels.check.verdicts`.

Playing and compiling every case takes minutes, and gives the same again as long as the sources, the
cases, JAX and the assembler are the same. So verdicts.json has what was found of each operation,
and its fingerprint: where that is the same, tests take the verdict from there, but for an eighth of
the cases that changes from day to day. The command checks what has changed, or the operations that
it is given, and writes the file anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import zlib
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pallas_kernels.check.cases import OPERATIONS, Case, cases_of
from pallas_kernels.check.sources import closure, file_of

FILE = Path(__file__).with_suffix(".json")
CHECKS = ("interpret", "compile")
SECONDS = 1200
"""Of all cases of an operation; a machine without other work needs a tenth."""
_TEXTS = {"interpret": (), "compile": ("h200.txtpb", "toolchain.txt")}
_VERSIONS = {"interpret": ("jax", "jaxlib", "numpy", "ml_dtypes"), "compile": ("jax", "jaxlib")}
EVERY = 8
"""A case of which the verdict is known is checked all the same every so many days."""


def chosen(check: str, operation: str) -> list[Case]:
    """List the cases of a check: the small ones, and where they are compiled every fourth of the
    real ones, which are sweeps of shapes."""
    real = cases_of(operation, "real")[::4] if check == "compile" else ()
    return [*cases_of(operation, "small"), *real]


def run(check: str, operation: str, *arguments: str, seconds: float = SECONDS) -> list[dict]:
    """Check cases in a process that is killed where it takes too long.

    Returns:
        The result of each case that finished; a last entry "hangs" or "died" where one did not.
    """
    command = [sys.executable, "-m", f"pallas_kernels.check.{check}", operation, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=dict(os.environ, JAX_PLATFORMS="cpu"),
        )
        output, fault = done.stdout, {"died": done.stderr[-2000:]} if done.returncode else {}
    except subprocess.TimeoutExpired as late:
        output, fault = (late.stdout or b"").decode(), {"hangs": f"after {seconds} s"}
    lines = output.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return results + (
        [{"case": lines[-1].removeprefix("# ") if lines else "", **fault}] if fault else []
    )


def known(check: str, operation: str) -> dict[str, dict]:
    """Look up the verdicts that hold for the code as it is, by case; none where it has changed."""
    kept = _kept().get(check, {}).get(operation, {})
    if kept.get("fingerprint") != fingerprint(check, operation):
        return {}
    return {result["case"]: result for result in kept["results"]}


def due(case: str, day: date) -> bool:
    """Whether a case is checked on this day though its verdict is known."""
    return zlib.crc32(case.encode()) % EVERY == day.toordinal() % EVERY


def fingerprint(check: str, operation: str) -> str:
    """Hash all that a verdict depends on: the sources that the operation's cases and the check
    reach, the versions of what runs them, the assembler's."""
    parts = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    parts += [f"{name} {version(name)}" for name in _VERSIONS[check]]
    parts += [Path(__file__).with_name(name).read_text() for name in _TEXTS[check]]
    roots = (f"pallas_kernels.{operation}.cases", f"pallas_kernels.check.{check}")
    parts += [file.read_text() for file in sources(*roots)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sources(*modules: str) -> list[Path]:
    """List the files that modules import, themselves included, inside of functions, too."""
    return sorted(map(file_of, closure(modules, inside=("pallas_kernels",))))


@cache
def _kept() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check.verdicts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []])
    asked = parser.parse_args().operations
    kept = _kept()
    for check in CHECKS:
        for operation in asked or OPERATIONS:
            if not asked and known(check, operation):
                continue
            print(f"{check} {operation}", flush=True)
            names = [case.name for case in chosen(check, operation)]
            kept.setdefault(check, {})[operation] = {
                "fingerprint": fingerprint(check, operation),
                "results": run(check, operation, *names),
            }
            FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
