"""The figures that this library wants to reach on one H200, and what the parts' files say about
each: a table, and a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.benchmarks.gpu import attention, copying, grouped, products
from experiments.benchmarks.gpu.timing import median_ratio

STEP, STEP_BF16, STEP_FP8 = "GRPO step", "fp8rl_jax/bf16", "fp8rl_jax/fp8-e2e-kv"
EXACT, PLAIN_STEP, EXACT_STEP = (
    "GRPO step, exact",
    "fp8rl_jax/jet-rl-plain",
    "fp8rl_jax/jet-rl-exact",
)
DECODE, DECODE_BF16, DECODE_BOTH = "128 x 2048", "bf16", "FP8 weights and cache"
"""Of the parts `step`, `exact` and `decode`, whose modules need more packages than JAX: the result,
and the sides in it."""
Records = dict[str, dict[str, Any]]
"""Part -> its file's record."""
Measured = tuple[float, str]
"""A value, and which result it is of."""


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        name: what it says.
        must, aim: above them it is good.
        unit: "x", "TFLOP/s", "%".
        values: of the records; the least counts.
    """

    name: str
    must: float
    aim: float
    unit: str
    values: Callable[[Records], Iterator[Measured]]

    def measured(self, records: Records) -> Measured | None:
        """The least of its values; None where there is none."""
        return min(self.values(records), default=None)

    def status(self, records: Records) -> str:
        """Say "met", "met, aim too", "missed", or "not measured".

        The last holds for all that was measured in miniature.
        """
        least = self.measured(records)
        if least is None or not all(record["counts"] for record in records.values()):
            return "not measured"
        return (
            "missed" if least[0] < self.must else "met, aim too" if least[0] >= self.aim else "met"
        )


def summary(records: Records) -> list[dict[str, Any]]:
    """All figures, for a file."""
    rows = []
    for figure in FIGURES:
        value, at = figure.measured(records) or (None, None)
        kept = {"figure": figure.name, "must": figure.must, "aim": figure.aim, "unit": figure.unit}
        rows.append(kept | {"measured": value, "at": at, "status": figure.status(records)})
    return rows


def _results(records: Records, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from records.get(part, {}).get("results", {}).items()


def _copied(records: Records) -> float | None:
    copied = records.get("copy", {}).get("results", {}).get(copying.LABEL)
    return copied["bytes_per_second"]["copy"]["median"] if copied else None


def _many_rows(ours: str) -> Callable[[Records], Iterator[Measured]]:
    """Qwen3-8B's linears at 4096 rows."""
    shapes = [list(shape) for shape in products.MANY_ROWS if shape[1] != 7168]

    def values(records):
        for label, result in _results(records, "matmul"):
            ratio = median_ratio(result, products.BF16, ours)
            if result["shape"] in shapes and result["forward"] and ratio is not None:
                yield ratio, label

    return values


def _long_contraction(records: Records) -> Iterator[Measured]:
    for label, result in _results(records, "matmul"):
        if result["shape"] == [4096, 7168, 16384] and products.OURS in result["tflops"]:
            yield result["tflops"][products.OURS]["median"], label


