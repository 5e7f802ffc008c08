"""What the slowest checks of whole programs found, kept with a fingerprint of all that it depends
on: `make kept`.

Golden runs of every record, and programs of exact mode for Hopper, were a fifth of the tests' time,
and give the same again as long as the code, JAX and the assembler are the same. So kept.json has
what was found, and its fingerprint: where that is the same, a test takes what is kept, but for a
sixteenth of them that changes from day to day (`make test ALL=1` checks everything). What has no
fingerprint that holds is checked, kept or not; `make kept` then writes it down.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from pallas_kernels.check.sources import closure, file_of
from pallas_kernels.check.verdicts import due

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".json")
ALL, WRITES = "FP8RL_ALL_CHECKS", "FP8RL_KEEP"
PACKAGES = ("fp8rl_jax", "pallas_kernels")
WHOLE = ("config", "models", "precision", "rl", "rollout")
"""Folders of fp8rl_jax that count whole: what registers itself is imported by no name."""
EVERY = 16
"""What is kept is checked all the same every so many days, an alone one as a kernel's verdict is."""
_VERSIONS = ("jax", "jaxlib", "numpy", "ml_dtypes", "optax", "flax")


def found(
    kind: str,
    parts: Mapping[str, str],
    modules: Sequence[str],
    make: Callable[[list[str]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Find what checks of a kind find, by name: kept where it holds, and else made.

    Args:
        kind: of checks.
        parts: by name, what each depends on beside the code.
        modules: the code; what they import from the two packages counts, too.
        make: finds what some of them find, as JSON has it.
    """
    writes = bool(os.environ.get(WRITES))
    known = {} if os.environ.get(ALL) else _kept().get(kind, {})
    marks = {name: fingerprint(tuple(modules), part) for name, part in parts.items()}
    holds = {
        name
        for name, mark in marks.items()
        if known.get(name, {}).get("fingerprint") == mark
        and (writes or not is_due(kind, name, parts, date.today()))
    }
    fresh = [name for name in parts if name not in holds]
    made = dict(make(fresh)) if fresh else {}
    if writes:
        _write(kind, {name: {"fingerprint": marks[name], "found": made[name]} for name in made})
    return {name: made[name] if name in made else known[name]["found"] for name in parts}


def is_due(kind: str, name: str, parts: Mapping[str, str], day: date) -> bool:
    """Whether a check is made on this day though what it finds is known: of several of a kind
    about as many each day."""
    if len(parts) == 1:
        return due(f"{kind} {name}", day)
    return sorted(parts).index(name) % EVERY == day.toordinal() % EVERY


def fingerprint(modules: tuple[str, ...], part: str) -> str:
    """Hash code, versions, and what a check depends on besides."""
    return hashlib.sha256(f"{_code(modules)}\0{part}".encode()).hexdigest()[:16]


@cache
def _code(modules: tuple[str, ...]) -> str:
    """A hash of the modules and all that they reach, and of every file of data in the packages.
    Comments, docstrings and the layout do not count."""
    digest = hashlib.sha256(f"Python {sys.version_info.major}.{sys.version_info.minor}".encode())
    for name in _VERSIONS:
        digest.update(f"\0{name} {version(name)}".encode())
    reached = {file_of(x, ROOT) for x in closure(modules, ROOT, inside=PACKAGES)}
    for file in sorted({*reached, *_always()}):
        if file.suffix == ".py":
            text = ast.dump(_undocumented(ast.parse(file.read_text())))
        else:
            text = file.read_text()
        digest.update(f"\0{file.relative_to(ROOT)}\0{text}".encode())
    return digest.hexdigest()


def _always() -> Iterator[Path]:
    yield from (ROOT / "pallas_kernels").rglob("*.py")
    for folder in WHOLE:
        yield from (ROOT / "fp8rl_jax" / folder).rglob("*.py")
    for package in PACKAGES:
        for suffix in ("toml", "c", "h", "txt", "txtpb"):
            yield from (ROOT / package).rglob(f"*.{suffix}")


def _undocumented(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                x
                for x in body
                if not (
                    isinstance(x, ast.Expr)
                    and isinstance(x.value, ast.Constant)
                    and isinstance(x.value.value, str)
                )
            ]
    return tree


def _read() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


_kept = cache(_read)


def _write(kind: str, made: Mapping[str, Any]) -> None:
    lock = ROOT / ".cache" / "kept.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):
        kept = _read()
        kept[kind] = dict(sorted({**kept.get(kind, {}), **made}.items()))
        FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
