"""What the page shows of `fp8rl compare --json .../compare.json`: findings, and heat maps.

A file is checked before it is drawn. A heat map has a cell for each layer and operation.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fp8rl_jax.compare.text import LETTERS, columns, number, sets, side_text, summary, worst
from fp8rl_jax.errors import UserError
from fp8rl_jax.report.charts import Chart, draw_svg

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


def read_comparison(path: Path) -> dict[str, Any]:
    """Read the results in `path`, in the form at the top of `compare.comparison`.

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
    if fault := misfit(results, pattern, ""):
        raise UserError(f"{path}: {fault}; run `fp8rl compare --json` again")
    return results


def misfit(value: Any, pattern: Any, where: str) -> str:
    """Name the first part of `value` that is not as `pattern` says; "" where all is.

    Args:
        pattern: a type or several, [pattern of each], or {key: pattern}.
        where: path of `value` in the file; "" of the whole.
    """
    if isinstance(pattern, list):
        faults = (
            (misfit(x, pattern[0], f"{where}[{i}]") for i, x in enumerate(value))
            if isinstance(value, list)
            else [where]
        )
    elif isinstance(pattern, dict):
        if not isinstance(value, dict):
            return f"{where or 'the file'} is no table"
        faults = (
            misfit(value.get(key), inner, f"{where}.{key}".lstrip("."))
            for key, inner in pattern.items()
        )
    else:
        return "" if isinstance(value, pattern) else f"{where} is missing or of another kind"
    return next(filter(None, faults), "")


_LOWEST = -8  # log10 of the relative error that has the faintest colour; float32 rounds at -7.2
FAINTEST = 0.1


@dataclass(frozen=True)
class Panel:
    """What the page shows of one comparison."""

    title: str
    headline: str
    findings: list[tuple[str, str, str]]
    """(cause, operation, detail) of the first difference of each cause."""
    sets: list[str]
    """Whether the sides quantize the same linears and operands of attention, or which one side
    alone."""
    charts: list[Chart]
    text: str


def panel(index: int, results: dict[str, Any]) -> Panel:
    """Make the panel of one comparison.

    `index` keeps its charts apart from those of others.
    """
    a, b = map(side_text, results["sides"])
    models = list(dict.fromkeys(side["model"] for side in results["sides"]))
    logprobs, tokens = results["logprobs"], results["tokens"]
    headline = f"{' and '.join(models)}, {tokens['prompt'] + tokens['completion']} tokens. "
    if logprobs["differing"]:
        headline += (
            f"Log-probabilities: k3 {number(logprobs['k3'])}, largest difference "
            f"{number(logprobs['max_abs'])}."
        )
    else:
        headline += "Log-probabilities are equal bit for bit."
    if recorded := results.get("recorded"):
        k3 = " and ".join(f"{number(recorded[side]['k3'])} to side {side}" for side in "ab")
        headline += f" Recorded by another engine ({recorded['key']}): k3 {k3}."
    return Panel(
        f"{a[0].upper()}{a[1:]}, against {b}",
        headline,
        [(x["cause"], x["name"], x["detail"]) for x in results["first"]],
        [f"{line[0].upper()}{line[1:]}." for line in sets(results)],
        [_heat_map(index, results, "own"), _heat_map(index, results, "output")],
        summary(results),
    )


def _heat_map(index: int, results: dict[str, Any], measured: str) -> Chart:
    """A cell for each layer and operation, the darker the larger the relative error, by its
    logarithm."""
    layers = results["layers"]
    shown = columns(results)
    headings = [*(["in"] if measured == "output" else []), *(heading for heading, _ in shown)]
    height = min(0.16, 6.0 / len(layers))

    def draw(axes: Axes) -> None:
        for row, layer in enumerate(layers):
            cells: list[tuple[dict[str, Any] | None, str]] = []
            if measured == "output":
                cells.append((layer["input"], ""))
            for _, names in shown:
                operation = worst(layer, names, measured)
                cause = operation["cause"] if operation and measured == "own" else ""
                cells.append((operation and operation[measured], LETTERS.get(cause, "")))
            for column, (numbers, letter) in enumerate(cells):
                if numbers is not None and numbers["differing"]:
                    opacity = _opacity(numbers["relative_error"])
                    axes.add_patch(
                        Rectangle(
                            (column, row), 0.94, 0.9, color="#0a0c00", alpha=opacity, linewidth=0
                        )
                    )
                    if letter and height > 0.1:
                        axes.text(
                            column + 0.47, row + 0.5, letter, ha="center", va="center", fontsize=5.5
                        )
                elif numbers is not None:
                    axes.text(column + 0.47, row + 0.5, "·", ha="center", va="center", fontsize=7)
        axes.set_xlim(0, len(headings))
        axes.set_ylim(len(layers) + 2.2, 0)
        axes.set_xticks([column + 0.47 for column in range(len(headings))], headings)
        axes.xaxis.tick_top()
        step = max(1, len(layers) // 10)
        axes.set_yticks(
            [row + 0.45 for row in range(0, len(layers), step)],
            [str(row) for row in range(0, len(layers), step)],
        )
        axes.set_ylabel("layer")
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        width = len(headings) / (1 - _LOWEST)
        for power in range(_LOWEST, 1):  # the key to the colours
            left = (power - _LOWEST) * width
            opacity = _opacity(10.0**power)
            axes.add_patch(
                Rectangle(
                    (left, len(layers) + 0.6),
                    width * 0.96,
                    0.7,
                    color="#0a0c00",
                    alpha=opacity,
                    linewidth=0,
                )
            )
            axes.text(
                left + width / 2,
                len(layers) + 1.8,
                f"1e{power}",
                ha="center",
                va="center",
                fontsize=6.5,
            )

    about = {
        "own": "Relative error that an operation adds by itself, on side a's input. f format, o "
        "operand, s scale, r reduction, "
        "i input. A dot: every bit is equal.",
        "output": "Relative error of what has piled up until there; in: of the hidden states "
        "that enter the layer.",
    }
    title = {"own": "Own error", "output": "Piled up"}[measured]
    svg = draw_svg(f"compare {index} {measured}", draw, height=0.5 + height * (len(layers) + 2.2))
    return Chart(f"compare-{index}-{measured}", title, about[measured], svg)


def _opacity(relative_error: float | None) -> float:
    if relative_error is None or relative_error >= 1:
        return 1.0
    part = 1 - math.log10(max(relative_error, 10.0**_LOWEST)) / _LOWEST
    return FAINTEST + (1 - FAINTEST) * part
