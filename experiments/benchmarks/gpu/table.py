"""The short table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from experiments.benchmarks.gpu.figures import FIGURES, Records


def show(records: Records, console: Console) -> None:
    """Figures against their targets, then what was checked, and what failed or was skipped."""
    table = Table(title="One GPU against the targets; of several shapes, the least", title_justify="left")
    for name in ("figure", "must", "aim", "measured", "at", "status"):
        table.add_column(name, justify="right" if name in ("must", "aim", "measured") else "left")
    for figure in FIGURES:
        found = figure.measured(records)
        value, at = ("", "") if found is None else (_number(found[0], figure.unit), found[1])
        must, aim = (_number(target, figure.unit) for target in (figure.must, figure.aim))
        table.add_row(figure.name, must, aim, value, at, figure.status(records))
    console.print(table)
    if not all(record["counts"] for record in records.values()):
        console.print("In miniature: no figure counts.")
    for line in summary(records):
        console.print(line, markup=False, highlight=False)


def summary(records: Records) -> list[str]:
    """One line a part, and one for each result that is wrong or failed."""
    lines = []
    for part, record in records.items():
        results, failed, skipped = record["results"], record["failed"], record["skipped"]
        wrong = [label for label, result in results.items() if result.get("passed") is False]
        counts = [f"{len(results)} measured", f"{len(wrong)} wrong", f"{len(failed)} failed", f"{len(skipped)} skipped"]
        lines.append(f"{part}: {', '.join(count for count in counts if not count.startswith('0 '))}")
        lines += [f"  wrong: {label}" for label in wrong] + [f"  failed: {label}: {reason}" for label, reason in failed.items()]
        for label, result in results.items():
            ways = result.get("failed", {})
            lines += [f"  {label}: without {way}: {reason}" for way, reason in ways.items()]
            behind = [way for way, ahead in result.get("host_was_ahead", {}).items() if not ahead and record["counts"]]
            lines += [f"  {label}: {way}: the host was not ahead of the device" for way in behind]
    return lines


def _number(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:,.0f} {unit}" if unit != "%" else f"{value:.0f}%"
