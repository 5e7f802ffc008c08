"""A comparison on a terminal of 100 columns: a paragraph, and a row for each layer."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8rl_jax.compare.linears import Row, difference_text, grouped, rows_text
from fp8rl_jax.config.run import precision_text

_EQUAL = "·"
WIDTH = 100
LETTERS = {"format": "f", "operand": "o", "scale": "s", "reduction": "r", "input": "i", "": ""}
# (heading, operations that may stand under it)
COLUMNS = (
    ("q", ("q_proj", "q_b_proj")),
    ("k", ("k_proj", "kv_a_proj_with_mqa")),
    ("v", ("v_proj",)),
    ("attend", ("attention",)),
    ("o", ("o_proj",)),
    ("router", ("router",)),
    ("gate", ("gate_proj", "experts.gate_proj", "shared_experts.gate_proj")),
    ("up", ("up_proj", "experts.up_proj", "shared_experts.up_proj")),
    ("down", ("down_proj", "experts.down_proj", "shared_experts.down_proj")),
)
OTHERS = "rest"
_LEGEND = """in: relative error ||a - b|| / ||a|| of the hidden states that enter the layer, piled up. The others: what an
operation adds by itself, on side a's input, and why: f format, o operand, s scale, r reduction, i input. {equal}: every bit
is equal. rest: norms, activation, sums."""


def summary(results: dict[str, Any]) -> str:
    """Write the text of a comparison, from the form of `compare.comparison.document`."""
    lines = [
        f"{name}: {side['model']}, {side_text(side)}"
        for name, side in zip("ab", results["sides"], strict=True)
    ]
    lines += [_tokens(results["tokens"]), ""]
    if results["equal"]:
        lines.append("every bit is equal: operands, results, hidden states, log-probabilities")
    for first in results["first"]:
        where = f", in the {first['where']}" if first["where"] else ""
        lines += _wrapped(f"first {first['cause']}: {first['name']}{where}: {first['detail']}")
    lines.append(_logprobs("log-probabilities", "a - b", results["logprobs"]))
    if sharp := results.get("sharpness"):  # a file of an earlier version has none
        values = ", ".join(
            f"{number(of_a)} and {number(sharp['b'][name])} ({name.partition('/')[2]})"
            for name, of_a in sharp["a"].items()
        )
        lines += _wrapped(f"sharpness of the loss, % (half width of the box): {values}")
    if recorded := results.get("recorded"):
        key = recorded["key"]
        lines += [
            _logprobs(f"{key} against side {side}", f"{key} - {side}", recorded[side])
            for side in "ab"
        ]
    for line in rows_text(_rows(results), ("a", "b"), len(results["layers"])):
        lines += [line] if line.startswith(" ") else _wrapped(line)
    for line in sets(results):
        lines += _wrapped(line)
    lines += ["", _table(results), "", *_wrapped(_LEGEND.format(equal=_EQUAL), indent="")]
    for name, arrived in zip("ab", results.get("arrived", ()), strict=False):
        lines += ["", _arrived(name, arrived)]
    return "\n".join(lines)


def side_text(side: dict[str, Any]) -> str:
    """Describe a side without its model: "trainer of the jet-rl recipe, bfloat16 compute, exact"."""
    exact = ", exact" if side["exact"] else ""
    return f"{side['phase']} of the {precision_text(side['recipe'], side['compute_dtype'])}{exact}"


def columns(results: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """List this model's columns, and last the operations that have no column of their own."""
    operations = (operation for layer in results["layers"] for operation in layer["operations"])
    present = list(dict.fromkeys(operation["name"] for operation in operations))
    shown = [(heading, names) for heading, names in COLUMNS if set(names) & set(present)]
    named = {name for _, names in shown for name in names}
    return [*shown, (OTHERS, tuple(name for name in present if name not in named))]


def worst(
    layer: dict[str, Any], names: tuple[str, ...], measured: str = "own"
) -> dict[str, Any] | None:
    """Find the operation with the largest error among those of a layer with these names.

    None where it has none of them.
    """
    candidates = [operation for operation in layer["operations"] if operation["name"] in names]
    if not candidates:
        return None
    return max(
        candidates, key=lambda x: (measured == "own" and bool(x["cause"]), _size(x[measured]))
    )