def _few_rows(records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    for label, result in _results(records, "matmul"):
        if result["shape"][0] <= 128 and result["weight_bytes"] >= 64e6:
            yield label, result


def _few_rows_bytes(records: Records) -> Iterator[Measured]:
    yield from _parts_of_copy(records, _few_rows(records), products.OURS)


def _few_rows_ratio(records: Records) -> Iterator[Measured]:
    for label, result in _few_rows(records):
        if (ratio := median_ratio(result, products.BF16, products.OURS)) is not None:
            yield ratio, label


def _grid(records: Records) -> Iterator[tuple[str, dict[str, Any]]]:
    return (
        (label, result)
        for label, result in _results(records, "attention")
        if "best_bf16_over_ours" in result
    )


def _attention_bytes(records: Records) -> Iterator[Measured]:
    yield from _parts_of_copy(records, _grid(records), attention.OURS)


def _attention_ratio(records: Records) -> Iterator[Measured]:
    for label, result in _grid(records):
        if result["best_bf16_over_ours"] is not None and attention.OURS in result["seconds"]:
            yield result["best_bf16_over_ours"], label


def _parts_of_copy(
    records: Records, results: Iterator[tuple[str, dict[str, Any]]], ours: str
) -> Iterator[Measured]:
    copied = _copied(records)
    for label, result in results:
        if copied and ours in result["bytes_per_second"]:
            yield 100 * result["bytes_per_second"][ours]["median"] / copied, label


def _grouped(records: Records) -> Iterator[Measured]:
    for label, result in _results(records, "grouped"):
        ratio = median_ratio(result, grouped.DENSE, grouped.OURS)
        if label == "8-groups" and ratio is not None:
            yield ratio, label


def _phase(
    phase: str, over: str = STEP_BF16, under: str = STEP_FP8, part: str = "step", step: str = STEP
) -> Callable[[Records], Iterator[Measured]]:
    def values(records):
        for label, result in _results(records, part):
            for ratio in result["ratios"] if label == step else ():
                if (ratio["over"], ratio["under"], ratio["part"]) == (over, under, phase):
                    yield ratio["median"], result["workload"]["name"]

    return values


def _decoded(records: Records) -> Iterator[Measured]:
    for label, result in _results(records, "decode"):
        ratio = median_ratio(result, DECODE_BF16, DECODE_BOTH)
        if label == DECODE and ratio is not None:
            yield ratio, label


def _decoded_bytes(records: Records) -> Iterator[Measured]:
    copied = _copied(records)
    for label, result in _results(records, "decode"):
        if copied and DECODE_BOTH in result["read_bytes_per_second"]:
            yield 100 * result["read_bytes_per_second"][DECODE_BOTH] / copied, label


_exact_phase = partial(_phase, over=PLAIN_STEP, under=EXACT_STEP, part="exact", step=EXACT)

FIGURES = (
    Figure(
        "matmul, M=4096, Qwen3-8B / XLA bf16, quantized beforehand",
        1.5,
        1.9,
        "x",
        _many_rows(products.OURS),
    ),
    Figure("the same with quantization", 1.3, 1.6, "x", _many_rows(products.WITH_QUANTIZATION)),
    Figure("matmul, M=4096 N=7168 K=16384", 1150, 1550, "TFLOP/s", _long_contraction),
    Figure(
        "matmul, M=1..128, weights of 64 MB and more: bytes / copy", 70, 90, "%", _few_rows_bytes
    ),
    Figure("the same / XLA bf16", 1.5, 1.9, "x", _few_rows_ratio),
    Figure("decode attention, FP8 KV: bytes / copy", 70, 90, "%", _attention_bytes),
    Figure("the same / best bf16", 1.5, 1.9, "x", _attention_ratio),
    Figure("grouped, 8 groups, M=4096 in all / dense of the same work", 0.85, 0.95, "x", _grouped),
    Figure("training step FP8 / BF16, 8B-shaped stack", 1.15, 1.45, "x", _phase("train")),
    Figure("GRPO step FP8 end to end / BF16", 1.1, 1.35, "x", _phase("seconds")),
    Figure("decode, 8B-shaped, 128 x 2048: FP8 weights and cache / bf16", 1.3, 1.8, "x", _decoded),
    Figure("decode, FP8 weights and cache: bytes / copy", 50, 70, "%", _decoded_bytes),
    Figure("GRPO step under jet-rl, exact / not", 0.67, 0.9, "x", _exact_phase("seconds")),
    Figure("its rollout", 0.67, 0.9, "x", _exact_phase("gen")),
)


def show(records: Records, console: Console) -> None:
    """Figures against their targets, then what was checked, and what failed or was skipped."""
    table = Table(
        title="One GPU against the targets; of several shapes, the least", title_justify="left"
    )
    for name in ("figure", "must", "aim", "measured", "at", "status"):
        table.add_column(name, justify="right" if name in ("must", "aim", "measured") else "left")
    for figure in FIGURES:
        least = figure.measured(records)
        value, at = ("", "") if least is None else (_number(least[0], figure.unit), least[1])
        must, aim = (_number(target, figure.unit) for target in (figure.must, figure.aim))
        table.add_row(figure.name, must, aim, value, at, figure.status(records))
    console.print(table)
    if not all(record["counts"] for record in records.values()):
        console.print("In miniature: no figure counts.")
    for line in lines_of(records):
        console.print(line, markup=False, highlight=False)


def lines_of(records: Records) -> list[str]:
    """One line a part, and one for each result that is wrong or failed."""
    lines = []
    for part, record in records.items():
        results, failed, left = record["results"], record["failed"], record["left"]
        wrong = [label for label, result in results.items() if result.get("passed") is False]
        counts = [
            f"{len(results)} measured",
            f"{len(wrong)} wrong",
            f"{len(failed)} failed",
            f"{len(left)} left",
        ]
        lines.append(
            f"{part}: {', '.join(count for count in counts if not count.startswith('0 '))}"
        )
        lines += [f"  wrong: {label}" for label in wrong]
        lines += [f"  failed: {label}: {why['reason']}" for label, why in failed.items()]
        for label, result in results.items():
            ways = result.get("failed", {})
            lines += [f"  {label}: without {way}: {reason}" for way, reason in ways.items()]
            behind = [
                way
                for way, ahead in result.get("host_was_ahead", {}).items()
                if not ahead and record["counts"]
            ]
            lines += [f"  {label}: {way}: the host was not ahead of the device" for way in behind]
    return lines


def _number(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:,.0f} {unit}" if unit != "%" else f"{value:.0f}%"
