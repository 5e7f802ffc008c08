"""Results of `fp8rl compare --json .../compare.json`, found and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError

FILE = "compare.json"
KIND, VERSION = "fp8rl compare", 1
_NUMBER, _TEXT = (int, float, type(None)), (str, type(None))
_DIFFERENCE = {"differing": (int, float), "relative_error": _NUMBER}
_OPERATION = {"name": str, "cause": str, "detail": str, "output": _DIFFERENCE, "own": _DIFFERENCE}
_SIDE = {"model": str, "recipe": str, "phase": str, "compute_dtype": str, "exact": bool}
_LOGPROBS = {
    "tokens": int,
    "differing": (int, float),
    "row": int,
    "position": int,
    "text": _TEXT,
} | dict.fromkeys(("mean_abs", "max_abs", "k3", "a", "b"), _NUMBER)
_RECORDED = {"key": str, "a": _LOGPROBS, "b": _LOGPROBS}
_PATTERN = {
    "equal": bool,
    "sides": [_SIDE],
    "tokens": dict.fromkeys(("rows", "rows_given", "prompt", "completion", "given"), int),
    "first": [dict.fromkeys(("name", "cause", "detail", "where"), str)],
    "quantized_on_one_side": {"a": [str], "b": [str]},
    "logprobs": _LOGPROBS,
    "layers": [
        {"name": str, "rerouted": _NUMBER, "input": _DIFFERENCE, "operations": [_OPERATION]}
    ],
    "end": [_OPERATION],
}


def find_comparisons(directories: Iterable[Path]) -> list[Path]:
    """The files `compare.json` in `directories` and right below them."""
    found: dict[Path, None] = {}
    for directory in directories:
        if directory.is_dir():
            below = sorted(child for child in directory.iterdir() if child.is_dir())
            places = (place / FILE for place in (directory, *below))
            found |= dict.fromkeys(path.resolve() for path in places if path.is_file())
    return list(found)


def read_comparison(path: Path) -> dict[str, Any]:
    """The results in `path`, in the form that `compare.document` describes.

    Raises:
        UserError: it is not such a file, or of another version.
    """
    try:
        results = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if (
        not isinstance(results, dict)
        or results.get("kind") != KIND
        or results.get("version") != VERSION
    ):
        raise UserError(
            f"{path}: not written by this version's `fp8rl compare --json`; run it again"
        )
    pattern = _PATTERN if results.get("recorded") is None else _PATTERN | {"recorded": _RECORDED}
    if fault := _misfit(results, pattern, ""):
        raise UserError(f"{path}: {fault}; run `fp8rl compare --json` again")
    return results


def _misfit(value: Any, pattern: Any, where: str) -> str:
    """What is not as `pattern` says, "" where all is: a type or several, [pattern of each], or
    {key: pattern}."""
    if isinstance(pattern, list):
        faults = (
            (_misfit(x, pattern[0], f"{where}[{i}]") for i, x in enumerate(value))
            if isinstance(value, list)
            else [where]
        )
    elif isinstance(pattern, dict):
        if not isinstance(value, dict):
            return f"{where or 'the file'} is no table"
        faults = (
            _misfit(value.get(key), inner, f"{where}.{key}".lstrip("."))
            for key, inner in pattern.items()
        )
    else:
        return "" if isinstance(value, pattern) else f"{where} is missing or of another kind"
    return next(filter(None, faults), "")