def sets(results: dict[str, Any]) -> list[str]:
    """Say whether the sides quantize the same linears and operands of attention, and else which one
    of them alone."""
    layers, rows = len(results["layers"]), results.get("linears", [])
    linears = [name for row in rows for name in row["names"]]
    quantized = [[x for row in rows if row[side] for x in row["names"]] for side in "ab"]
    lines = difference_text(quantized, ("a", "b"), linears, layers) if linears else []
    for side, alone in results["quantized_on_one_side"].items():
        if others := [name for name in alone if name not in {*linears}]:
            lines.append(f"only {side} quantizes {grouped(others, layers)}")
    return lines


def error(difference: dict[str, Any]) -> str:
    """Format a relative error in three to five characters."""
    if difference["differing"] == 0:
        return _EQUAL
    value = difference["relative_error"]
    return "inf" if value is None else re.sub(r"e([+-])0", r"e\1", f"{value:.0e}")


def _rows(results: dict[str, Any]) -> list[Row]:
    """The linears; a file of an earlier version has none."""
    dtypes = [side["compute_dtype"] for side in results["sides"]]
    return [
        Row(row["names"], row["a"] or dtypes[0], row["b"] or dtypes[1])
        for row in results.get("linears", ())
    ]


def _table(results: dict[str, Any]) -> str:
    shown = columns(results)
    rerouted = any(layer["rerouted"] is not None for layer in results["layers"])
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right")
    for heading in ("in", *(heading for heading, _ in shown), *(["rerouted"] if rerouted else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, layer in enumerate(results["layers"]):
        cells = [error(layer["input"])]
        for _, names in shown:
            operation = worst(layer, names)
            cells.append("" if operation is None else _cell(operation))
        if rerouted:
            part = layer["rerouted"]
            cells.append("" if part is None else f"{part:.1%}" if part else _EQUAL)
        table.add_row(str(i), *cells)
    table.add_row("end", error(results["end"][0]["output"]))
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _arrived(side: str, kinds: dict[str, dict[str, float | None]]) -> str:
    """The table of `side.update_served`."""
    names = [*next(iter(kinds.values()))]
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column(f"update served by {side}")
    for name in names:
        table.add_column(name, justify="right")
    for kind, found in kinds.items():
        cells = ("-" if found[name] is None else f"{found[name]:.3g}" for name in names)
        table.add_row(kind, *cells)
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(operation: dict[str, Any]) -> str:
    return error(operation["own"]) + LETTERS[operation["cause"]]


def _tokens(tokens: dict[str, Any]) -> str:
    left = f" of {tokens['rows_given']}" if tokens["rows_given"] > tokens["rows"] else ""
    rows = f"{tokens['rows']}{left} row{'s' if tokens['rows_given'] > 1 else ''}"
    return (
        f"{rows}: {tokens['prompt']} prompt and {tokens['completion']} completion tokens of "
        f"{tokens['given']}"
    )


def _logprobs(name: str, difference: str, x: dict[str, Any]) -> str:
    if not x["differing"]:
        return f"{name} of {x['tokens']} tokens: equal"
    text = "" if x["text"] is None else f" {x['text']!r}"
    mean, k3 = number(x["mean_abs"]), number(x["k3"])
    return (
        f"{name} of {x['tokens']} tokens: {x['differing']:.0%} differ, mean |{difference}| {mean}, "
        f"k3 {k3}\n"
        f"  largest {number(x['max_abs'])}, row {x['row'] + 1}, completion token "
        f"{x['position'] + 1}{text}: {number(x['a'], 4)} and {number(x['b'], 4)}"
    )


def number(value: float | None, digits: int = 2) -> str:
    """Format a number; None is one that was not finite."""
    return "not finite" if value is None else f"{value:.{digits}g}"


def _size(difference: dict[str, Any]) -> float:
    value = difference["relative_error"]
    return float("inf") if value is None else value
